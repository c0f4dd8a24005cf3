/* NCCL between the processes of one machine.
 *
 * True of it: payloads of up to collective_max_bytes a rank are exchanged through a file in the machine's folder, with
 * real sums, so flags, norms, sizes and token counts are true; the result is computed where every input was. A peer that
 * dies or does not come in collective_timeout_seconds is an error (6, ncclRemoteError), never silence. Bytes (uint8, as
 * pickled objects are) that were computed are moved in up to OBJECT_PIECES pieces of that size. By rule, a larger payload
 * is not moved: its result is not computed, except where a rank keeps its own bytes in place (a broadcast's root). VRAMPROBE_ONE_RANK in the environment: this process stands for a whole world; a small payload is answered as
 * if every rank had sent this one's, a broadcast from another leaves what is there, and a split is refused (nobody says
 * how many share its color). Left out: premultiplied sums count as sums; NCCL's own buffers are not charged. */
#include "emulator.h" /* first: it asks for GNU's interfaces */

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include "nccl.h"

enum { NCCL_SUCCESS, NCCL_SYSTEM_ERROR = 2, NCCL_INTERNAL_ERROR = 3, NCCL_INVALID_ARGUMENT = 4, NCCL_REMOTE_ERROR = 6 };
struct unique_id {
  char bytes[128];
};
struct header { /* at the start of the shared file; a page */
  uint32_t arrived, generation, num_ranks;
  int32_t pids[NCCL_MAX_RANKS];
};
struct slot { /* one rank's input; the payload follows */
  uint64_t computed; /* so many of its first bytes: an object is padded to the longest of all ranks */
};
struct box { /* one message in flight from one rank to another, or a piece of it */
  uint32_t written, read;
  uint64_t bytes, left, computed;
};
struct communicator {
  uint32_t magic;
  int num_ranks, rank, ordinal, error;
  bool alone;
  size_t max_bytes;
  struct unique_id id;
  char *shared;
  uint32_t turn, splits;
  struct slot *mine; /* alone: what every rank is taken to have sent */
};
enum { COMMUNICATOR_MAGIC = 0x9CC1, UINT8 = 1 /* ncclUint8 */, OBJECT_PIECES = 64 };

static size_t slot_bytes(const struct communicator *c) { return sizeof(struct slot) + c->max_bytes; }
static size_t box_bytes(const struct communicator *c) { return sizeof(struct box) + c->max_bytes; }
static struct slot *slot_of(const struct communicator *c, uint32_t buffer, int rank) {
  if (c->alone) return c->mine;
  return (struct slot *)(void *)(c->shared + PAGE_BYTES + ((size_t)buffer * (size_t)c->num_ranks + (size_t)rank) * slot_bytes(c));
}
static struct box *box_of(const struct communicator *c, int from, int to) {
  char *boxes = c->shared + PAGE_BYTES + 2 * (size_t)c->num_ranks * slot_bytes(c);
  return (struct box *)(void *)(boxes + ((size_t)from * (size_t)c->num_ranks + (size_t)to) * box_bytes(c));
}

/* ---- waiting for peers -------------------------------------------------------------------------------------------------- */
struct patience {
  int spins;
  double since;
};
static bool wait_more(struct communicator *c, struct patience *p) { /* false: c->error says why */
  if (++p->spins < 200) return true;
  if (!p->since) p->since = now_milliseconds();
  usleep(p->spins < 2000 ? 50 : 500);
  if (p->spins % 256) return true;
  const struct header *h = (const struct header *)(const void *)c->shared;
  for (int r = 0; r < c->num_ranks && r < NCCL_MAX_RANKS; r++)
    if (h->pids[r] && kill(h->pids[r], 0) != 0 && errno == ESRCH) c->error = NCCL_REMOTE_ERROR;
  if (now_milliseconds() - p->since > machine.collective_timeout_seconds * 1e3) c->error = NCCL_REMOTE_ERROR;
  if (!c->error) return true;
  char detail[120];
  snprintf(detail, sizeof detail, "rank %d of %d: a peer has ended or did not come", c->rank, c->num_ranks);
  report_event("collective_failed", "nccl", detail);
  fprintf(stderr, "vramprobe: emulated NCCL, %s\n", detail);
  return false;
}
static bool barrier(struct communicator *c) {
  if (c->alone) return true;
  struct header *h = (struct header *)(void *)c->shared;
  uint32_t generation = __atomic_load_n(&h->generation, __ATOMIC_SEQ_CST);
  if (__atomic_add_fetch(&h->arrived, 1, __ATOMIC_SEQ_CST) == (uint32_t)c->num_ranks) {
    __atomic_store_n(&h->arrived, 0, __ATOMIC_SEQ_CST);
    __atomic_add_fetch(&h->generation, 1, __ATOMIC_SEQ_CST);
    return true;
  }
  struct patience p = {0};
  while (__atomic_load_n(&h->generation, __ATOMIC_SEQ_CST) == generation)
    if (!wait_more(c, &p)) return false;
  return true;
}

/* ---- communicators ------------------------------------------------------------------------------------------------------- */
static struct communicator *checked(void *communicator) {
  struct communicator *c = communicator;
  return c && c->magic == COMMUNICATOR_MAGIC ? c : NULL;
}
static int create(void **out, int num_ranks, const struct unique_id *id, int rank) {
  if (context_enter()) return 1; /* ncclUnhandledCudaError */
  if (num_ranks < 1 || rank < 0 || rank >= num_ranks || num_ranks > NCCL_MAX_RANKS) return NCCL_INVALID_ARGUMENT;
  struct communicator *c = calloc(1, PAGE_BYTES); /* room for who looks into it */
  if (!c) return NCCL_SYSTEM_ERROR;
  *c = (struct communicator){.magic = COMMUNICATOR_MAGIC, .num_ranks = num_ranks, .rank = rank,
                             .ordinal = current_device, .max_bytes = (machine.collective_max_bytes + 63) / 64 * 64, .id = *id,
                             .alone = num_ranks == 1 || getenv("VRAMPROBE_ONE_RANK")};
  *out = c;
  if (c->alone) return (c->mine = calloc(1, slot_bytes(c))) ? NCCL_SUCCESS : NCCL_SYSTEM_ERROR;
  char path[1200];
  int n = snprintf(path, sizeof path, "%s/nccl-", machine.folder);
  for (int k = 0; k < 16; k++) n += snprintf(path + n, sizeof path - (size_t)n, "%02x", (unsigned char)id->bytes[k]);
  size_t ranks = (size_t)num_ranks, bytes = PAGE_BYTES + 2 * ranks * slot_bytes(c) + ranks * ranks * box_bytes(c);
  int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  void *shared = MAP_FAILED;
  if (fd >= 0 && ftruncate(fd, (off_t)bytes) == 0)
    shared = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (shared == MAP_FAILED) {
    fprintf(stderr, "vramprobe: emulated NCCL: %s: %s\n", path, strerror(errno));
    if (fd >= 0) close(fd);
    free(c);
    return NCCL_SYSTEM_ERROR;
  }
  close(fd);
  c->shared = shared;
  ((struct header *)shared)->pids[rank] = (int32_t)getpid();
  if (!barrier(c)) return c->error;
  if (rank == 0) unlink(path);
  return NCCL_SUCCESS;
}
API int emu_ncclGetVersion(int *version) {
  *version = EMU_NCCL_VERSION;
  return NCCL_SUCCESS;
}
API int emu_ncclGetUniqueId(struct unique_id *id) {
  memset(id, 7, sizeof *id);
  return getrandom(id->bytes, 16, 0) == 16 ? NCCL_SUCCESS : NCCL_SYSTEM_ERROR;
}
API int emu_ncclCommInitRank(void **c, int num_ranks, struct unique_id id, int rank) {
  return create(c, num_ranks, &id, rank);
}
API int emu_ncclCommInitRankConfig(void **c, int num_ranks, struct unique_id id, int rank, void *config) {
  UNUSED(config);
  return create(c, num_ranks, &id, rank);
}
API int emu_ncclCommInitRankScalable(void **c, int num_ranks, int rank, int num_ids, struct unique_id *ids, void *config) {
  UNUSED(num_ids), UNUSED(config);
  return create(c, num_ranks, &ids[0], rank);
}
API int emu_ncclCommInitAll(void **list, int num, const int *ordinals) { /* one process for all: nothing is exchanged */
  int before = current_device;
  for (int k = 0; k < num; k++) {
    current_device = ordinals ? ordinals[k] : k;
    int e = create(&list[k], 1, &(struct unique_id){{0}}, 0);
    if (!e) ((struct communicator *)list[k])->num_ranks = num, ((struct communicator *)list[k])->rank = k;
    if (e) return current_device = before, e;
  }
  current_device = before;
  return NCCL_SUCCESS;
}
static int destroy(void *communicator) {
  struct communicator *c = checked(communicator);
  if (!c) return NCCL_INVALID_ARGUMENT;
  watchdog_told_everything();
  free(c->mine);
  c->mine = NULL;
  c->magic = 0; /* the mapping stays: a peer's last message may still be on its way */
  return NCCL_SUCCESS;
}
API int emu_ncclCommDestroy(void *c) { return destroy(c); }
API int emu_ncclCommAbort(void *c) { return destroy(c); }
API int emu_ncclCommFinalize(void *c) { return checked(c) ? NCCL_SUCCESS : NCCL_INVALID_ARGUMENT; }
#define TELL(name, field)                                   \
  API int emu_##name(void *communicator, int *value) {      \
    struct communicator *c = checked(communicator);         \
    if (!c) return NCCL_INVALID_ARGUMENT;                   \
    *value = c->field;                                      \
    return NCCL_SUCCESS;                                    \
  }
TELL(ncclCommCount, num_ranks)
TELL(ncclCommUserRank, rank)
TELL(ncclCommCuDevice, ordinal)
TELL(ncclCommGetAsyncError, error)
API int emu_ncclMemAlloc(void **pointer, size_t bytes) {
  if (context_enter()) return 1;
  return memory_allocate(&devices[current_device], pointer, bytes, BLOCK_MALLOC, NULL) ? 1 : 0;
}
API int emu_ncclMemFree(void *pointer) { return memory_free(pointer, BLOCK_MALLOC) ? 1 : 0; }
API int emu_ncclCommRegister(void *communicator, void *buffer, size_t bytes, void **handle) {
  UNUSED(buffer), UNUSED(bytes);
  *handle = communicator;
  return checked(communicator) ? NCCL_SUCCESS : NCCL_INVALID_ARGUMENT;
}
API int emu_ncclRedOpCreatePreMulSum(int *operation) {
  *operation = 5;
  return NCCL_SUCCESS;
}
API int emu_ncclRedOpDestroy(void) { return NCCL_SUCCESS; }

/* ---- operations ------------------------------------------------------------------------------------------------------------ */
struct operation {
  enum nccl_kind kind;
  int type, reduction, root;
  const char *from;
  char *to;
  size_t count;
  struct communicator *c;
  void *stream;
  bool done;
  size_t moved; /* bytes, of a message in pieces */
};
static __thread int group_depth;
static __thread struct operation *queue;
static __thread size_t queued, queue_room;

static void result_is(const void *pointer, size_t bytes, bool computed) { computed_set(pointer, bytes, computed); }

static void result_begins(const char *pointer, size_t bytes, size_t computed) {
  result_is(pointer, bytes < computed ? bytes : computed, true);
  if (computed < bytes) result_is(pointer + computed, bytes - computed, false);
}
static size_t first_computed(const void *pointer, size_t bytes) {
  bool computed;
  size_t run = bytes ? computed_run(pointer, bytes, &computed) : 0;
  return run && computed ? (run < bytes ? run : bytes) : 0;
}

static void not_moved(const struct operation *o, size_t in_bytes) {
  const struct communicator *c = o->c;
  size_t own = (size_t)c->rank * in_bytes;
  bool in_place = o->kind == ALL_GATHER ? o->from == o->to + own : o->from == o->to;
  switch (o->kind) {
    case BROADCAST:
      if (c->rank == o->root && !in_place) copy_now(o->to, o->from, in_bytes);
      else if (c->rank != o->root) result_is(o->to, in_bytes, false);
      break;
    case REDUCE:
      if (c->rank == o->root) result_is(o->to, in_bytes, false);
      break;
    case ALL_REDUCE: result_is(o->to, in_bytes, false); break;
    case ALL_GATHER:
      result_is(o->to, own, false);
      result_is(o->to + own + in_bytes, ((size_t)c->num_ranks - (size_t)c->rank - 1) * in_bytes, false);
      if (!in_place) copy_now(o->to + own, o->from, in_bytes);
      break;
    case REDUCE_SCATTER: result_is(o->to, in_bytes / (size_t)c->num_ranks, false); break;
    case ALL_TO_ALL: result_is(o->to, in_bytes, false); break;
    case RECEIVE: result_is(o->to, in_bytes, false); break;
    case SEND: break;
  }
}

static bool fits_in_pieces(const struct operation *o) {
  return o->type == UINT8 && o->count <= OBJECT_PIECES * o->c->max_bytes;
}

/* What has no answer in pieces is not moved, nor where a rank's bytes were not computed: the first piece tells every rank. */
static int object_in_pieces(const struct operation *o) {
  struct communicator *c = o->c;
  bool one = o->kind == BROADCAST, gives = !one || c->rank == o->root;
  int first = one ? o->root : 0, end = one ? o->root + 1 : c->num_ranks;
  size_t computed = gives ? first_computed(o->from, o->count) : 0;
  for (size_t at = 0; at < o->count; at += c->max_bytes) {
    size_t bytes = o->count - at < c->max_bytes ? o->count - at : c->max_bytes;
    uint32_t buffer = c->turn++ & 1;
    if (gives) slot_of(c, buffer, c->rank)->computed = computed;
    if (computed) memcpy(slot_of(c, buffer, c->rank) + 1, o->from + at, bytes);
    if (!barrier(c)) return c->error;
    for (int r = first; r < end; r++)
      if (!slot_of(c, buffer, r)->computed) return not_moved(o, o->count), NCCL_SUCCESS;
    for (int r = first; r < end; r++) {
      char *to = o->to + (size_t)(r - first) * o->count;
      memcpy(to + at, slot_of(c, buffer, r) + 1, bytes);
      result_begins(to, o->count, slot_of(c, buffer, r)->computed);
    }
  }
  return NCCL_SUCCESS;
}

static int collective(const struct operation *o) {
  struct communicator *c = o->c;
  size_t each = nccl_element_bytes(o->type), ranks = (size_t)c->num_ranks, out = o->count * each;
  size_t in = out * (o->kind == REDUCE_SCATTER || o->kind == ALL_TO_ALL ? ranks : 1);
  if (c->error) return c->error;
  if (c->num_ranks == 1) { /* every collective of one is a copy */
    if (o->to != o->from) copy_now(o->to, o->from, in);
    return NCCL_SUCCESS;
  }
  if (in > c->max_bytes) {
    if (!c->alone && (o->kind == BROADCAST || o->kind == ALL_GATHER) && fits_in_pieces(o)) return object_in_pieces(o);
    not_moved(o, in);
    return NCCL_SUCCESS;
  }
  if (c->alone && o->kind == BROADCAST && c->rank != o->root) return NCCL_SUCCESS;
  uint32_t buffer = c->turn++ & 1;
  struct slot *mine = slot_of(c, buffer, c->rank);
  if (o->kind != BROADCAST || c->rank == o->root) {
    memcpy(mine + 1, o->from, in);
    mine->computed = first_computed(o->from, in);
  }
  if (!barrier(c)) return c->error;
  const char *inputs[NCCL_MAX_RANKS];
  bool all = true;
  for (int r = 0; r < c->num_ranks; r++) {
    inputs[r] = (const char *)(slot_of(c, buffer, r) + 1);
    all = all && slot_of(c, buffer, r)->computed >= in;
  }
  switch (o->kind) {
    case REDUCE:
      if (c->rank != o->root) break;
      /* fall through */
    case ALL_REDUCE:
      nccl_reduce(o->to, inputs, c->num_ranks, 0, o->count, o->type, o->reduction);
      result_is(o->to, out, all);
      break;
    case REDUCE_SCATTER:
      nccl_reduce(o->to, inputs, c->num_ranks, (size_t)c->rank * o->count, o->count, o->type, o->reduction);
      result_is(o->to, out, all);
      break;
    case BROADCAST:
      memcpy(o->to, inputs[o->root], in);
      result_begins(o->to, in, slot_of(c, buffer, o->root)->computed);
      break;
    default: /* all gather, all to all */
      for (size_t r = 0; r < ranks; r++) {
        size_t at = o->kind == ALL_TO_ALL ? (c->alone ? r : (size_t)c->rank) * out : 0; /* alike: as much comes as goes */
        size_t computed = slot_of(c, buffer, (int)r)->computed;
        memcpy(o->to + r * out, inputs[r] + at, out);
        result_begins(o->to + r * out, out, computed > at ? computed - at : 0);
      }
  }
  return NCCL_SUCCESS;
}

static bool point_to_point(struct operation *o) { /* true: done */
  struct communicator *c = o->c;
  size_t bytes = o->count * nccl_element_bytes(o->type);
  if (c->alone && o->kind == RECEIVE && bytes <= c->max_bytes) { /* alike: what goes to a rank comes from it */
    for (size_t k = 0; k < queued; k++) {
      const struct operation *sent = &queue[k];
      if (sent->kind != SEND || sent->c != c || sent->root != o->root || sent->count != o->count || sent->type != o->type) continue;
      memcpy(o->to, sent->from, bytes);
      result_begins(o->to, bytes, first_computed(sent->from, bytes));
      return true;
    }
  }
  if (c->alone || (bytes > c->max_bytes && !fits_in_pieces(o))) {
    not_moved(o, bytes);
    return true;
  }
  bool sends = o->kind == SEND;
  struct box *box = sends ? box_of(c, c->rank, o->root) : box_of(c, o->root, c->rank);
  uint32_t written = __atomic_load_n(&box->written, __ATOMIC_ACQUIRE), read = __atomic_load_n(&box->read, __ATOMIC_ACQUIRE);
  if (sends != (written == read)) return false; /* the box is full, or empty */
  bool done;
  if (sends) {
    bool whole = bytes <= c->max_bytes;
    size_t computed = first_computed(o->from, bytes), left = bytes - o->moved;
    box->bytes = left < c->max_bytes ? left : c->max_bytes;
    if (computed || whole) memcpy(box + 1, o->from + o->moved, box->bytes);
    box->left = computed || whole ? left - box->bytes : 0; /* of a large one nothing follows the first piece */
    box->computed = computed;
    o->moved += box->bytes;
    done = !box->left;
    __atomic_add_fetch(&box->written, 1, __ATOMIC_RELEASE);
  } else {
    size_t room = bytes - o->moved;
    if (box->computed || bytes <= c->max_bytes) memcpy(o->to + o->moved, box + 1, room < box->bytes ? room : box->bytes);
    o->moved += box->bytes;
    done = !box->left;
    if (done) result_begins(o->to, bytes, box->computed);
    __atomic_add_fetch(&box->read, 1, __ATOMIC_RELEASE);
  }
  return done;
}

static bool is_next(size_t k) { /* messages between two ranks keep their order */
  for (size_t j = 0; j < k; j++)
    if (!queue[j].done && queue[j].kind == queue[k].kind && queue[j].root == queue[k].root && queue[j].c == queue[k].c)
      return false;
  return true;
}
static int flush(void) {
  int error = NCCL_SUCCESS;
  collective_begins();
  for (size_t k = 0; k < queued && !error; k++)
    if (queue[k].kind != SEND && queue[k].kind != RECEIVE) {
      error = collective(&queue[k]);
      queue[k].done = true;
    }
  struct patience p = {0};
  for (bool left = true; left && !error;) {
    left = false;
    for (size_t k = 0; k < queued && !error; k++) {
      if (queue[k].done) continue;
      queue[k].done = is_next(k) && point_to_point(&queue[k]);
      if (queue[k].done) continue;
      left = true;
      if (!wait_more(queue[k].c, &p)) error = queue[k].c->error;
    }
  }
  if (queued) stream_carries_collective(queue[0].stream);
  queued = 0;
  return error;
}
static int submit(enum nccl_kind kind, const void *from, void *to, size_t count, int type, int reduction, int root,
                  void *communicator, void *stream) {
  struct communicator *c = checked(communicator);
  if (!c || (kind > ALL_TO_ALL && (root < 0 || root >= c->num_ranks))) return NCCL_INVALID_ARGUMENT;
  nccl_moved(kind, c->num_ranks, count, nccl_element_bytes(type));
  if (queued == queue_room) {
    queue_room = queue_room ? 2 * queue_room : 16;
    queue = realloc(queue, queue_room * sizeof *queue);
    if (!queue) abort();
  }
  queue[queued++] = (struct operation){kind, type, reduction, root, from, to, count, c, stream, false, 0};
  return group_depth ? NCCL_SUCCESS : flush();
}
API int emu_ncclGroupStart(void) {
  group_depth++;
  return NCCL_SUCCESS;
}
API int emu_ncclGroupEnd(void) {
  if (group_depth > 0) group_depth--;
  return group_depth ? NCCL_SUCCESS : flush();
}
API int emu_ncclAllReduce(const void *from, void *to, size_t n, int type, int reduction, void *c, void *stream) {
  return submit(ALL_REDUCE, from, to, n, type, reduction, 0, c, stream);
}
API int emu_ncclBroadcast(const void *from, void *to, size_t n, int type, int root, void *c, void *stream) {
  return submit(BROADCAST, from, to, n, type, 0, root, c, stream);
}
API int emu_ncclBcast(void *to, size_t n, int type, int root, void *c, void *stream) {
  return submit(BROADCAST, to, to, n, type, 0, root, c, stream);
}
API int emu_ncclReduce(const void *from, void *to, size_t n, int type, int reduction, int root, void *c, void *stream) {
  return submit(REDUCE, from, to, n, type, reduction, root, c, stream);
}
API int emu_ncclAllGather(const void *from, void *to, size_t n, int type, void *c, void *stream) {
  return submit(ALL_GATHER, from, to, n, type, 0, 0, c, stream);
}
API int emu_ncclReduceScatter(const void *from, void *to, size_t n, int type, int reduction, void *c, void *stream) {
  return submit(REDUCE_SCATTER, from, to, n, type, reduction, 0, c, stream);
}
API int emu_ncclAlltoAll(const void *from, void *to, size_t n, int type, void *c, void *stream) {
  return submit(ALL_TO_ALL, from, to, n, type, 0, 0, c, stream);
}
API int emu_ncclSend(const void *from, size_t n, int type, int peer, void *c, void *stream) {
  return submit(SEND, from, NULL, n, type, 0, peer, c, stream);
}
API int emu_ncclRecv(void *to, size_t n, int type, int peer, void *c, void *stream) {
  return submit(RECEIVE, NULL, to, n, type, 0, peer, c, stream);
}

API int emu_ncclCommSplit(void *communicator, int color, int key, void **out, void *config) {
  UNUSED(config);
  struct communicator *c = checked(communicator);
  if (!c) return NCCL_INVALID_ARGUMENT;
  *out = NULL;
  if (c->alone) {
    fprintf(stderr, "vramprobe: emulated NCCL: a communicator is split, and of its ranks this one alone runs\n");
    return NCCL_INVALID_ARGUMENT;
  }
  int32_t mine[2] = {color, key}, (*all)[2] = calloc((size_t)c->num_ranks, sizeof *all);
  if (!all) return NCCL_SYSTEM_ERROR;
  int e = collective(&(struct operation){ALL_GATHER, 2, 0, 0, (const char *)mine, (char *)all, 2, c, NULL, false, 0});
  int num_ranks = 0, rank = 0;
  for (int r = 0; r < c->num_ranks && !e; r++) {
    if (all[r][0] != color) continue;
    num_ranks++;
    if (all[r][1] < key || (all[r][1] == key && r < c->rank)) rank++;
  }
  free(all);
  struct unique_id id = c->id; /* the same for all of a color, unlike any other */
  uint32_t split = ++c->splits;
  for (int k = 0; k < 4; k++) id.bytes[k] ^= (char)(split >> 8 * k), id.bytes[4 + k] ^= (char)((uint32_t)color >> 8 * k);
  id.bytes[8]++;
  if (e || color < 0) return e;
  return create(out, num_ranks, &id, rank);
}
