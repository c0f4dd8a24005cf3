/* Copies and memset: small ones move bytes, large ones to the device do not; what is read without having been computed
 * is counted, filled by the machine's policy, and told to whoever asked.
 *
 * True of it: a copy to the device or on it moves its bytes up to copy_max_bytes; beyond, the target is marked as not
 * computed. A memset to zero gives the pages back, at any size. The host's read of bytes that nobody computed sees the
 * fill (zeros, ones, random by address and seed; keep: what lies there), is one uncomputed read, and larger than
 * copy_max_bytes with nothing computed in it leaves the target as it is. emu_control_inject_count(v) gives the
 * thread's next read of 4 or 8 bytes the value v, once. Left out: arrays, and reads by the CPU past the driver. */
#include "emulator.h" /* first: it asks for GNU's interfaces */

#include <string.h>

static __thread int64_t injected[16];
static __thread int num_injected;
static uint64_t num_uncomputed_reads, num_skipped_copies;
static void (*on_uncomputed_read)(const void *pointer, size_t bytes);

static uint64_t mix(uint64_t x) { /* splitmix64: Steele, Lea, Flood 2014 */
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return x ^ x >> 31;
}

void fill_bytes(void *to, const void *as_if_at, size_t bytes) {
  if (machine.fill == FILL_KEEP) {
    if (to != as_if_at) memmove(to, as_if_at, bytes);
    return;
  }
  if (machine.fill != FILL_RANDOM) {
    memset(to, machine.fill == FILL_ONES ? 1 : 0, bytes);
    return;
  }
  const struct device *d = memory_device(as_if_at);
  uint64_t offset = d ? (uintptr_t)as_if_at - d->start : 0; /* equal from run to run, whatever mmap gave */
  for (size_t k = 0; k < bytes; k++, offset++)
    ((unsigned char *)to)[k] = (unsigned char)(mix(mix(machine.fill_seed) ^ offset / 8) >> offset % 8 * 8);
}

static bool take_injected(void *to, size_t bytes) {
  if (!num_injected || (bytes != 1 && bytes != 4 && bytes != 8)) return false;
  memcpy(to, &injected[0], bytes);
  memmove(injected, injected + 1, sizeof injected - sizeof *injected);
  num_injected--;
  return true;
}

static bool read_row(char *to, const char *from, size_t bytes, bool fill) { /* true: all of it was computed */
  bool all = true, computed;
  for (size_t done = 0, n; done < bytes; done += n) {
    n = computed_run(from + done, bytes - done, &computed);
    all = all && computed;
    if (computed) memmove(to + done, from + done, n);
    else if (fill) fill_bytes(to + done, from + done, n);
  }
  return all;
}

static void tell(const void *from, size_t bytes) {
  __atomic_fetch_add(&num_uncomputed_reads, 1, __ATOMIC_RELAXED);
  void (*callback)(const void *, size_t) = __atomic_load_n(&on_uncomputed_read, __ATOMIC_ACQUIRE);
  if (callback) callback(from, bytes);
}

/* Bytes that are there already are not written: zeros stay free where nobody has touched a page. */
static void move_row(char *to, const char *from, size_t width) {
  if (width < PAGE_BYTES || memcmp(to, from, width)) memmove(to, from, width);
}

static void copy_rows(char *to, size_t pitch_to, const char *from, size_t pitch_from, size_t width, size_t height) {
  if (!width || !height || !to || !from) return;
  size_t bytes = width * height;
  bool to_device = memory_device(to), from_device = memory_device(from);
  bool large = bytes > machine.copy_max_bytes, all = true;
  if (from_device && !to_device) {
    if (height == 1 && take_injected(to, width)) return;
    for (size_t k = 0; k < height; k++) all &= read_row(to + k * pitch_to, from + k * pitch_from, width, !large);
    if (!all) tell(from, pitch_from * (height - 1) + width);
    return;
  }
  if (to_device && large) {
    __atomic_fetch_add(&num_skipped_copies, 1, __ATOMIC_RELAXED);
    for (size_t k = 0; k < height; k++) computed_set(to + k * pitch_to, width, false);
    return;
  }
  for (size_t k = 0; k < height; k++) {
    move_row(to + k * pitch_to, from + k * pitch_from, width);
    computed_copy(to + k * pitch_to, from + k * pitch_from, width);
  }
}

void copy_now(void *to, const void *from, size_t bytes) { copy_rows(to, bytes, from, bytes, bytes, 1); }

static void set_row(char *to, uint32_t value, size_t value_bytes, size_t bytes) {
  if (!bytes || !to) return;
  bool device = memory_device(to);
  if (device && value == 0 && bytes >= PAGE_BYTES) {
    pages_drop((uintptr_t)to, bytes);
  } else if (device && bytes > machine.copy_max_bytes) {
    computed_set(to, bytes, false);
    return;
  } else if (value_bytes == 1) {
    memset(to, (int)value, bytes);
  } else {
    for (size_t k = 0; k + value_bytes <= bytes; k += value_bytes) memcpy(to + k, &value, value_bytes);
  }
  computed_set(to, bytes, true);
}
void set_now(void *to, uint32_t value, size_t value_bytes, size_t count) {
  set_row(to, value, value_bytes, value_bytes * count);
}

void node_run(const struct node *n, void *stream) {
  switch (n->type) {
    case NODE_MEMCPY: copy_rows(n->to, n->pitch_to, n->from, n->pitch_from, n->width, n->height); break;
    case NODE_MEMSET:
      for (size_t k = 0; k < n->height; k++)
        set_row((char *)n->to + k * n->pitch_to, n->value, n->value_bytes, n->width * n->value_bytes);
      break;
    case NODE_HOST:
      if (n->stream_call) n->stream_call(stream, OK, n->argument);
      else if (n->call) n->call(n->argument);
      break;
    case NODE_KERNEL: count_launch("(in a graph)", (struct cuda_dim3){1, 1, 1}, (struct cuda_dim3){1, 1, 1}, 0); break;
    default: break;
  }
}

static void submit(void *stream, const struct node *node) {
  if (capture_node(stream, node)) return;
  stream_submitted(stream);
  node_run(node, stream);
}
static status copy(void *to, const void *from, size_t bytes, void *stream) {
  if (bytes && (!to || !from)) return INVALID_VALUE;
  submit(stream, &(struct node){.type = NODE_MEMCPY, .to = to, .from = from, .width = bytes, .height = 1});
  if (memory_device(from) && !memory_device(to) && host_memory_kind(to, NULL, NULL) == HOST_NONE)
    stream_awaited(stream); /* to pageable memory: the host waits */
  return OK;
}
static status copy_and_wait(void *to, const void *from, size_t bytes) {
  status s = copy(to, from, bytes, NULL);
  stream_awaited(NULL);
  return s;
}
static status copy_2d(void *to, size_t pitch_to, const void *from, size_t pitch_from, size_t width, size_t height,
                      void *stream) {
  if (width > pitch_to || width > pitch_from) return 12;
  submit(stream, &(struct node){.type = NODE_MEMCPY, .to = to, .from = from, .pitch_to = pitch_to,
                                .pitch_from = pitch_from, .width = width, .height = height});
  return OK;
}
static status set(void *to, uint32_t value, size_t value_bytes, size_t count, void *stream) {
  if (count && !to) return INVALID_VALUE;
  submit(stream, &(struct node){.type = NODE_MEMSET, .to = to, .value = value, .value_bytes = value_bytes,
                                .width = count, .height = 1});
  return OK;
}
static status set_2d(void *to, size_t pitch, uint32_t value, size_t value_bytes, size_t width, size_t height,
                     void *stream) {
  submit(stream, &(struct node){.type = NODE_MEMSET, .to = to, .pitch_to = pitch, .value = value,
                                .value_bytes = value_bytes, .width = width, .height = height});
  return OK;
}
static status copy_3d(const struct cuda_copy_3d *p, void *stream) {
  if (p->srcArray || p->dstArray) fatal_unknown("libcudart", "cudaMemcpy3D of arrays");
  for (size_t z = 0; z < p->depth; z++) {
    char *to = (char *)p->dst.ptr + ((p->dstZ + z) * p->dst.ysize + p->dstY) * p->dst.pitch + p->dstX;
    const char *from = (const char *)p->src.ptr + ((p->srcZ + z) * p->src.ysize + p->srcY) * p->src.pitch + p->srcX;
    copy_2d(to, p->dst.pitch, from, p->src.pitch, p->width, p->height, stream);
  }
  return OK;
}

/* ---- the runtime -------------------------------------------------------------------------------------------------- */
API status emu_cudaMemcpy(void *to, const void *from, size_t bytes, int kind) {
  UNUSED(kind); /* the addresses say which way */
  TRY(context_enter());
  return fail(copy_and_wait(to, from, bytes));
}
API status emu_cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream) {
  UNUSED(kind);
  TRY(context_enter());
  return fail(copy(to, from, bytes, stream));
}
API status emu_cudaMemcpyPeer(void *to, int device_to, const void *from, int device_from, size_t bytes) {
  UNUSED(device_to), UNUSED(device_from);
  return emu_cudaMemcpy(to, from, bytes, 4);
}
API status emu_cudaMemcpyPeerAsync(void *to, int device_to, const void *from, int device_from, size_t bytes,
                                   void *stream) {
  UNUSED(device_to), UNUSED(device_from);
  return emu_cudaMemcpyAsync(to, from, bytes, 4, stream);
}
API status emu_cudaMemcpy2DAsync(void *to, size_t pitch_to, const void *from, size_t pitch_from, size_t width,
                                 size_t height, int kind, void *stream) {
  UNUSED(kind);
  TRY(context_enter());
  return fail(copy_2d(to, pitch_to, from, pitch_from, width, height, stream));
}
API status emu_cudaMemcpy2D(void *to, size_t pitch_to, const void *from, size_t pitch_from, size_t width,
                            size_t height, int kind) {
  return emu_cudaMemcpy2DAsync(to, pitch_to, from, pitch_from, width, height, kind, NULL);
}
API status emu_cudaMemcpy3D(const struct cuda_copy_3d *p) {
  TRY(context_enter());
  return fail(copy_3d(p, NULL));
}
API status emu_cudaMemcpy3DAsync(const struct cuda_copy_3d *p, void *stream) {
  TRY(context_enter());
  return fail(copy_3d(p, stream));
}
API status emu_cudaMemcpyBatchAsync(void *const *to, const void *const *from, const size_t *bytes, size_t count,
                                    void *attributes, size_t *indices, size_t num_attributes, void *stream) {
  UNUSED(attributes), UNUSED(indices), UNUSED(num_attributes);
  TRY(context_enter());
  for (size_t k = 0; k < count; k++) TRY(copy(to[k], from[k], bytes[k], stream));
  return OK;
}
API status emu_cudaMemset(void *to, int value, size_t bytes) {
  TRY(context_enter());
  return fail(set(to, (unsigned char)value, 1, bytes, NULL));
}
API status emu_cudaMemsetAsync(void *to, int value, size_t bytes, void *stream) {
  TRY(context_enter());
  return fail(set(to, (unsigned char)value, 1, bytes, stream));
}
API status emu_cudaMemset2DAsync(void *to, size_t pitch, int value, size_t width, size_t height, void *stream) {
  TRY(context_enter());
  return fail(set_2d(to, pitch, (unsigned char)value, 1, width, height, stream));
}
API status emu_cudaMemset2D(void *to, size_t pitch, int value, size_t width, size_t height) {
  return emu_cudaMemset2DAsync(to, pitch, value, width, height, NULL);
}

/* ---- the driver --------------------------------------------------------------------------------------------------- */
#define COPY(name)                                                     \
  API status emu_##name(void *to, const void *from, size_t bytes) {    \
    TRY_DRIVER(context_current(NULL));                                 \
    return copy_and_wait(to, from, bytes);                             \
  }
#define COPY_ASYNC(name)                                                           \
  API status emu_##name(void *to, const void *from, size_t bytes, void *stream) {  \
    TRY_DRIVER(context_current(NULL));                                             \
    return copy(to, from, bytes, stream);                                          \
  }
COPY(cuMemcpy)
COPY(cuMemcpyHtoD_v2)
COPY(cuMemcpyDtoH_v2)
COPY(cuMemcpyDtoD_v2)
COPY_ASYNC(cuMemcpyAsync)
COPY_ASYNC(cuMemcpyHtoDAsync_v2)
COPY_ASYNC(cuMemcpyDtoHAsync_v2)
COPY_ASYNC(cuMemcpyDtoDAsync_v2)

#define SET(name, type, bytes)                                                                   \
  API status emu_##name##_v2(void *to, type value, size_t count) {                               \
    TRY_DRIVER(context_current(NULL));                                                           \
    return set(to, value, bytes, count, NULL);                                                   \
  }                                                                                              \
  API status emu_##name##Async(void *to, type value, size_t count, void *stream) {               \
    TRY_DRIVER(context_current(NULL));                                                           \
    return set(to, value, bytes, count, stream);                                                 \
  }
SET(cuMemsetD8, unsigned char, 1)
SET(cuMemsetD16, unsigned short, 2)
SET(cuMemsetD32, unsigned, 4)
#define SET_2D(name, type, bytes)                                                                                   \
  API status emu_##name##_v2(void *to, size_t pitch, type value, size_t width, size_t height) {                    \
    TRY_DRIVER(context_current(NULL));                                                                             \
    return set_2d(to, pitch, value, bytes, width, height, NULL);                                                   \
  }                                                                                                                \
  API status emu_##name##Async(void *to, size_t pitch, type value, size_t width, size_t height, void *stream) {    \
    TRY_DRIVER(context_current(NULL));                                                                             \
    return set_2d(to, pitch, value, bytes, width, height, stream);                                                 \
  }
SET_2D(cuMemsetD2D8, unsigned char, 1)
SET_2D(cuMemsetD2D16, unsigned short, 2)
SET_2D(cuMemsetD2D32, unsigned, 4)

API status emu_cuMemcpy2DAsync_v2(const struct cuda_copy_2d *p, void *stream) {
  TRY_DRIVER(context_current(NULL));
  if (p->srcMemoryType == 3 || p->dstMemoryType == 3) fatal_unknown("libcuda", "cuMemcpy2D of arrays");
  const char *from = p->srcMemoryType == 1 ? p->srcHost : p->srcDevice;
  char *to = p->dstMemoryType == 1 ? p->dstHost : p->dstDevice;
  size_t pitch_from = p->srcPitch ? p->srcPitch : p->WidthInBytes, pitch_to = p->dstPitch ? p->dstPitch : p->WidthInBytes;
  return copy_2d(to + p->dstY * pitch_to + p->dstXInBytes, pitch_to, from + p->srcY * pitch_from + p->srcXInBytes,
                 pitch_from, p->WidthInBytes, p->Height, stream);
}
API status emu_cuMemcpy2D_v2(const struct cuda_copy_2d *p) { return emu_cuMemcpy2DAsync_v2(p, NULL); }
API status emu_cuMemcpy2DUnaligned_v2(const struct cuda_copy_2d *p) { return emu_cuMemcpy2DAsync_v2(p, NULL); }

/* ---- control ------------------------------------------------------------------------------------------------------ */
API void emu_control_inject_count(int64_t value) {
  if (num_injected < 16) injected[num_injected++] = value;
}
API void emu_control_clear_counts(void) { num_injected = 0; }
API uint64_t emu_control_uncomputed_reads(void) { return __atomic_load_n(&num_uncomputed_reads, __ATOMIC_RELAXED); }
API uint64_t emu_control_skipped_copies(void) { return __atomic_load_n(&num_skipped_copies, __ATOMIC_RELAXED); }
API void emu_control_on_uncomputed_read(void (*callback)(const void *pointer, size_t bytes)) {
  __atomic_store_n(&on_uncomputed_read, callback, __ATOMIC_RELEASE);
}
