/* The machine as its folder's machine.txt describes it: VRAMPROBE_EMULATED_MACHINE names the folder.
 *
 * True of it: every key is checked; an unknown key, a missing one or a value out of range ends in one line that names
 * the file, the line and what is allowed, and the machine then has no device. Left out: nothing is guessed about a
 * card, except the keys listed as optional below, which follow from the architecture. */
#include "emulator.h" /* first: it asks for GNU's interfaces */

#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct machine machine;

static const char VARIABLE[] = "VRAMPROBE_EMULATED_MACHINE";
static char at_start[1024]; /* its value: a program may empty its environment before it asks for a card */
__attribute__((constructor)) static void remember(void) {
  const char *folder = getenv(VARIABLE);
  if (folder) snprintf(at_start, sizeof at_start, "%s", folder);
}

struct key {
  const char *name;
  size_t offset;
  bool required;
  uint64_t min, max;
};
#define CARD(field, required, min, max) {#field, offsetof(struct card, field), required, min, max}
static const struct key CARD_KEYS[] = {
    CARD(total_bytes, true, 16 * MIB, 1024 * GIB),
    CARD(nvml_total_bytes, false, 16 * MIB, 1024 * GIB), /* else total_bytes */
    CARD(context_bytes, false, 0, 1024 * GIB),           /* else the head's */
    CARD(sm_count, true, 1, 4096),
    CARD(threads_per_sm, true, 32, 4096),
    CARD(blocks_per_sm, true, 1, 256),
    CARD(registers_per_sm, true, 1024, 1 << 20),
    CARD(registers_per_block, false, 1024, 1 << 20), /* else 65536 */
    CARD(shared_memory_per_block_bytes, true, KIB, MIB),
    CARD(shared_memory_per_block_optin_bytes, true, KIB, MIB),
    CARD(shared_memory_per_sm_bytes, true, KIB, MIB),
    CARD(reserved_shared_memory_per_block_bytes, false, 0, MIB), /* else 1024 from capability 8.0, 0 before */
    CARD(l2_bytes, true, 0, GIB),
    CARD(persisting_l2_bytes, false, 0, GIB), /* else 3/4 of l2_bytes from capability 8.0, 0 before */
    CARD(memory_bus_bits, true, 1, 1 << 16),
    CARD(clock_khz, true, 1, 100000000),
    CARD(memory_clock_khz, true, 1, 100000000),
    CARD(async_engines, false, 0, 16),           /* else 3 */
    CARD(ecc, false, 0, 1),                      /* else 0 */
    CARD(integrated, false, 0, 1),               /* else 0 */
    CARD(single_to_double_ratio, false, 1, 128), /* else 2 for the 8.0, 9.0 and 10.0 families, 64, or 32 before */
    CARD(power_limit_milliwatts, false, 0, 10000000),
};
enum { NUM_CARD_KEYS = sizeof CARD_KEYS / sizeof *CARD_KEYS };

struct reading {
  char path[1200];
  int line;
  bool failed;
  uint32_t seen[MAX_DEVICES];
  bool named[MAX_DEVICES], identified[MAX_DEVICES], capable[MAX_DEVICES], head_format;
};

static void bad(struct reading *r, const char *format, ...) PRINTF_LIKE(2, 3);
static void bad(struct reading *r, const char *format, ...) {
  if (r->failed) return;
  r->failed = true;
  char text[600];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  fprintf(stderr, "vramprobe: %s, line %d: %s\n", r->path, r->line, text);
}

static uint64_t number(struct reading *r, const char *key, const char *value, uint64_t min, uint64_t max) {
  char *end;
  errno = 0;
  uint64_t n = strtoull(value, &end, 10);
  if (errno || end == value || *end || *value == '-' || n < min || n > max)
    bad(r, "%s is %s: an integer from %" PRIu64 " to %" PRIu64 " is allowed", key, value, min, max);
  return n;
}

static void read_uuid(struct reading *r, struct card *card, const char *value) {
  int k = 0;
  const char *c = strncmp(value, "GPU-", 4) == 0 ? value + 4 : "";
  for (; *c && k < 32; c++) {
    if (*c == '-') continue;
    if (!isxdigit((unsigned char)*c)) break;
    int digit = isdigit((unsigned char)*c) ? *c - '0' : tolower((unsigned char)*c) - 'a' + 10;
    card->uuid[k / 2] = (unsigned char)(k % 2 ? card->uuid[k / 2] << 4 | digit : digit);
    k++;
  }
  if (k != 32 || *c) bad(r, "uuid is %s: GPU- and 32 hexadecimal digits are allowed", value);
  snprintf(card->uuid_text, sizeof card->uuid_text, "%s", value);
}

static void read_card_key(struct reading *r, int i, const char *key, const char *value) {
  struct card *card = &machine.card[i];
  if (!strcmp(key, "name")) {
    snprintf(card->name, sizeof card->name, "%s", value);
    r->named[i] = true;
  } else if (!strcmp(key, "uuid")) {
    read_uuid(r, card, value);
    r->identified[i] = true;
  } else if (!strcmp(key, "pci_bus_id")) {
    snprintf(card->pci_bus_id, sizeof card->pci_bus_id, "%s", value);
    if (sscanf(value, "%x:%x:%x.0", &card->pci_domain, &card->pci_bus, &card->pci_device) != 3)
      bad(r, "pci_bus_id is %s: domain:bus:device.0 in hexadecimal is allowed", value);
  } else if (!strcmp(key, "compute_capability")) {
    char rest;
    if (sscanf(value, "%d.%d%c", &card->capability_major, &card->capability_minor, &rest) != 2)
      bad(r, "compute_capability is %s: major.minor, such as 9.0, is allowed", value);
    r->capable[i] = true;
  } else {
    for (int k = 0; k < NUM_CARD_KEYS; k++) {
      const struct key *known = &CARD_KEYS[k];
      if (strcmp(known->name, key) != 0) continue;
      uint64_t n = number(r, key, value, known->min, known->max);
      memcpy((char *)card + known->offset, &n, sizeof n); /* every numeric field has eight bytes */
      r->seen[i] |= 1u << k;
      return;
    }
    bad(r, "unknown key %s of a device", key);
  }
}

static void read_head_key(struct reading *r, const char *key, const char *value, uint64_t *context_bytes) {
  static const char *const FILLS[] = {"zeros", "ones", "random", "keep"};
  if (!strcmp(key, "format")) {
    if (strcmp(value, "1") != 0) bad(r, "format is %s: this driver reads format 1; rebuild it or the machine", value);
    r->head_format = true;
  } else if (!strcmp(key, "num_devices")) {
    machine.num_devices = (int)number(r, key, value, 0, MAX_DEVICES);
  } else if (!strcmp(key, "context_bytes")) {
    *context_bytes = number(r, key, value, 0, 1024 * GIB);
  } else if (!strcmp(key, "fill")) {
    int k = 0;
    while (k < 4 && strcmp(FILLS[k], value) != 0) k++;
    if (k == 4) bad(r, "fill is %s: zeros, ones, random and keep are allowed", value);
    machine.fill = (enum fill)(k & 3);
  } else if (!strcmp(key, "fill_seed")) {
    machine.fill_seed = number(r, key, value, 0, UINT64_MAX);
  } else if (!strcmp(key, "graph_bytes")) {
    machine.graph_bytes = number(r, key, value, 0, UINT64_MAX);
  } else if (!strcmp(key, "graph_node_bytes")) {
    machine.graph_node_bytes = number(r, key, value, 0, UINT64_MAX);
  } else if (!strcmp(key, "copy_max_bytes")) {
    machine.copy_max_bytes = number(r, key, value, 0, UINT64_MAX);
  } else if (!strcmp(key, "collective_max_bytes")) {
    machine.collective_max_bytes = number(r, key, value, 0, GIB);
  } else if (!strcmp(key, "collective_timeout_seconds")) {
    machine.collective_timeout_seconds = (int)number(r, key, value, 1, 1000000);
  } else if (!strcmp(key, "trace")) {
    machine.trace = (int)number(r, key, value, 0, 2);
  } else if (!strcmp(key, "driver_version")) {
    machine.driver_version = (int)number(r, key, value, 11000, 99999);
  } else {
    bad(r, "unknown key %s", key);
  }
}

static void complete(struct reading *r, uint64_t context_bytes) {
  if (!r->head_format) bad(r, "the key format is missing");
  for (int i = 0; i < machine.num_devices; i++) {
    struct card *card = &machine.card[i];
    if (!r->named[i] || !r->identified[i] || !r->capable[i])
      bad(r, "device %d lacks one of name, uuid, compute_capability", i);
    for (int k = 0; k < NUM_CARD_KEYS; k++)
      if (CARD_KEYS[k].required && !(r->seen[i] & 1u << k)) bad(r, "device %d lacks %s", i, CARD_KEYS[k].name);
    if (!card->pci_bus_id[0]) {
      card->pci_bus = (unsigned)i + 1;
      snprintf(card->pci_bus_id, sizeof card->pci_bus_id, "0000:%02X:00.0", (unsigned char)(i + 1));
    }
    bool ampere = card->capability_major >= 8;
    int family = card->capability_major * 10 + card->capability_minor;
#define DEFAULT(field, value) \
  for (int k = 0; k < NUM_CARD_KEYS; k++) \
    if (!strcmp(CARD_KEYS[k].name, #field) && !(r->seen[i] & 1u << k)) card->field = (value)
    DEFAULT(nvml_total_bytes, card->total_bytes);
    DEFAULT(context_bytes, context_bytes);
    DEFAULT(registers_per_block, 65536);
    DEFAULT(reserved_shared_memory_per_block_bytes, ampere ? 1024 : 0);
    DEFAULT(persisting_l2_bytes, ampere ? card->l2_bytes / 4 * 3 : 0);
    DEFAULT(async_engines, 3);
    DEFAULT(single_to_double_ratio, family == 80 || family == 90 || family == 100 ? 2 : ampere ? 64 : 32);
    if (card->nvml_total_bytes < card->total_bytes)
      bad(r, "device %d: nvml_total_bytes must not be less than total_bytes", i);
  }
}

bool machine_load(void) {
  const char *named = getenv(VARIABLE), *folder = named && *named ? named : at_start;
  if (!*folder) {
    fprintf(stderr, "vramprobe: the emulated GPU has no machine: %s is not set (vramprobe sets it)\n", VARIABLE);
    return false;
  }
  struct reading r = {.line = 0};
  snprintf(machine.folder, sizeof machine.folder, "%s", folder);
  snprintf(r.path, sizeof r.path, "%s/machine.txt", folder);
  FILE *file = fopen(r.path, "re");
  if (!file) {
    fprintf(stderr, "vramprobe: the emulated GPU has no machine: %s: %s\n", r.path, strerror(errno));
    return false;
  }
  machine.copy_max_bytes = 4 * MIB;
  machine.collective_max_bytes = 256 * KIB;
  machine.collective_timeout_seconds = 600;
  machine.driver_version = EMU_CUDA_VERSION;
  uint64_t context_bytes = 0;
  int device = -1;
  char line[512];
  while (!r.failed && fgets(line, sizeof line, file)) {
    r.line++;
    line[strcspn(line, "\r\n")] = 0;
    char *value = strchr(line, ' ');
    if (!line[0] || line[0] == '#') continue;
    if (!value) {
      bad(&r, "%s has no value: lines are a key, a space and a value", line);
      break;
    }
    *value++ = 0;
    if (!strcmp(line, "device")) {
      device++;
      if (number(&r, line, value, 0, MAX_DEVICES - 1) != (uint64_t)device || device >= machine.num_devices)
        bad(&r, "device %s: devices are numbered from 0 to num_devices - 1, in order", value);
    } else if (device >= 0) {
      read_card_key(&r, device, line, value);
    } else {
      read_head_key(&r, line, value, &context_bytes);
    }
  }
  fclose(file);
  complete(&r, context_bytes);
  const char *level = getenv("VRAMPROBE_EMULATOR_TRACE");
  if (level && *level) machine.trace = atoi(level);
  const char *blocking = getenv("CUDA_LAUNCH_BLOCKING");
  machine.blocking = blocking && !strcmp(blocking, "1");
  if (r.failed) machine.num_devices = 0;
  return !r.failed;
}
