/* Pairs each free of a log with its allocation: what log/pairing.py does event by event, see there. */
#include <stdlib.h>
#include <string.h>

#include "pairing.h"

struct living { /* blocks of one kind, the oldest first */
  int64_t *blocks;
  int64_t num, capacity;
};

static bool add(struct living *kind, int64_t block) {
  if (kind->num == kind->capacity) {
    int64_t wanted = 2 * kind->capacity + 8;
    int64_t *grown = realloc(kind->blocks, (size_t)wanted * sizeof *grown);
    if (!grown) return false;
    kind->blocks = grown;
    kind->capacity = wanted;
  }
  kind->blocks[kind->num++] = block;
  return true;
}

/* The block with so many newer ones of its kind, which leaves them; or 0. */
static int64_t take(struct living *kind, int64_t rank) {
  if (rank < 0 || rank >= kind->num) return 0;
  int64_t at = kind->num - 1 - rank, block = kind->blocks[at];
  memmove(&kind->blocks[at], &kind->blocks[at + 1], (size_t)rank * sizeof block);
  kind->num--;
  return block;
}

static int64_t pair_with(
    struct living *kinds, int64_t num_events, const int64_t *codes, const int64_t *ranks, const int64_t *sizes,
    int64_t *blocks) {
  int64_t count = 0;
  for (int64_t at = 0; at < num_events; at++) {
    if (codes[at] < 0) {
      if (!(blocks[at] = take(&kinds[-codes[at]], ranks[at]))) return at;
      continue;
    }
    if (!add(&kinds[codes[at]], ++count)) return NO_MEMORY;
    blocks[at] = sizes[at] ? count : 0; /* 0: the cache is emptied */
  }
  return num_events;
}

int64_t pair_events(
    int64_t num_events, const int64_t *codes, const int64_t *ranks, const int64_t *sizes, int64_t *blocks) {
  int64_t most = 0;
  for (int64_t at = 0; at < num_events; at++) {
    int64_t kind = codes[at] < 0 ? -codes[at] : codes[at];
    if (kind > most) most = kind;
  }
  struct living *kinds = calloc((size_t)most + 1, sizeof *kinds);
  if (!kinds) return NO_MEMORY;
  int64_t found = pair_with(kinds, num_events, codes, ranks, sizes, blocks);
  for (int64_t kind = 0; kind <= most; kind++) free(kinds[kind].blocks);
  free(kinds);
  return found;
}
