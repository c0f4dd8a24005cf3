/* Memory pools, under cudaMallocAsync.
 *
 * True of it: a pool grows by 32 MiB, keeps what it has up to its release threshold, and gives idle memory back when
 * the host waits for a stream or an event, when it is trimmed, or when the card has no room otherwise. Memory that is
 * freed can be used again at once, since streams are synchronous here: a real run may hold more. Memory allocated under
 * stream capture comes from the device's graph pool and lives as long as the graph. Left out: fragmentation inside a
 * pool, reuse across streams, export to other processes. */
#include "emulator.h" /* first: it asks for GNU's interfaces */

#include <stdlib.h>
#include <string.h>

static const uint64_t CHUNK_BYTES = 32 * MIB;
enum { POOL_MAGIC = 0x9001, MAX_POOLS = 256 };
static struct pool *made[MAX_POOLS];

static uint64_t round_up(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }

void pool_init(struct pool *pool, int ordinal, bool is_default) {
  *pool = (struct pool){.magic = POOL_MAGIC, .ordinal = ordinal, .is_default = is_default, .reuse = {1, 1, 1}};
}

static bool shrink(struct pool *pool, uint64_t keep_bytes) {
  uint64_t target = round_up(pool->used_bytes, CHUNK_BYTES);
  if (target < keep_bytes) target = keep_bytes;
  if (target >= pool->reserved_bytes) return false;
  shared_release(devices[pool->ordinal].index, pool->reserved_bytes - target);
  pool->reserved_bytes = target;
  return true;
}

bool pool_charge(struct pool *pool, size_t bytes) { /* under the process lock, as pool_uncharge */
  uint64_t used_bytes = pool->used_bytes + bytes;
  if (pool->max_bytes && used_bytes > pool->max_bytes) return false;
  if (used_bytes > pool->reserved_bytes) {
    uint64_t growth = round_up(used_bytes, CHUNK_BYTES) - pool->reserved_bytes;
    if (!device_charge(&devices[pool->ordinal], growth)) {
      /* device_charge may have shrunk this very pool: what it needs at the least is asked for last */
      growth = round_up(used_bytes, GRANULE_BYTES) - pool->reserved_bytes;
      if (!shared_charge(devices[pool->ordinal].index, growth)) return false;
    } else {
      growth = round_up(used_bytes, CHUNK_BYTES) - pool->reserved_bytes;
    }
    pool->reserved_bytes += growth;
  }
  pool->used_bytes = used_bytes;
  if (pool->used_bytes > pool->used_peak_bytes) pool->used_peak_bytes = pool->used_bytes;
  if (pool->reserved_bytes > pool->reserved_peak_bytes) pool->reserved_peak_bytes = pool->reserved_bytes;
  return true;
}
void pool_uncharge(struct pool *pool, size_t bytes) { pool->used_bytes -= bytes; }

void pools_release_idle(struct device *d, bool beyond_threshold_only) {
  shrink(&d->default_pool, beyond_threshold_only ? d->default_pool.release_threshold_bytes : 0);
  for (int k = 0; k < MAX_POOLS; k++)
    if (made[k] && made[k]->ordinal == d->ordinal)
      shrink(made[k], beyond_threshold_only ? made[k]->release_threshold_bytes : 0);
}

void pools_clear(struct device *d) {
  process_lock();
  shrink(&d->default_pool, 0);
  shrink(&d->graph_pool, 0);
  for (int k = 0; k < MAX_POOLS; k++)
    if (made[k] && made[k]->ordinal == d->ordinal) shrink(made[k], 0);
  process_unlock();
}

static struct pool *checked(void *pool) {
  struct pool *p = pool;
  return p && p->magic == POOL_MAGIC ? p : NULL;
}

static status allocate(void **pointer, size_t bytes, struct pool *pool, void *stream) {
  if (!pointer || !pool) return INVALID_VALUE;
  struct device *d = &devices[pool->ordinal];
  struct graph *graph = stream_capture(stream);
  if (!graph) return memory_allocate(d, pointer, bytes, BLOCK_POOL, pool);
  status s = memory_allocate(d, pointer, bytes, BLOCK_POOL, &d->graph_pool);
  if (!s) {
    graph_own(graph, *pointer);
    capture_node(stream, &(struct node){.type = NODE_ALLOCATE, .to = *pointer, .width = bytes});
  }
  return s;
}
static status release(void *pointer, void *stream) {
  struct node node = {.type = NODE_FREE, .to = pointer};
  if (stream_capture(stream)) return capture_node(stream, &node) ? OK : CAPTURE_INVALIDATED;
  struct block b;
  if (pointer && !memory_block(pointer, &b)) return INVALID_VALUE;
  return memory_free(pointer, BLOCK_POOL | BLOCK_MALLOC);
}

API status emu_cudaMallocAsync(void **pointer, size_t bytes, void *stream) {
  TRY(context_enter());
  return fail(allocate(pointer, bytes, devices[current_device].current_pool, stream));
}
API status emu_cudaMallocFromPoolAsync(void **pointer, size_t bytes, void *pool, void *stream) {
  TRY(context_enter());
  return fail(allocate(pointer, bytes, checked(pool), stream));
}
API status emu_cudaFreeAsync(void *pointer, void *stream) {
  TRY(context_enter());
  return fail(release(pointer, stream));
}
API status emu_cuMemAllocAsync(void **pointer, size_t bytes, void *stream) {
  TRY_DRIVER(context_current(NULL));
  return allocate(pointer, bytes, devices[current_device].current_pool, stream);
}
API status emu_cuMemAllocFromPoolAsync(void **pointer, size_t bytes, void *pool, void *stream) {
  TRY_DRIVER(context_current(NULL));
  return allocate(pointer, bytes, checked(pool), stream);
}
API status emu_cuMemFreeAsync(void *pointer, void *stream) {
  TRY_DRIVER(context_current(NULL));
  return release(pointer, stream);
}

/* ---- pools themselves: the runtime's functions serve the driver too ----------------------------------------------- */
static status create(void **pool, const struct cuda_pool_properties *wanted) {
  if (!pool || !wanted || wanted->location.type != LOCATION_DEVICE) return wanted ? NOT_SUPPORTED : INVALID_VALUE;
  if (wanted->location.id < 0 || wanted->location.id >= num_devices) return INVALID_DEVICE;
  struct pool *p = malloc(sizeof *p);
  pool_init(p, wanted->location.id, false);
  p->max_bytes = EMU_CUDA_VERSION >= 12020 ? wanted->maxSize : 0;
  process_lock();
  int k = 0;
  while (k < MAX_POOLS && made[k]) k++;
  if (k < MAX_POOLS) made[k] = p;
  process_unlock();
  if (k == MAX_POOLS) {
    free(p);
    return OUT_OF_MEMORY;
  }
  *pool = p;
  return OK;
}
static status destroy(struct pool *p) {
  if (!p || p->is_default) return INVALID_VALUE;
  process_lock();
  for (int k = 0; k < MAX_POOLS; k++)
    if (made[k] == p && !p->used_bytes) made[k] = NULL;
  shrink(p, 0);
  struct device *d = &devices[p->ordinal];
  if (d->current_pool == p) d->current_pool = &d->default_pool;
  process_unlock();
  return OK; /* not freed: memory of it may live on */
}
static status get_attribute(const struct pool *p, int which, void *value) {
  if (!p) return INVALID_VALUE;
  const uint64_t numbers[] = {p->release_threshold_bytes, p->reserved_bytes, p->reserved_peak_bytes, p->used_bytes,
                              p->used_peak_bytes};
  if (which >= 1 && which <= 3) memcpy(value, &p->reuse[which - 1], sizeof(int));
  else if (which >= 4 && which <= 8) memcpy(value, &numbers[which - 4], sizeof(uint64_t));
  else return INVALID_VALUE;
  return OK;
}
static status set_attribute(struct pool *p, int which, const void *value) {
  if (!p) return INVALID_VALUE;
  uint64_t number = 0;
  if (which >= 4) memcpy(&number, value, sizeof number);
  if (which >= 1 && which <= 3) memcpy(&p->reuse[which - 1], value, sizeof(int));
  else if (which == 4) p->release_threshold_bytes = number;
  else if ((which == 6 || which == 8) && number) return INVALID_VALUE; /* a peak can only be reset */
  else if (which == 6) p->reserved_peak_bytes = p->reserved_bytes;
  else if (which == 8) p->used_peak_bytes = p->used_bytes;
  else return INVALID_VALUE;
  return OK;
}
static status trim(struct pool *p, size_t keep_bytes) {
  if (!p) return INVALID_VALUE;
  process_lock();
  shrink(p, round_up(keep_bytes, CHUNK_BYTES));
  process_unlock();
  return OK;
}
static status pool_of(void **pool, int ordinal, bool current) {
  TRY_DRIVER(driver_enter());
  if (ordinal < 0 || ordinal >= num_devices) return INVALID_DEVICE;
  *pool = current ? devices[ordinal].current_pool : &devices[ordinal].default_pool;
  return OK;
}
static status use_pool(int ordinal, struct pool *p) {
  TRY_DRIVER(driver_enter());
  if (ordinal < 0 || ordinal >= num_devices) return INVALID_DEVICE;
  if (!p || p->ordinal != ordinal) return INVALID_VALUE;
  devices[ordinal].current_pool = p;
  return OK;
}
static status access_of(int *flags, const struct pool *p, const struct cuda_memory_location *where) {
  if (!flags || !p || !where) return INVALID_VALUE;
  *flags = where->type == LOCATION_DEVICE ? 3 : 0; /* read and write from every device */
  return OK;
}

API status emu_cudaMemPoolCreate(void **pool, const struct cuda_pool_properties *wanted) {
  TRY(driver_enter());
  return fail(create(pool, wanted));
}
API status emu_cudaMemPoolDestroy(void *pool) { return fail(destroy(checked(pool))); }
API status emu_cudaMemPoolGetAttribute(void *pool, int which, void *value) {
  return fail(get_attribute(checked(pool), which, value));
}
API status emu_cudaMemPoolSetAttribute(void *pool, int which, void *value) {
  return fail(set_attribute(checked(pool), which, value));
}
API status emu_cudaMemPoolTrimTo(void *pool, size_t keep_bytes) { return fail(trim(checked(pool), keep_bytes)); }
API status emu_cudaMemPoolSetAccess(void *pool, const void *list, size_t count) {
  UNUSED(list), UNUSED(count);
  return fail(checked(pool) ? OK : INVALID_VALUE);
}
API status emu_cudaMemPoolGetAccess(int *flags, void *pool, const struct cuda_memory_location *where) {
  return fail(access_of(flags, checked(pool), where));
}
API status emu_cudaDeviceGetDefaultMemPool(void **pool, int ordinal) { return fail(pool_of(pool, ordinal, false)); }
API status emu_cudaDeviceGetMemPool(void **pool, int ordinal) { return fail(pool_of(pool, ordinal, true)); }
API status emu_cudaDeviceSetMemPool(int ordinal, void *pool) { return fail(use_pool(ordinal, checked(pool))); }
API status emu_cuMemPoolCreate(void **pool, const struct cuda_pool_properties *wanted) {
  TRY_DRIVER(driver_enter());
  return create(pool, wanted);
}
API status emu_cuMemPoolDestroy(void *pool) { return destroy(checked(pool)); }
API status emu_cuMemPoolGetAttribute(void *pool, int which, void *value) {
  return get_attribute(checked(pool), which, value);
}
API status emu_cuMemPoolSetAttribute(void *pool, int which, void *value) {
  return set_attribute(checked(pool), which, value);
}
API status emu_cuMemPoolTrimTo(void *pool, size_t keep_bytes) { return trim(checked(pool), keep_bytes); }
API status emu_cuMemPoolSetAccess(void *pool, const void *list, size_t count) {
  UNUSED(list), UNUSED(count);
  return checked(pool) ? OK : INVALID_VALUE;
}
API status emu_cuMemPoolGetAccess(int *flags, void *pool, const struct cuda_memory_location *where) {
  return access_of(flags, checked(pool), where);
}
API status emu_cuDeviceGetDefaultMemPool(void **pool, int ordinal) { return pool_of(pool, ordinal, false); }
API status emu_cuDeviceGetMemPool(void **pool, int ordinal) { return pool_of(pool, ordinal, true); }
API status emu_cuDeviceSetMemPool(int ordinal, void *pool) { return use_pool(ordinal, checked(pool)); }

/* ---- memory of graphs --------------------------------------------------------------------------------------------- */
API status emu_cudaDeviceGetGraphMemAttribute(int ordinal, int which, void *value) {
  TRY(driver_enter());
  if (ordinal < 0 || ordinal >= num_devices) return fail(INVALID_DEVICE);
  static const int as_pool_attribute[] = {7, 8, 5, 6};
  if (which < 0 || which > 3) return fail(INVALID_VALUE);
  return fail(get_attribute(&devices[ordinal].graph_pool, as_pool_attribute[which], value));
}
API status emu_cudaDeviceGraphMemTrim(int ordinal) {
  TRY(driver_enter());
  if (ordinal < 0 || ordinal >= num_devices) return fail(INVALID_DEVICE);
  return fail(trim(&devices[ordinal].graph_pool, 0));
}
