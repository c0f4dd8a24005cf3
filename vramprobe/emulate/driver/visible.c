/* Which of the machine's cards this process sees, in which order, and the address space of each.
 *
 * True of it: CUDA_VISIBLE_DEVICES by number, by UUID or its beginning, ended by the first entry that is neither;
 * CUDA_DEVICE_ORDER (FASTEST_FIRST, CUDA's default, sorts by multiprocessors times clock; PCI_BUS_ID keeps the
 * machine's order). Left out: MIG. */
#include "emulator.h" /* first: it asks for GNU's interfaces */

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>

struct device devices[MAX_DEVICES];
int num_devices;

static const size_t SPACE_BYTES = (size_t)1 << 42; /* 4 TiB of address space a card; free until touched */
static const size_t PACKED_BYTES = (size_t)1 << 38, POOLED_BYTES = (size_t)1 << 40;

static void add_device(int index) {
  for (int i = 0; i < num_devices; i++)
    if (devices[i].index == index) { /* named twice: CUDA then sees none */
      num_devices = -1;
      return;
    }
  struct device *d = &devices[num_devices];
  d->ordinal = num_devices++;
  d->index = index;
  d->card = &machine.card[index];
}

static void choose_visible(const int *order) {
  const char *text = getenv("CUDA_VISIBLE_DEVICES");
  if (!text) {
    for (int i = 0; i < machine.num_devices; i++) add_device(order[i]);
    return;
  }
  while (*text && num_devices >= 0) {
    size_t length = strcspn(text, ",");
    char entry[64], *end;
    while (length && isspace((unsigned char)*text)) text++, length--;
    snprintf(entry, sizeof entry, "%.*s", (int)(length < 63 ? length : 63), text);
    for (size_t k = strlen(entry); k && isspace((unsigned char)entry[k - 1]);) entry[--k] = 0;
    int index = -1;
    if (isdigit((unsigned char)entry[0])) {
      long n = strtol(entry, &end, 10);
      if (!*end && n < machine.num_devices) index = order[n];
    } else if (strncmp(entry, "GPU-", 4) == 0) {
      int matches = 0;
      for (int i = 0; i < machine.num_devices; i++)
        if (strncasecmp(machine.card[i].uuid_text, entry, strlen(entry)) == 0) index = i, matches++;
      if (matches != 1) index = -1; /* a beginning must name one card */
    }
    if (index < 0) break;
    add_device(index);
    text += length;
    if (*text) text++;
  }
  if (num_devices < 0) num_devices = 0;
}

static void reserve_space(struct device *d) {
  void *space = mmap(NULL, SPACE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (space == MAP_FAILED) {
    fprintf(stderr, "vramprobe: no %zu bytes of address space for an emulated card (ulimit -v?)\n", SPACE_BYTES);
    abort();
  }
  madvise(space, SPACE_BYTES, MADV_NOHUGEPAGE); /* a touched byte costs a page, not 2 MiB */
  madvise(space, SPACE_BYTES, MADV_DONTDUMP);
  d->start = ((uintptr_t)space + GRANULE_BYTES - 1) & ~(GRANULE_BYTES - 1);
  d->end = ((uintptr_t)space + SPACE_BYTES) & ~(GRANULE_BYTES - 1);
  d->packed = (struct arena){.start = d->start, .end = d->start + PACKED_BYTES};
  d->pooled = (struct arena){.start = d->packed.end, .end = d->packed.end + POOLED_BYTES};
  d->whole = (struct arena){.start = d->pooled.end, .end = d->end};
  d->packed_granules = calloc(PACKED_BYTES / GRANULE_BYTES, sizeof *d->packed_granules);
}

void devices_load(void) {
  int order[MAX_DEVICES];
  for (int i = 0; i < machine.num_devices; i++) order[i] = i;
  const char *rule = getenv("CUDA_DEVICE_ORDER");
  if (!rule || strcmp(rule, "PCI_BUS_ID") != 0) /* stable: equal cards keep their order */
    for (int i = 1; i < machine.num_devices; i++)
      for (int k = i; k > 0; k--) {
        const struct card *a = &machine.card[order[k - 1]], *b = &machine.card[order[k]];
        if (b->sm_count * b->clock_khz <= a->sm_count * a->clock_khz) break;
        int swap = order[k];
        order[k] = order[k - 1], order[k - 1] = swap;
      }
  choose_visible(order);
  for (int i = 0; i < num_devices; i++) {
    struct device *d = &devices[i];
    reserve_space(d);
    computed_init(d);
    pool_init(&d->default_pool, i, true);
    pool_init(&d->graph_pool, i, true);
    d->current_pool = &d->default_pool;
  }
}

void devices_clear(int ordinal) {
  struct device *d = &devices[ordinal];
  virtual_memory_clear(d);
  memory_clear(d);
  pools_clear(d);
}
