/* Workspaces of cuDNN: no document states them. The rules follow what cuDNN 9.19 asked for on one H200 under torch 2.11:
 * 492 operators, forward and backward (benchmarks/gpu/h200/workspaces.jsonl.xz; workspaces.md says how near each comes).
 *
 * Exact there: the copies. Tensor cores read channels-last, so a convolution of contiguous images copies what it reads
 * and what it writes; few channels are padded to 16 bytes. Nearest, by the simplest rule that the rows bear: in how many
 * parts a filter's gradient is summed. Not known: other cards and versions, float64, fused graphs, kernels chosen by
 * trying (cudnn.benchmark), a batch of one row. */
#include "cudnn.h"

enum { SMS = 132, TILE = 128, WIDE_TILE = 192, MIBS_64 = 64 << 20 };
static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t parts(int64_t n, int64_t each) { return (n + each - 1) / each; }
static int64_t up(int64_t n, int64_t each) { return parts(n, each) * each; }

static int64_t pixels(const struct tensor *t) {
  int64_t n = 1;
  for (int k = 2; k < t->num_dims; k++) n *= t->dims[k];
  return n;
}
struct convolution convolution_of(enum pass pass, const struct tensor *x, const struct tensor *w,
                                  const struct tensor *y, int64_t stride) {
  if (x->num_dims < 3 || w->num_dims < 3 || y->num_dims < 3 || w->dims[1] < 1) return (struct convolution){0};
  bool strided = stride > 1, overlaps = w->dims[w->num_dims - 1] > stride;
  return (struct convolution){pass, x->type, x->strides[1] == 1 && x->dims[1] > 1, strided, overlaps, x->dims[0],
                              x->dims[1], y->dims[1], x->dims[1] / w->dims[1], pixels(x), pixels(y), pixels(w)};
}

struct sizes {
  int64_t x, w, y, w_float; /* bytes; w_float: the filter's gradient as it is summed */
};
static struct sizes sizes_of(const struct convolution *c, int64_t in, int64_t out) {
  int64_t each = type_bytes(c->type), taps = out * (in / c->groups) * c->taps;
  return (struct sizes){c->rows * in * c->x_pixels * each, taps * each, c->rows * out * c->y_pixels * each, taps * 4};
}

/* Products of matrices: one tap, no step. Contiguous images are a batch of them where a row is aligned to 8 bytes: the
 * filter's gradient then has a copy for each image. */
static int64_t of_matrices(const struct convolution *c, struct sizes s) {
  bool wide = c->type == FLOAT32;
  int64_t tiles = parts(c->out, TILE) * parts(c->in, TILE), summed = c->rows * c->y_pixels;
  bool aligned = c->x_pixels * type_bytes(c->type) % 8 == 0;
  int64_t copied = c->rows * s.w_float; /* seen up to 2.09 times x and y */
  bool batched = aligned && (c->pass != PASS_FILTER || (copied + !wide <= MIBS_64 && copied <= (s.x + s.y) * 21 / 10));
  if (!c->channels_last && !batched) return s.x + s.y + 16;
  if (c->pass != PASS_FILTER) return wide && c->rows > 1 ? 400 : 0;
  if (!c->channels_last) return copied;
  int64_t copies = wide ? least(2 * SMS / tiles, summed / 87) : least(SMS / tiles, summed / 1393);
  if (summed < 1000) copies = 0;
  return copies > 1 ? copies * s.w_float + (wide ? 256 : 272) : 0;
}

/* Channels that do not fill 16 bytes are padded; of channels-last images only those. */
static int64_t of_few_channels(const struct convolution *c) {
  bool wide = c->type == FLOAT32, half = c->type == 2;
  int64_t full = 16 / type_bytes(c->type), summed = c->rows * c->y_pixels;
  if (half && c->strided && c->overlaps && c->pass != PASS_DATA) full = 4;
  struct sizes s = sizes_of(c, c->in, c->out), p = sizes_of(c, up(c->in, full), up(c->out, full));
  bool x_is_copied = !c->channels_last || c->in % full, y_is_copied = !c->channels_last || c->out % full;
  int64_t padded = (x_is_copied ? p.x : 0) + p.w + (y_is_copied ? p.y : 0);
  if (c->pass == PASS_FORWARD) {
    if (!c->strided && c->in < full && (!c->channels_last || half)) return 0;
    return (wide ? (x_is_copied ? s.x : 0) + s.w + (y_is_copied ? s.y : 0) : padded) + 16;
  }
  if (c->pass == PASS_DATA) {
    bool contiguous_kernel = !c->overlaps || (wide && c->strided); /* reads contiguous images */
    if (contiguous_kernel || (wide && !c->channels_last)) return c->channels_last ? s.x + s.w + s.y + 16 : 0;
    return padded + (c->strided ? 4 * p.w + 16 : 147);
  }
  if (wide && !c->strided) return 0;
  int64_t tiles = parts(c->out, TILE) * parts(up(c->in, full) * c->taps, 2 * TILE), copies;
  if (wide) copies = c->overlaps ? least(120 / tiles, summed / 3460) : 0;
  else if (half && full == 4) copies = least(8, summed / 50176);
  else copies = least(most(122 / tiles, 3), summed / 660);
  return (wide ? p.x + p.w + p.y : padded) + copies * p.w_float + 144;
}

/* The parts in which implicit products of matrices sum a filter's gradient. */
static int64_t of_summing(const struct convolution *c) {
  bool wide = c->type == FLOAT32;
  int64_t width = c->in * c->taps, summed = c->rows * c->y_pixels, copies;
  int64_t tiles = parts(c->out, TILE) * parts(width, WIDE_TILE);
  if (summed < (wide ? 2000 : 20000) || tiles > 72) return !wide && c->out * width > SMS * 32768 ? 131 : 0;
  if (wide) copies = least(84 / tiles, summed < 16384 ? 7 : 14);
  else copies = tiles <= 3 ? 13 : (c->type == 2 ? 36 : 24) / tiles;
  int64_t padded = width % TILE ? up(width, WIDE_TILE) : width;
  return most(copies, 1) * up(c->out, least(c->out, TILE)) * padded * 4 + 663;
}

static int64_t of_groups(const struct convolution *c, struct sizes s) {
  bool depthwise = c->groups == c->in, wide = c->type == FLOAT32, filter = c->pass == PASS_FILTER;
  if (depthwise) return filter && c->channels_last ? (wide ? 100 : 128) * s.w_float : 0;
  if (wide && filter) return s.x + s.w + s.y + 16;
  if (c->channels_last) return wide ? 131 : 0;
  return filter || (wide && c->pass == PASS_DATA) ? 0 : s.x + s.w + s.y + 16;
}

int64_t convolution_workspace(const struct convolution *c) {
  bool wide = c->type == FLOAT32;
  if (c->pass == NO_CONVOLUTION || type_bytes(c->type) == 8 || c->groups < 1) return -1;
  struct sizes s = sizes_of(c, c->in, c->out);
  if (c->groups > 1) return of_groups(c, s);
  if (c->in * type_bytes(c->type) % 16 || c->out * type_bytes(c->type) % 16) return of_few_channels(c);
  if (c->taps == 1 && !c->strided) return of_matrices(c, s);
  int64_t computed = c->rows * (c->pass == PASS_FORWARD ? c->y_pixels * c->out : c->x_pixels * c->in);
  int64_t own = c->pass == PASS_FILTER ? of_summing(c) : computed > (wide ? 1800000 : SMS * 32768) ? 131 : 0;
  if (wide && c->pass == PASS_DATA && c->strided) own = 131;
  if (c->channels_last) return own;
  bool writes_contiguous = wide && c->pass == PASS_FORWARD && (c->in <= 64 || c->taps == 1);
  if (writes_contiguous) return s.x + s.w + 16;
  return s.x + (c->taps > 1 ? s.w : 0) + s.y + 16 + own;
}

/* Recurrent networks, in numbers of rows x hidden: gates of the steps, what a layer reads and hands on, states; the
 * matrices once more; 8 MiB for each layer and direction. Exact but for a single sequence and one float16 LSTM. */
int64_t rnn_workspace(const struct rnn *r, int64_t steps, int64_t rows, int64_t matrix_bytes) {
  int64_t gates = r->cell == LSTM ? 4 : r->cell == GRU ? 3 : 1, both = r->bidirectional ? 2 : 1, layers = r->layers;
  int64_t of_step = both == 2 ? 2 * gates + 6 : gates + (layers > 1 ? 2 : 1);
  int64_t inputs = r->cell == GRU && (layers > 1) == (both == 2) ? 2 : 1;
  int64_t states = (5 * gates - 6) * layers * both - 4 * layers;
  int64_t numbers = (of_step * steps + states) * rows * r->hidden + inputs * steps * rows * r->input;
  return (8 << 20) * layers * both + matrix_bytes + numbers * type_bytes(r->type) + 256 + 8 * rows;
}

/* Batch norm of channels-last images (others need none): a bit of each number, and sums. */
int64_t norm_workspace(const struct tensor *x, bool backward) {
  int64_t numbers = x->dims[0] * (int64_t)x->dims[1] * pixels(x), channels = x->dims[1];
  if (x->num_dims < 3 || x->strides[1] != 1 || channels < 2) return 0;
  return backward ? numbers / 12 + 1056 + channels * 30 / 11 : numbers / 8 + numbers / 1024 + 1072 + channels / 16;
}
