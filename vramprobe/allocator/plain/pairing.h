/* Frees of a log and their allocations, without Python: see pairing.c. */
#ifndef VRAMPROBE_PAIRING_H
#define VRAMPROBE_PAIRING_H

#include <stdbool.h>
#include <stdint.h>

enum { NO_MEMORY = -1 };

/* The block of each event, numbered from 1 in the order of allocations. Returns num_events, or the first event that no
 * living block answers to, or NO_MEMORY. */
int64_t pair_events(
    int64_t num_events, const int64_t *codes, const int64_t *ranks, const int64_t *sizes, int64_t *blocks);

#endif
