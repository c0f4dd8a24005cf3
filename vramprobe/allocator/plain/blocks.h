/* Blocks and pools of a caching allocator under torch's default settings, without Python: see blocks.c. */
#ifndef VRAMPROBE_BLOCKS_H
#define VRAMPROBE_BLOCKS_H

#include <stdbool.h>
#include <stdint.h>

enum { NONE = -1, FULL = -2, NO_HOST_MEMORY = -3 }; /* instead of a block: not there; the card, this machine is full */

struct block { /* a piece of a segment: in use or cached */
  int64_t size_bytes, requested_bytes, offset_bytes;
  int64_t order;      /* its segment's, as they were made */
  int32_t prev, next; /* neighbours in the same segment, or NONE */
  int32_t pool;
  bool is_busy; /* allocated, or freed and perhaps in use on another stream */
};

struct entry { /* a cached block: by size, then the segment's age, then address */
  int64_t size_bytes, order, offset_bytes;
  int32_t block;
};

struct pool { /* the cached blocks of one stream and size class */
  int64_t stream;
  bool is_small;
  struct entry *entries;
  int32_t num_entries, capacity;
  int32_t num_blocks; /* cached or not: there is room for all of them among the entries */
};

struct counters { /* of torch.cuda.memory_stats */
  int64_t requested_bytes, allocated_bytes, active_bytes, reserved_bytes, num_segments;
};

struct allocator {
  int64_t limit_bytes; /* what segments may take together, or NONE */
  int64_t large_segment_bytes;
  struct counters now, peak;
  int64_t num_alloc_retries, num_orders;
  struct block *blocks;
  int32_t num_blocks, capacity, first_unused; /* unused ones are chained by next */
  struct pool *pools;
  int32_t num_pools, pools_capacity;
};

void allocator_init(struct allocator *, int64_t limit_bytes, int64_t large_segment_bytes);
void allocator_clear(struct allocator *);

/* Bytes of the block for a request, and of a new segment for it. */
int64_t rounded_bytes(int64_t size_bytes);
int64_t segment_bytes(const struct allocator *, int64_t block_bytes);

/* A block for a request, from the cache or, once nothing there serves it, the device; or FULL, NO_HOST_MEMORY. */
int32_t allocate_block(struct allocator *, int64_t size_bytes, int64_t stream);
/* The same, from the device alone: what is left once a full one's cache was given back. */
int32_t allocate_new(struct allocator *, int64_t size_bytes, int64_t stream);

/* The two halves of a free: the caller's, and once other streams are done with it. */
void request_free(struct allocator *, int32_t block);
void complete_free(struct allocator *, int32_t block);

/* Every segment that is one cached block goes back. */
void release_cached(struct allocator *);

#endif
