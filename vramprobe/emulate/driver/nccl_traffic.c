/* What this process asked NCCL to move: calls and bytes, by kind and by how many ranks share them.
 *
 * True of it: every collective and message counts as it is issued, whether its payload is exchanged or not, and so does
 * what a group holds back until its end. A communicator of one moves nothing and is left out, and so is what NCCL itself
 * exchanges (a split's colors). Bytes are what nccl-tests calls a call's size: all that an all-gather brings together,
 * all that a reduce-scatter or an all-to-all takes. */
#include "emulator.h" /* first: it asks for GNU's interfaces */

#include "nccl.h"

struct moved {
  int32_t kind, num_ranks;
  uint64_t calls, bytes;
};
static struct moved all[NCCL_NUM_KINDS][NCCL_MAX_RANKS + 1];

void nccl_moved(enum nccl_kind kind, int num_ranks, size_t count, size_t element_bytes) {
  if (num_ranks < 2 || num_ranks > NCCL_MAX_RANKS) return;
  bool of_each = kind == ALL_GATHER || kind == REDUCE_SCATTER || kind == ALL_TO_ALL;
  struct moved *m = &all[kind][num_ranks];
  __atomic_fetch_add(&m->calls, 1, __ATOMIC_RELAXED);
  __atomic_fetch_add(&m->bytes, (uint64_t)count * element_bytes * (of_each ? (uint64_t)num_ranks : 1), __ATOMIC_RELAXED);
}

/* Writes up to `room` of them; returns how many there are. */
API int emu_control_moved(struct moved *out, int room) {
  int found = 0;
  for (int kind = 0; kind < NCCL_NUM_KINDS; kind++)
    for (int ranks = 2; ranks <= NCCL_MAX_RANKS; ranks++) {
      if (!__atomic_load_n(&all[kind][ranks].calls, __ATOMIC_RELAXED)) continue;
      if (found < room) out[found] = (struct moved){kind, ranks, all[kind][ranks].calls, all[kind][ranks].bytes};
      found++;
    }
  return found;
}
