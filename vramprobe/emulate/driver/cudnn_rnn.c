/* What cuDNN answers of recurrent networks and of its tensor descriptors: weights, their places, the reserve space.
 *
 * True of it: the weight space is every matrix and bias of every layer and direction, as NVIDIA documents it; a matrix's
 * place and shape, too. The reserve space's size is not documented: it follows two values that cuDNN gave for four
 * layers of 320 on a P100 (pytorch/pytorch#2895: LSTM 736,000,000 bytes, GRU 864,000,000), 5 and 6 numbers for each
 * hidden state and one for each state that a layer hands to the next; an H200 gave the same and one bit for each number
 * that dropout may take. The workspace is the one of training. */
#include "cudnn.h"

#include <string.h>

/* Descriptors are 4,096 bytes (emu_generic_create_handle). */
struct rnn_data {
  int64_t length, batch;
};

static int64_t gates(const struct rnn *r) { return r->cell == LSTM ? 4 : r->cell == GRU ? 3 : 1; }
static int64_t directions(const struct rnn *r) { return r->bidirectional ? 2 : 1; }
static int64_t biases(const struct rnn *r) { return r->bias == 0 ? 0 : r->bias == 2 ? 2 : 1; }
static int64_t columns(const struct rnn *r, int64_t pseudo_layer, bool recurrent) {
  if (recurrent) return r->projected;
  return pseudo_layer < directions(r) ? r->input : r->projected * directions(r);
}
/* Numbers in the matrices of the pseudo-layers before this one (a layer has one for each direction). */
static int64_t matrices_before(const struct rnn *r, int64_t pseudo_layer) {
  int64_t n = 0;
  for (int64_t p = 0; p < pseudo_layer; p++) {
    n += gates(r) * r->hidden * (columns(r, p, false) + columns(r, p, true));
    if (r->projected != r->hidden) n += r->projected * r->hidden;
  }
  return n;
}

static void set_tensor(struct tensor *t, int type, int num_dims, const int *dims, const int *strides) {
  t->type = type, t->num_dims = num_dims;
  for (int k = num_dims - 1, packed = 1; k >= 0 && k < MAX_DIMS; packed *= dims[k--])
    t->dims[k] = dims[k], t->strides[k] = strides ? strides[k] : packed;
}
API long emu_cudnnSetTensorNdDescriptor(struct tensor *t, int type, int num_dims, const int *dims, const int *strides) {
  set_tensor(t, type, num_dims, dims, strides);
  return 0;
}
API long emu_cudnnSetFilterNdDescriptor(struct tensor *t, int type, int format, int num_dims, const int *dims) {
  set_tensor(t, type, num_dims, dims, NULL);
  t->format = format;
  return 0;
}
static void get_dims(const struct tensor *t, int wanted, int *type, int *num_dims, int *dims) {
  *type = t->type, *num_dims = t->num_dims;
  memcpy(dims, t->dims, sizeof *dims * (size_t)(wanted < t->num_dims ? wanted : t->num_dims));
}
API long emu_cudnnGetTensorNdDescriptor(const struct tensor *t, int wanted, int *type, int *num_dims, int *dims,
                                        int *strides) {
  get_dims(t, wanted, type, num_dims, dims);
  memcpy(strides, t->strides, sizeof *strides * (size_t)(wanted < t->num_dims ? wanted : t->num_dims));
  return 0;
}
API long emu_cudnnGetFilterNdDescriptor(const struct tensor *t, int wanted, int *type, int *format, int *num_dims,
                                        int *dims) {
  get_dims(t, wanted, type, num_dims, dims);
  *format = t->format;
  return 0;
}

API long emu_cudnnSetRNNDescriptor_v8(struct rnn *r, int algorithm, int cell, int bias, int direction, int input_mode,
                                      int type, int precision, int math, int32_t input, int32_t hidden,
                                      int32_t projected, int32_t layers, const float *dropout, uint32_t flags) {
  UNUSED(algorithm), UNUSED(input_mode), UNUSED(precision), UNUSED(math), UNUSED(flags);
  bool drops = dropout && *dropout > 0 && layers > 1;
  *r = (struct rnn){cell, bias, direction, type, input, hidden, projected > 0 ? projected : hidden, layers, drops};
  return 0;
}
API long emu_cudnnSetRNNDataDescriptor(struct rnn_data *d, int type, int layout, int length, int batch) {
  UNUSED(type), UNUSED(layout);
  *d = (struct rnn_data){length, batch};
  return 0;
}
API long emu_cudnnGetRNNWeightSpaceSize(void *handle, const struct rnn *r, size_t *bytes) {
  UNUSED(handle);
  int64_t pseudo_layers = r->layers * directions(r);
  int64_t numbers = matrices_before(r, pseudo_layers) + pseudo_layers * biases(r) * gates(r) * r->hidden;
  *bytes = (size_t)(numbers * type_bytes(r->type));
  return 0;
}
/* Matrices of all pseudo-layers, the input's gates before the recurrent ones and the projection; then all biases. A
 * caller that wants one of both gives NULL for the other. */
API long emu_cudnnGetRNNWeightParams(void *handle, const struct rnn *r, int32_t pseudo_layer, size_t space_bytes,
                                     char *space, int32_t id, struct tensor *matrix, void **matrix_at,
                                     struct tensor *bias, void **bias_at) {
  UNUSED(handle), UNUSED(space_bytes);
  int64_t g = gates(r), input = r->hidden * columns(r, pseudo_layer, false);
  int64_t recurrent = r->hidden * columns(r, pseudo_layer, true), at = matrices_before(r, pseudo_layer);
  bool is_recurrent = id >= g, is_projection = id >= 2 * g;
  int rows = (int)(is_projection ? r->projected : r->hidden);
  if (matrix && matrix_at) {
    int width = (int)(is_projection ? r->hidden : columns(r, pseudo_layer, is_recurrent));
    at += is_projection ? g * (input + recurrent) : is_recurrent ? g * input + (id - g) * recurrent : id * input;
    set_tensor(matrix, r->type, 3, (int[3]){1, rows, width}, NULL);
    *matrix_at = space + (size_t)(at * type_bytes(r->type));
  }
  if (bias && bias_at) {
    int64_t which = r->bias == 3 ? id - g : id; /* 3: only the recurrent ones have a bias */
    bool has_bias = !is_projection && which >= 0 && which < biases(r) * g;
    at = matrices_before(r, r->layers * directions(r)) + (pseudo_layer * biases(r) * g + which) * r->hidden;
    set_tensor(bias, r->type, has_bias ? 3 : 0, (int[3]){1, rows, 1}, NULL);
    *bias_at = has_bias ? space + (size_t)(at * type_bytes(r->type)) : NULL;
  }
  return 0;
}
API long emu_cudnnGetRNNTempSpaceSizes(void *handle, const struct rnn *r, int mode, const struct rnn_data *x,
                                       size_t *workspace_bytes, size_t *reserve_bytes) {
  UNUSED(handle);
  int64_t kept = r->cell == LSTM ? 5 : r->cell == GRU ? 6 : 1, both = directions(r), numbers = x->length * x->batch;
  int64_t each = both * (r->layers * kept * r->hidden + (r->layers - 1) * r->projected);
  int64_t dropped_bits = r->drops ? numbers * (r->layers - 1) * r->projected * both * both : 0;
  int64_t matrix_bytes = matrices_before(r, r->layers * both) * type_bytes(r->type);
  bool gated = r->cell == LSTM || r->cell == GRU; /* the plain ones were not measured */
  int64_t bytes = gated ? rnn_workspace(r, x->length, x->batch, matrix_bytes) : -1;
  *workspace_bytes = workspace_answer("cudnnGetRNNTempSpaceSizes", bytes);
  if (reserve_bytes)
    *reserve_bytes = mode == TRAINING ? (size_t)(numbers * each * type_bytes(r->type) + dropped_bits / 8 + 256) : 0;
  return 0;
}
