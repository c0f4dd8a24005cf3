/* A log through the allocator of blocks.c, for the page: WebAssembly without a libc (tools/page_parts.py compiles it).
 *
 * JavaScript asks events() where to write the log, then replay() as often as sizes change; what the allocator takes lies
 * behind the log and is forgotten at each replay. Sizes are doubles, which hold bytes exactly. */
#include <stddef.h>
#include <stdint.h>

#include "blocks.h"

#define EXPORT(name) __attribute__((export_name(#name)))
enum { PAGE_BYTES = 65536, ALIGN_BYTES = 16, FILLED = 3 };

extern unsigned char __heap_base;
static uintptr_t log_end, top; /* of the memory that is taken: by the log, by all */

static void *take(size_t num_bytes) {
  uintptr_t begin = (top + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES;
  size_t pages = (begin + num_bytes + PAGE_BYTES - 1) / PAGE_BYTES, had = __builtin_wasm_memory_size(0);
  if (pages > had && __builtin_wasm_memory_grow(0, pages - had) == (size_t)-1) return NULL;
  top = begin + num_bytes;
  return (void *)begin;
}

void *memmove(void *to, const void *from, size_t num_bytes) { return __builtin_memmove(to, from, num_bytes); }

/* The size stands before what is handed out; what grows leaves its old place unused. */
void *realloc(void *old, size_t num_bytes) {
  size_t *made = take(num_bytes + ALIGN_BYTES);
  if (!made) return NULL;
  made[0] = num_bytes;
  void *found = (char *)made + ALIGN_BYTES;
  if (old) {
    size_t had = *(size_t *)((char *)old - ALIGN_BYTES);
    __builtin_memcpy(found, old, had < num_bytes ? had : num_bytes);
  }
  return found;
}

void free(void *unused) { (void)unused; }

/* Each event's slot among the sizes, plus 1, negative for a free; and its block. Each phase's end. Bytes and stream of
 * each slot. By phase: peak allocated, peak reserved, allocated at its end. */
static struct log {
  int32_t num_events, num_phases, num_slots, num_blocks;
  int32_t *codes, *blocks, *stops, *streams;
  double *sizes, *peaks;
} log;

EXPORT(events) struct log *events(int32_t num_events, int32_t num_phases, int32_t num_slots, int32_t num_blocks) {
  top = (uintptr_t)&__heap_base;
  log = (struct log){num_events, num_phases, num_slots, num_blocks, .codes = take(4 * (size_t)num_events),
                     .blocks = take(4 * (size_t)num_events), .stops = take(4 * (size_t)num_phases),
                     .streams = take(4 * (size_t)num_slots), .sizes = take(8 * (size_t)num_slots),
                     .peaks = take(8 * FILLED * (size_t)num_phases)};
  log_end = top;
  return log.codes && log.blocks && log.stops && log.streams && log.sizes && log.peaks ? &log : NULL;
}

static int32_t serve(struct allocator *a, int64_t size_bytes, int64_t stream) {
  int32_t block = allocate_block(a, size_bytes, stream);
  if (block != FULL) return block;
  release_cached(a);
  a->num_alloc_retries++;
  return allocate_new(a, size_bytes, stream);
}

/* How often the cache went back because the segments may take no more; FULL where even that is not enough. The cache is
 * emptied before phase num_setup, as before training; limit_bytes and it may be NONE. */
EXPORT(replay) int32_t replay(double limit_bytes, double large_segment_bytes, int32_t num_setup) {
  struct allocator a;
  top = log_end;
  allocator_init(&a, (int64_t)limit_bytes, (int64_t)large_segment_bytes);
  int32_t *handed = take(4 * (size_t)(log.num_blocks + 1));
  if (!handed) return NO_HOST_MEMORY;
  for (int32_t at = 0, phase = 0; phase < log.num_phases; phase++) {
    if (phase == num_setup) release_cached(&a);
    a.peak = a.now;
    for (; at < log.stops[phase]; at++) {
      int32_t code = log.codes[at], slot = (code < 0 ? -code : code) - 1, block = log.blocks[at];
      int64_t size_bytes = (int64_t)log.sizes[slot];
      if (size_bytes == 0) { /* no block: the cache is emptied */
        release_cached(&a);
      } else if (code > 0) {
        handed[block] = serve(&a, size_bytes, log.streams[slot]);
        if (handed[block] < 0) return handed[block];
      } else {
        request_free(&a, handed[block]);
        complete_free(&a, handed[block]);
      }
    }
    double *filled = log.peaks + FILLED * phase;
    filled[0] = (double)a.peak.allocated_bytes;
    filled[1] = (double)a.peak.reserved_bytes;
    filled[2] = (double)a.now.allocated_bytes;
  }
  return (int32_t)a.num_alloc_retries;
}

/* A digest of the sources that this was compiled from, for a test that they are today's. */
EXPORT(sources) const char *sources(void) { return SOURCES; }
