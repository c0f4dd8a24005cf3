/* Which block serves a request, and what that costs in reserved memory: allocator/allocator.py under torch's default
 * settings, in C. Follows DeviceCachingAllocator of c10/cuda/CUDACachingAllocator.cpp, torch 2.11 to 2.13; names in
 * brackets are its. Left out, and left to the other: expandable segments, blocks that are not split, garbage
 * collection, roundings by powers of two, a memory fraction. */
#include "blocks.h"

#ifdef __wasm__ /* no libc: replay.c has these three */
#include <stddef.h>
void *realloc(void *, size_t);
void free(void *);
void *memmove(void *, const void *, size_t);
#else
#include <stdlib.h>
#include <string.h>
#endif

static const int64_t MIB = 1 << 20;
enum { MIN_BLOCK_BYTES = 512 };
#define SMALL_SIZE_BYTES MIB
#define SMALL_BUFFER_BYTES (2 * MIB)
#define MIN_LARGE_ALLOC_BYTES (10 * MIB)
#define ROUND_LARGE_BYTES (2 * MIB)

void allocator_init(struct allocator *a, int64_t limit_bytes, int64_t large_segment_bytes) {
  *a = (struct allocator){.limit_bytes = limit_bytes, .large_segment_bytes = large_segment_bytes, .first_unused = NONE};
}

void allocator_clear(struct allocator *a) {
  for (int32_t k = 0; k < a->num_pools; k++) free(a->pools[k].entries);
  free(a->pools);
  free(a->blocks);
  allocator_init(a, NONE, 0);
}

/* An array that has room for one more, twice as long where it had none; false: this machine is full. */
static bool has_room(void **array, int32_t *capacity, int32_t num, size_t width_bytes) {
  if (num < *capacity) return true;
  int32_t wanted = *capacity ? 2 * *capacity : 64;
  void *grown = wanted > 0 ? realloc(*array, (size_t)wanted * width_bytes) : NULL;
  if (!grown) return false;
  *array = grown;
  *capacity = wanted;
  return true;
}

static int32_t pool_of(struct allocator *a, int64_t stream, bool is_small) { /* get_pool */
  for (int32_t k = 0; k < a->num_pools; k++)
    if (a->pools[k].stream == stream && a->pools[k].is_small == is_small) return k;
  if (!has_room((void **)&a->pools, &a->pools_capacity, a->num_pools, sizeof *a->pools)) return NO_HOST_MEMORY;
  a->pools[a->num_pools] = (struct pool){.stream = stream, .is_small = is_small};
  return a->num_pools++;
}

static int32_t new_block(struct allocator *a, int32_t pool) {
  struct pool *p = &a->pools[pool];
  if (!has_room((void **)&p->entries, &p->capacity, p->num_blocks, sizeof *p->entries)) return NO_HOST_MEMORY;
  int32_t made = a->first_unused;
  if (made != NONE) {
    a->first_unused = a->blocks[made].next;
  } else {
    if (!has_room((void **)&a->blocks, &a->capacity, a->num_blocks, sizeof *a->blocks)) return NO_HOST_MEMORY;
    made = a->num_blocks++;
  }
  p->num_blocks++;
  a->blocks[made] = (struct block){.prev = NONE, .next = NONE, .pool = pool};
  return made;
}

static void drop_block(struct allocator *a, int32_t block) {
  a->pools[a->blocks[block].pool].num_blocks--;
  a->blocks[block].next = a->first_unused;
  a->first_unused = block;
}

static struct entry entry_of(const struct allocator *a, int32_t block) {
  const struct block *b = &a->blocks[block];
  return (struct entry){b->size_bytes, b->order, b->offset_bytes, block};
}

static bool is_before(const struct entry *one, const struct entry *other) { /* BlockComparatorSizeCounterAddress */
  if (one->size_bytes != other->size_bytes) return one->size_bytes < other->size_bytes;
  if (one->order != other->order) return one->order < other->order;
  return one->offset_bytes < other->offset_bytes;
}

/* The first entry from low to high that does not come before this one. */
static int32_t lower_bound(const struct pool *p, const struct entry *wanted, int32_t low, int32_t high) {
  while (low < high) {
    int32_t middle = (low + high) / 2;
    if (is_before(&p->entries[middle], wanted))
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

static int32_t position(const struct allocator *a, int32_t block) {
  const struct pool *p = &a->pools[a->blocks[block].pool];
  struct entry entry = entry_of(a, block);
  return lower_bound(p, &entry, 0, p->num_entries);
}

static void move(struct pool *p, int32_t to, int32_t from, int32_t num) {
  memmove(&p->entries[to], &p->entries[from], (size_t)num * sizeof *p->entries);
}

static void remove_at(struct pool *p, int32_t at) {
  p->num_entries--;
  move(p, at, at + 1, p->num_entries - at);
}

static void cache(struct allocator *a, int32_t block) { /* insert_into_blocks */
  struct pool *p = &a->pools[a->blocks[block].pool];
  int32_t at = position(a, block);
  move(p, at + 1, at, p->num_entries - at);
  p->entries[at] = entry_of(a, block);
  p->num_entries++;
}

/* Cache a block in the place of the one that is there, which goes: only what lies between the two moves. */
static void cache_instead(struct allocator *a, int32_t block, int32_t at) {
  struct pool *p = &a->pools[a->blocks[block].pool];
  struct entry entry = entry_of(a, block);
  int32_t to;
  if (is_before(&entry, &p->entries[at])) {
    to = lower_bound(p, &entry, 0, at);
    move(p, to + 1, to, at - to);
  } else {
    to = lower_bound(p, &entry, at + 1, p->num_entries) - 1;
    move(p, at, at + 1, to - at);
  }
  p->entries[to] = entry;
}

static void chain(struct allocator *a, int32_t block, int32_t before, int32_t after) { /* splice */
  a->blocks[block].prev = before;
  a->blocks[block].next = after;
  if (before != NONE) a->blocks[before].next = block;
  if (after != NONE) a->blocks[after].prev = block;
}

/* Where the neighbour that a block has swallowed is still cached; NONE where it is not free (try_merge_blocks). */
static int32_t merge(struct allocator *a, int32_t block, int32_t neighbour) {
  if (neighbour == NONE || a->blocks[neighbour].is_busy) return NONE;
  int32_t at = position(a, neighbour);
  struct block *b = &a->blocks[block], *n = &a->blocks[neighbour];
  if (b->prev == neighbour) {
    b->offset_bytes = n->offset_bytes;
    chain(a, block, n->prev, b->next);
  } else {
    chain(a, block, b->prev, n->next);
  }
  b->size_bytes += n->size_bytes;
  drop_block(a, neighbour);
  return at;
}

int64_t rounded_bytes(int64_t size_bytes) { return (size_bytes + MIN_BLOCK_BYTES - 1) & -MIN_BLOCK_BYTES; }

int64_t segment_bytes(const struct allocator *a, int64_t block_bytes) { /* get_allocation_size */
  if (block_bytes <= SMALL_SIZE_BYTES) return SMALL_BUFFER_BYTES;
  if (block_bytes < MIN_LARGE_ALLOC_BYTES) return a->large_segment_bytes;
  return (block_bytes + ROUND_LARGE_BYTES - 1) / ROUND_LARGE_BYTES * ROUND_LARGE_BYTES;
}

static void count(int64_t *now, int64_t *peak, int64_t more) {
  *now += more;
  if (*now > *peak) *peak = *now;
}

/* Cut off what is not asked for, if that is enough to keep, and hand out the rest (alloc_found_block); at: where the
 * block is cached, if it is. */
static int32_t hand_out(struct allocator *a, int32_t block, int64_t size_bytes, int32_t at) {
  int64_t wanted = rounded_bytes(size_bytes), left = a->blocks[block].size_bytes - wanted;
  int32_t pool = a->blocks[block].pool;
  if (a->pools[pool].is_small ? left >= MIN_BLOCK_BYTES : left > SMALL_SIZE_BYTES) {
    int32_t front = new_block(a, pool);
    if (front == NO_HOST_MEMORY) return front;
    struct block *b = &a->blocks[block], *f = &a->blocks[front];
    f->size_bytes = wanted;
    f->offset_bytes = b->offset_bytes;
    f->order = b->order;
    chain(a, front, b->prev, block);
    b->offset_bytes += wanted;
    b->size_bytes = left;
    if (at == NONE)
      cache(a, block);
    else
      cache_instead(a, block, at);
    block = front;
  } else if (at != NONE) {
    remove_at(&a->pools[pool], at);
  }
  struct block *b = &a->blocks[block];
  b->is_busy = true;
  b->requested_bytes = size_bytes;
  count(&a->now.requested_bytes, &a->peak.requested_bytes, size_bytes);
  count(&a->now.allocated_bytes, &a->peak.allocated_bytes, b->size_bytes);
  count(&a->now.active_bytes, &a->peak.active_bytes, b->size_bytes);
  return block;
}

int32_t allocate_new(struct allocator *a, int64_t size_bytes, int64_t stream) { /* alloc_block */
  int64_t wanted = rounded_bytes(size_bytes), segment = segment_bytes(a, wanted);
  int32_t pool = pool_of(a, stream, wanted <= SMALL_SIZE_BYTES);
  if (pool == NO_HOST_MEMORY) return pool;
  if (a->limit_bytes != NONE && a->now.reserved_bytes + segment > a->limit_bytes) return FULL;
  int32_t block = new_block(a, pool);
  if (block == NO_HOST_MEMORY) return block;
  a->blocks[block].size_bytes = segment;
  a->blocks[block].order = ++a->num_orders;
  count(&a->now.reserved_bytes, &a->peak.reserved_bytes, segment);
  count(&a->now.num_segments, &a->peak.num_segments, 1);
  return hand_out(a, block, size_bytes, NONE);
}

int32_t allocate_block(struct allocator *a, int64_t size_bytes, int64_t stream) { /* get_free_block */
  int64_t wanted = rounded_bytes(size_bytes);
  int32_t pool = pool_of(a, stream, wanted <= SMALL_SIZE_BYTES);
  if (pool == NO_HOST_MEMORY) return pool;
  struct pool *p = &a->pools[pool];
  int32_t at = lower_bound(p, &(struct entry){.size_bytes = wanted}, 0, p->num_entries);
  if (at == p->num_entries) return allocate_new(a, size_bytes, stream);
  return hand_out(a, p->entries[at].block, size_bytes, at);
}

void request_free(struct allocator *a, int32_t block) { a->now.allocated_bytes -= a->blocks[block].size_bytes; }

void complete_free(struct allocator *a, int32_t block) { /* free_block */
  struct block *b = &a->blocks[block];
  a->now.active_bytes -= b->size_bytes;
  a->now.requested_bytes -= b->requested_bytes;
  b->is_busy = false;
  b->requested_bytes = 0;
  int32_t before = merge(a, block, b->prev), after = merge(a, block, b->next);
  if (before != NONE && after != NONE) {
    remove_at(&a->pools[b->pool], after);
    before -= after < before;
  }
  int32_t at = before != NONE ? before : after;
  if (at == NONE)
    cache(a, block);
  else
    cache_instead(a, block, at);
}

void release_cached(struct allocator *a) { /* release_cached_blocks */
  for (int32_t k = 0; k < a->num_pools; k++) {
    struct pool *p = &a->pools[k];
    int32_t num_kept = 0;
    for (int32_t at = 0; at < p->num_entries; at++) {
      int32_t block = p->entries[at].block;
      if (a->blocks[block].prev != NONE || a->blocks[block].next != NONE) {
        p->entries[num_kept++] = p->entries[at];
        continue;
      }
      a->now.reserved_bytes -= a->blocks[block].size_bytes;
      a->now.num_segments--;
      drop_block(a, block);
    }
    p->num_entries = num_kept;
  }
}
