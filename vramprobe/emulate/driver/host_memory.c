/* Host memory: pinned, managed and registered.
 *
 * True of it: pinned and managed memory is the host's, zero when fresh, never charged to a card. A pointer inside an
 * allocation is known as such. Left out: managed memory never migrates, so paged optimizers stay on the host; which
 * of its bytes are computed is not tracked, because the host reads them without asking the driver. */
#include "emulator.h" /* first: it asks for GNU's interfaces */

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

struct range {
  uintptr_t start;
  size_t bytes;
  enum host_kind kind;
  unsigned flags;
  int ordinal;
};
static struct range *ranges; /* sorted by address */
static size_t count, capacity;

static size_t after(uintptr_t address) {
  size_t low = 0, high = count;
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (ranges[middle].start <= address) low = middle + 1;
    else high = middle;
  }
  return low;
}
static struct range *find(const void *pointer) {
  size_t k = after((uintptr_t)pointer);
  return k && (uintptr_t)pointer - ranges[k - 1].start < ranges[k - 1].bytes ? &ranges[k - 1] : NULL;
}
static void add(struct range r) {
  if (count == capacity) {
    capacity = capacity ? 2 * capacity : 64;
    ranges = realloc(ranges, capacity * sizeof *ranges);
    if (!ranges) abort();
  }
  size_t k = after(r.start);
  memmove(ranges + k + 1, ranges + k, (count - k) * sizeof *ranges);
  ranges[k] = r;
  count++;
}

static status allocate(void **pointer, size_t bytes, enum host_kind kind, unsigned flags) {
  if (!pointer) return INVALID_VALUE;
  *pointer = NULL;
  if (!bytes) return kind == HOST_MANAGED ? INVALID_VALUE : OK;
  size_t whole = (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
  if (whole < bytes) return OUT_OF_MEMORY;
  void *memory = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return OUT_OF_MEMORY;
  process_lock();
  add((struct range){(uintptr_t)memory, whole, kind, flags, current_device});
  process_unlock();
  if (kind == HOST_PINNED) host_counted(HOST_COUNT_PINNED, (int64_t)whole);
  *pointer = memory;
  trace(1, "%zu bytes of %s host memory at %p", bytes, kind == HOST_MANAGED ? "managed" : "pinned", memory);
  return OK;
}

static status release(void *pointer, enum host_kind kind) {
  if (!pointer) return OK;
  process_lock();
  struct range *r = find(pointer), gone = {0};
  if (r && r->start == (uintptr_t)pointer && r->kind == kind) {
    gone = *r;
    memmove(r, r + 1, (size_t)(ranges + count - (r + 1)) * sizeof *r);
    count--;
  }
  process_unlock();
  if (!gone.bytes) return kind == HOST_REGISTERED ? HOST_MEMORY_NOT_REGISTERED : INVALID_VALUE;
  if (kind != HOST_REGISTERED) munmap(pointer, gone.bytes);
  if (kind == HOST_PINNED) host_counted(HOST_COUNT_PINNED, -(int64_t)gone.bytes);
  return OK;
}

status host_free_managed(void *pointer) { return release(pointer, HOST_MANAGED); }

enum host_kind host_memory_kind(const void *pointer, void **start, size_t *bytes) {
  process_lock();
  const struct range *r = find(pointer);
  enum host_kind kind = r ? r->kind : HOST_NONE;
  if (r && start) *start = (void *)r->start;
  if (r && bytes) *bytes = r->bytes;
  process_unlock();
  return kind;
}

static status enroll(void *pointer, size_t bytes, unsigned flags) {
  if (!pointer || !bytes) return INVALID_VALUE;
  process_lock();
  size_t k = after((uintptr_t)pointer + bytes - 1);
  bool taken = k && ranges[k - 1].start + ranges[k - 1].bytes > (uintptr_t)pointer;
  if (!taken) add((struct range){(uintptr_t)pointer, bytes, HOST_REGISTERED, flags, current_device});
  process_unlock();
  return taken ? HOST_MEMORY_ALREADY_REGISTERED : OK;
}

API status emu_cudaHostAlloc(void **pointer, size_t bytes, unsigned flags) {
  TRY(context_enter());
  return fail(allocate(pointer, bytes, HOST_PINNED, flags));
}
API status emu_cudaMallocHost(void **pointer, size_t bytes) { return emu_cudaHostAlloc(pointer, bytes, 0); }
API status emu_cudaFreeHost(void *pointer) {
  TRY(context_enter());
  return fail(release(pointer, HOST_PINNED));
}
API status emu_cudaMallocManaged(void **pointer, size_t bytes, unsigned flags) {
  TRY(context_enter());
  return fail(allocate(pointer, bytes, HOST_MANAGED, flags));
}
API status emu_cudaHostRegister(void *pointer, size_t bytes, unsigned flags) {
  TRY(context_enter());
  return fail(enroll(pointer, bytes, flags));
}
API status emu_cudaHostUnregister(void *pointer) {
  TRY(context_enter());
  return fail(release(pointer, HOST_REGISTERED));
}
API status emu_cudaHostGetDevicePointer(void **device_pointer, void *pointer, unsigned flags) {
  TRY(context_enter());
  if (flags || host_memory_kind(pointer, NULL, NULL) == HOST_NONE) return fail(INVALID_VALUE);
  *device_pointer = pointer;
  return OK;
}
API status emu_cudaHostGetFlags(unsigned *flags, void *pointer) {
  TRY(context_enter());
  process_lock();
  const struct range *r = find(pointer);
  if (r) *flags = r->flags | 2; /* mapped, as all pinned memory under unified addressing */
  process_unlock();
  return fail(r ? OK : INVALID_VALUE);
}
API status emu_cudaPointerGetAttributes(struct cuda_pointer_attributes *a, const void *pointer) {
  TRY(context_enter());
  memset(a, 0, sizeof *a);
  const struct device *d = memory_device(pointer);
  struct block b;
  if (d && memory_block(pointer, &b)) {
    a->type = POINTER_DEVICE;
    a->device = d->ordinal;
    a->devicePointer = (void *)pointer;
    return OK;
  }
  enum host_kind kind = host_memory_kind(pointer, NULL, NULL);
  a->type = kind == HOST_NONE ? POINTER_UNREGISTERED : kind == HOST_MANAGED ? POINTER_MANAGED : POINTER_HOST;
  a->device = kind == HOST_NONE ? -2 : current_device;
  a->devicePointer = kind == HOST_NONE ? NULL : (void *)pointer;
  a->hostPointer = (void *)pointer;
  return OK;
}

/* ---- the driver --------------------------------------------------------------------------------------------------- */
API status emu_cuMemAllocHost_v2(void **pointer, size_t bytes) {
  TRY_DRIVER(context_current(NULL));
  return allocate(pointer, bytes, HOST_PINNED, 0);
}
API status emu_cuMemHostAlloc(void **pointer, size_t bytes, unsigned flags) {
  TRY_DRIVER(context_current(NULL));
  return allocate(pointer, bytes, HOST_PINNED, flags);
}
API status emu_cuMemFreeHost(void *pointer) {
  TRY_DRIVER(driver_enter());
  return release(pointer, HOST_PINNED);
}
API status emu_cuMemAllocManaged(void **pointer, size_t bytes, unsigned flags) {
  TRY_DRIVER(context_current(NULL));
  return allocate(pointer, bytes, HOST_MANAGED, flags);
}
API status emu_cuMemHostRegister_v2(void *pointer, size_t bytes, unsigned flags) {
  TRY_DRIVER(context_current(NULL));
  return enroll(pointer, bytes, flags);
}
API status emu_cuMemHostUnregister(void *pointer) {
  TRY_DRIVER(driver_enter());
  return release(pointer, HOST_REGISTERED);
}
API status emu_cuMemHostGetDevicePointer_v2(void **device_pointer, void *pointer, unsigned flags) {
  TRY_DRIVER(context_current(NULL));
  return emu_cudaHostGetDevicePointer(device_pointer, pointer, flags);
}
API status emu_cuPointerGetAttribute(void *value, int which, const void *pointer) {
  TRY_DRIVER(driver_enter());
  const struct device *d = memory_device(pointer);
  struct block b = {0};
  if (d && !memory_block(pointer, &b)) return INVALID_VALUE;
  void *start = (void *)b.address;
  size_t bytes = b.requested_bytes;
  enum host_kind kind = d ? HOST_NONE : host_memory_kind(pointer, &start, &bytes);
  if (!d && kind == HOST_NONE) return INVALID_VALUE;
  int ordinal = d ? d->ordinal : current_device;
  uint64_t id = d ? b.id : (uint64_t)(uintptr_t)start;
  switch (which) {
    case 1: {
      struct context *context;
      TRY_DRIVER(context_of(ordinal, &context));
      *(void **)value = context;
      break;
    }
    case 2: *(unsigned *)value = d || kind == HOST_MANAGED ? 2 : 1; break;
    case 3: *(const void **)value = pointer; break;
    case 4:
      if (d) return INVALID_VALUE;
      *(const void **)value = pointer;
      break;
    case 6: *(unsigned *)value = 0; break;
    case 7: *(uint64_t *)value = id; break;
    case 8: *(unsigned *)value = kind == HOST_MANAGED; break;
    case 9: *(int *)value = ordinal; break;
    case 10: *(unsigned *)value = d && b.kind == BLOCK_MALLOC; break;
    case 11: *(void **)value = start; break;
    case 12: *(size_t *)value = bytes; break;
    case 13: *(unsigned *)value = 1; break;
    case 14: *(uint64_t *)value = 0; break;
    case 15: *(unsigned *)value = 0; break;
    case 16: *(unsigned *)value = 3; break;
    case 17: *(void **)value = b.kind == BLOCK_POOL ? b.owner : NULL; break;
    default: return NOT_SUPPORTED;
  }
  return OK;
}
API status emu_cuPointerGetAttributes(unsigned count_wanted, const int *which, void **values, const void *pointer) {
  TRY_DRIVER(driver_enter());
  for (unsigned k = 0; k < count_wanted; k++)
    if (emu_cuPointerGetAttribute(values[k], which[k], pointer)) memset(values[k], 0, 4); /* as documented: zero */
  return OK;
}
