/* Device memory: address space handed out, charged to the card by what a card would hold for it.
 *
 * True of it: 1 MiB and more is handed out from the top down, the highest hole first, as listings of real segments
 * show; the allocators of torch 2.3 and 2.4 take the lower of two free blocks of one size, so the order decides what
 * they reserve (docs/emulated.md names published runs that reserve what this order gives, and no other). Less than 1
 * MiB is packed, 512 bytes at a time, into granules of 2 MiB that are charged while one block in them lives; 1 MiB and
 * more is charged in whole granules; pool memory by its pool; reserved ranges not at all until memory is mapped there.
 * A card's MMU knows no physical fragmentation, so only the sum counts. The memory is NORESERVE host memory: a device
 * pointer can be read and written by the CPU, an untouched page costs nothing, and freed pages are given back, so free
 * memory is zero. Left out: out-of-bounds access by a kernel cannot happen. */
#include "emulator.h" /* first: it asks for GNU's interfaces */

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static const size_t SMALL_BYTES = 512;
static uint64_t next_id;

static size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

void pages_drop(uintptr_t address, size_t bytes) {
  uintptr_t end = address + bytes, first = round_up(address, PAGE_BYTES), last = end / PAGE_BYTES * PAGE_BYTES;
  if (first >= last) {
    memset((void *)address, 0, bytes);
    return;
  }
  madvise((void *)first, last - first, MADV_DONTNEED);
  memset((void *)address, 0, first - address);
  memset((void *)last, 0, end - last);
}

struct device *memory_device(const void *pointer) {
  for (int i = 0; i < num_devices; i++)
    if ((uintptr_t)pointer >= devices[i].start && (uintptr_t)pointer < devices[i].end) return &devices[i];
  return NULL;
}

static struct arena *arena_of(struct device *d, uintptr_t address) {
  return address < d->packed.end ? &d->packed : address < d->pooled.end ? &d->pooled : &d->whole;
}

static size_t after(const struct arena *a, uintptr_t address) { /* the first block that begins beyond it */
  size_t low = 0, high = a->count;
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (a->blocks[middle].address <= address) low = middle + 1;
    else high = middle;
  }
  return low;
}

static struct block *find(struct device *d, const void *pointer) {
  struct arena *a = arena_of(d, (uintptr_t)pointer);
  size_t k = after(a, (uintptr_t)pointer);
  if (!k) return NULL;
  struct block *b = &a->blocks[k - 1];
  return (uintptr_t)pointer < b->address + b->size_bytes ? b : NULL;
}

bool memory_block(const void *pointer, struct block *copy) {
  struct device *d = memory_device(pointer);
  if (!d) return false;
  process_lock();
  struct block *b = find(d, pointer);
  if (b) *copy = *b;
  process_unlock();
  return b != NULL;
}

bool device_charge(struct device *device, uint64_t bytes) {
  if (shared_charge(device->index, bytes)) return true;
  pools_release_idle(device, false); /* the driver gives idle pool memory back before it fails */
  return shared_charge(device->index, bytes);
}

static uintptr_t lowest_fit(const struct arena *a, size_t bytes, size_t alignment, size_t *at) {
  bool within_granule = alignment < GRANULE_BYTES && bytes < MIB;
  uintptr_t address = a->start;
  for (*at = 0;; ++*at) {
    address = round_up(address, alignment);
    if (within_granule && address / GRANULE_BYTES != (address + bytes - 1) / GRANULE_BYTES)
      address = round_up(address, GRANULE_BYTES);
    uintptr_t limit = *at < a->count ? a->blocks[*at].address : a->end;
    if (address + bytes <= limit) return address;
    if (*at == a->count) return 0;
    address = a->blocks[*at].address + a->blocks[*at].size_bytes;
  }
}

static uintptr_t highest_fit(const struct arena *a, size_t bytes, size_t alignment, size_t *at) {
  uintptr_t limit = a->end;
  for (*at = a->count;; --*at) {
    uintptr_t start = *at ? a->blocks[*at - 1].address + a->blocks[*at - 1].size_bytes : a->start;
    if (start <= limit && bytes <= limit - start) {
      uintptr_t address = (limit - bytes) / alignment * alignment;
      if (address >= start) return address;
    }
    if (!*at) return 0;
    limit = a->blocks[*at - 1].address;
  }
}

static bool insert(struct arena *a, size_t at, struct block block) {
  if (a->count == a->capacity) {
    size_t capacity = a->capacity ? 2 * a->capacity : 256;
    struct block *blocks = realloc(a->blocks, capacity * sizeof *blocks);
    if (!blocks) return false;
    a->blocks = blocks, a->capacity = capacity;
  }
  memmove(a->blocks + at + 1, a->blocks + at, (a->count - at) * sizeof *a->blocks);
  a->blocks[at] = block;
  a->count++;
  return true;
}

static bool charge(struct device *d, enum block_kind kind, uintptr_t address, size_t bytes, void *owner) {
  if (kind == BLOCK_POOL) return pool_charge(owner, bytes);
  if (kind != BLOCK_MALLOC) return true;
  if (address >= d->packed.end) return device_charge(d, bytes);
  uint32_t *granule = &d->packed_granules[(address - d->packed.start) / GRANULE_BYTES];
  if (!*granule && !device_charge(d, GRANULE_BYTES)) return false;
  ++*granule;
  return true;
}

static void uncharge(struct device *d, const struct block *b) {
  if (b->kind == BLOCK_POOL) {
    pool_uncharge(b->owner, b->size_bytes);
  } else if (b->kind == BLOCK_MALLOC) {
    if (b->address >= d->packed.end) shared_release(d->index, b->size_bytes);
    else if (!--d->packed_granules[(b->address - d->packed.start) / GRANULE_BYTES])
      shared_release(d->index, GRANULE_BYTES);
  }
}

status memory_allocate(struct device *d, void **out, size_t bytes, enum block_kind kind, void *owner) {
  *out = NULL;
  if (!bytes) return OK;
  if (bytes > d->whole.end - d->whole.start) return OUT_OF_MEMORY;
  bool packed = kind == BLOCK_MODULE || (kind == BLOCK_MALLOC && bytes < MIB), pooled = kind == BLOCK_POOL;
  struct arena *a = packed ? &d->packed : pooled ? &d->pooled : &d->whole;
  size_t alignment = packed || pooled ? SMALL_BYTES : GRANULE_BYTES, size_bytes = round_up(bytes, alignment), at;
  process_lock();
  uintptr_t address = (a == &d->whole ? highest_fit : lowest_fit)(a, size_bytes, alignment, &at);
  bool ok = address && charge(d, kind, address, size_bytes, owner);
  if (ok) ok = insert(a, at, (struct block){address, bytes, size_bytes, ++next_id, owner, kind});
  if (ok) d->num_allocations++;
  process_unlock();
  if (!ok) {
    trace(1, "cuda:%d: no %zu bytes: %llu of %llu in use", d->ordinal, bytes,
          (unsigned long long)shared_used_bytes(d->index), (unsigned long long)d->card->total_bytes);
    return OUT_OF_MEMORY;
  }
  *out = (void *)address;
  if (kind != BLOCK_RESERVED && kind != BLOCK_IMPORTED && bytes <= machine.copy_max_bytes &&
      (machine.fill == FILL_ONES || machine.fill == FILL_RANDOM))
    fill_bytes(*out, *out, bytes);
  trace(1, "cuda:%d: %zu bytes at %p", d->ordinal, bytes, *out);
  return OK;
}

static void forget(struct device *d, const struct block *b) {
  uncharge(d, b);
  if (b->kind == BLOCK_IMPORTED) /* the pages are another process's: private ones take their place */
    mmap((void *)b->address, b->size_bytes, PROT_READ | PROT_WRITE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  else if (b->kind != BLOCK_RESERVED)
    pages_drop(b->address, b->size_bytes);
  computed_set((void *)b->address, b->size_bytes, false);
  d->num_frees++;
}

status memory_free(void *pointer, int kinds) {
  if (!pointer) return OK;
  struct device *d = memory_device(pointer);
  if (!d) return INVALID_VALUE;
  process_lock();
  struct block *b = find(d, pointer);
  bool ok = b && b->address == (uintptr_t)pointer && (b->kind & kinds);
  if (ok) {
    struct arena *a = arena_of(d, b->address);
    forget(d, b);
    memmove(b, b + 1, (size_t)(a->blocks + a->count - (b + 1)) * sizeof *b);
    a->count--;
  }
  process_unlock();
  trace(1, "cuda:%d: free %p%s", d->ordinal, pointer, ok ? "" : ": no block begins there");
  return ok ? OK : INVALID_VALUE;
}

void memory_clear(struct device *d) {
  process_lock();
  struct arena *const arenas[] = {&d->packed, &d->pooled, &d->whole};
  for (int k = 0; k < 3; k++) {
    for (size_t i = 0; i < arenas[k]->count; i++) forget(d, &arenas[k]->blocks[i]);
    arenas[k]->count = 0;
  }
  process_unlock();
}

/* ---- the runtime -------------------------------------------------------------------------------------------------- */
static status allocate_here(void **pointer, size_t bytes) {
  if (!pointer) return INVALID_VALUE;
  return memory_allocate(&devices[current_device], pointer, bytes, BLOCK_MALLOC, NULL);
}
API status emu_cudaMalloc(void **pointer, size_t bytes) {
  TRY(context_enter());
  return fail(allocate_here(pointer, bytes));
}
API status emu_cudaFree(void *pointer) {
  TRY(context_enter());
  if (pointer && !memory_device(pointer)) return fail(host_free_managed(pointer));
  all_work_awaited();
  return fail(memory_free(pointer, BLOCK_MALLOC | BLOCK_POOL));
}
API status emu_cudaMallocPitch(void **pointer, size_t *pitch, size_t width, size_t height) {
  *pitch = round_up(width, 512);
  return emu_cudaMalloc(pointer, *pitch * height);
}
API status emu_cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
  TRY(context_enter());
  const struct device *d = &devices[current_device];
  uint64_t used_bytes = shared_used_bytes(d->index), all = d->card->total_bytes;
  if (free_bytes) *free_bytes = used_bytes < all ? all - used_bytes : 0;
  if (total_bytes) *total_bytes = all;
  return OK;
}

/* ---- the driver --------------------------------------------------------------------------------------------------- */
API status emu_cuMemAlloc_v2(void **pointer, size_t bytes) {
  TRY_DRIVER(context_current(NULL));
  if (!bytes) return INVALID_VALUE; /* unlike cudaMalloc */
  return allocate_here(pointer, bytes);
}
API status emu_cuMemFree_v2(void *pointer) {
  TRY_DRIVER(context_current(NULL));
  if (pointer && !memory_device(pointer)) return host_free_managed(pointer);
  all_work_awaited();
  return memory_free(pointer, BLOCK_MALLOC | BLOCK_POOL);
}
API status emu_cuMemAllocPitch_v2(void **pointer, size_t *pitch, size_t width, size_t height, unsigned element_bytes) {
  UNUSED(element_bytes);
  *pitch = round_up(width, 512);
  return emu_cuMemAlloc_v2(pointer, *pitch * height);
}
API status emu_cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes) {
  TRY_DRIVER(context_current(NULL));
  return emu_cudaMemGetInfo(free_bytes, total_bytes);
}
API status emu_cuMemGetAddressRange_v2(void **base, size_t *bytes, void *pointer) {
  TRY_DRIVER(context_current(NULL));
  struct block b;
  if (!memory_block(pointer, &b)) return NOT_FOUND;
  if (base) *base = (void *)b.address;
  if (bytes) *bytes = b.requested_bytes;
  return OK;
}
