/* What the driver's files share: the machine as configured, this process's view of its devices, and the few verbs
 * that cross files. Every other function is static to its file. Names say the unit last: bytes, khz, bits.
 *
 * Locks, in the order in which they may be taken: process_lock (this process's tables), then the machine's robust
 * lock inside shared.c, then the one inside computed.c. Callbacks to the host are made under none of them. */
#ifndef EMULATE_EMULATOR_H
#define EMULATE_EMULATOR_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "cuda_types.h"

#define API __attribute__((visibility("default")))
#define PRINTF_LIKE(text, first) __attribute__((format(printf, text, first)))
#define UNUSED(x) ((void)(x))
#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)
#define GIB ((size_t)1 << 30)
#define PAGE_BYTES ((size_t)4096)
#define GRANULE_BYTES (2 * MIB) /* the driver's granularity of device memory */

enum { MAX_DEVICES = 16 };

typedef int status; /* cudaError_t and CUresult, which agree in number where they agree in meaning */
enum {
  OK = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  NOT_INITIALIZED = 3,
  INVALID_DEVICE_POINTER = 17,
  NO_DEVICE = 100,
  INVALID_IMAGE = 200,
  INVALID_DEVICE = 101,
  INVALID_CONTEXT = 201,
  ALREADY_MAPPED = 208,
  NOT_MAPPED = 211,
  INVALID_HANDLE = 400,
  NOT_FOUND = 500,
  PEER_ACCESS_ALREADY_ENABLED = 704,
  PEER_ACCESS_NOT_ENABLED = 705,
  HOST_MEMORY_ALREADY_REGISTERED = 712,
  HOST_MEMORY_NOT_REGISTERED = 713,
  NOT_SUPPORTED = 801,
  CAPTURE_UNSUPPORTED = 900,
  CAPTURE_INVALIDATED = 901,
  CAPTURE_UNMATCHED = 903,
  CAPTURE_WRONG_THREAD = 908,
  NOT_READY = 600,
  FILE_NOT_FOUND = 301,
  OPERATING_SYSTEM = 304,
  UNKNOWN_ERROR = 999,
};

/* ---- the machine as its machine.txt describes it (machine.c) ------------------------------------------------- */
enum fill { FILL_ZEROS, FILL_ONES, FILL_RANDOM, FILL_KEEP };

struct card {
  char name[96], uuid_text[48], pci_bus_id[24];
  unsigned char uuid[16];
  int capability_major, capability_minor;
  unsigned pci_domain, pci_bus, pci_device;
  uint64_t total_bytes, nvml_total_bytes, context_bytes;
  int64_t sm_count, threads_per_sm, blocks_per_sm, registers_per_sm, registers_per_block;
  int64_t shared_memory_per_block_bytes, shared_memory_per_block_optin_bytes, shared_memory_per_sm_bytes;
  int64_t reserved_shared_memory_per_block_bytes, l2_bytes, persisting_l2_bytes, memory_bus_bits, clock_khz;
  int64_t memory_clock_khz, async_engines, ecc, integrated, single_to_double_ratio, power_limit_milliwatts;
};

struct machine {
  char folder[1024];
  int num_devices;
  struct card card[MAX_DEVICES]; /* in NVML's order, by PCI bus */
  enum fill fill;
  uint64_t fill_seed, copy_max_bytes, collective_max_bytes, graph_bytes, graph_node_bytes;
  int trace, driver_version, collective_timeout_seconds;
  bool blocking; /* CUDA_LAUNCH_BLOCKING=1 */
};
extern struct machine machine;
bool machine_load(void); /* false, after one line on stderr, where there is none */

/* ---- this process's devices, by CUDA ordinal (devices.c, contexts.c) ------------------------------------------ */
struct block {
  uintptr_t address;
  size_t requested_bytes, size_bytes;
  uint64_t id;
  void *owner; /* a pool, a mapping's file, ... by kind */
  int kind;
};
enum block_kind { BLOCK_MALLOC = 1, BLOCK_POOL = 2, BLOCK_RESERVED = 4, BLOCK_IMPORTED = 8, BLOCK_MODULE = 16 };

struct arena { /* a part of a device's address space, its blocks sorted by address */
  uintptr_t start, end;
  struct block *blocks;
  size_t count, capacity;
};

struct pool {
  uint32_t magic;
  int ordinal;
  bool is_default;
  uint64_t release_threshold_bytes, max_bytes;
  uint64_t reserved_bytes, reserved_peak_bytes, used_bytes, used_peak_bytes;
  int reuse[3];
};

struct context {
  uint32_t magic;
  int ordinal;
  bool is_primary, is_active;
  int references;
  unsigned flags;
};

struct device {
  int ordinal, index; /* CUDA's number, the machine's number */
  const struct card *card;
  uintptr_t start, end; /* of its address space */
  struct arena packed, pooled, whole;
  uint32_t *packed_granules; /* live blocks in each 2 MiB of the packed arena */
  struct context primary;
  struct pool default_pool, graph_pool;
  struct pool *current_pool;
  uint32_t peers_enabled;
  uint64_t num_allocations, num_frees;
};
extern struct device devices[MAX_DEVICES];
extern int num_devices;
extern __thread int current_device;

void process_lock(void);
void process_unlock(void);
status driver_enter(void);  /* the first call of CUDA in this process; 3 in a forked child of one that made it */
status context_enter(void); /* driver_enter, and the current device's primary context, made and charged on demand */
status context_of(int ordinal, struct context **context);
status context_current(struct device **device); /* the driver API's rule: 201 where the thread has none */
bool driver_is_entered(void);
void devices_clear(int ordinal); /* everything this process holds on it, as cudaDeviceReset does */
void devices_load(void);
status fail(status s); /* remembers it as the thread's last error */

#define TRY(call)                    \
  do {                               \
    status try_status_ = (call);     \
    if (try_status_) return fail(try_status_); \
  } while (0)
#define TRY_DRIVER(call)             \
  do {                               \
    status try_status_ = (call);     \
    if (try_status_) return try_status_; \
  } while (0)

/* ---- the state that all processes share (shared.c) ------------------------------------------------------------ */
struct shared_usage {
  uint32_t pid;
  uint64_t used_bytes;
};
bool shared_charge(int index, uint64_t bytes); /* false: the card has no room, even after the dead were reaped */
void shared_release(int index, uint64_t bytes);
uint64_t shared_used_bytes(int index); /* by everybody alive */
uint64_t shared_peak_bytes(int index);
uint64_t shared_take_peak_bytes(int index); /* the card's highest use since the last call, at this process's charges */
uint64_t shared_process_used_bytes(int index);
uint64_t shared_process_peak_bytes(int index);
int shared_usages(int index, struct shared_usage *usages, int max); /* processes that hold memory; how many there are */
void shared_after_fork(void);

/* ---- device memory (memory.c, pools.c, virtual_memory.c) ------------------------------------------------------ */
bool device_charge(struct device *device, uint64_t bytes); /* gives back idle pool memory before it says no */
status memory_allocate(struct device *device, void **out, size_t bytes, enum block_kind kind, void *owner);
status memory_free(void *pointer, int kinds); /* an address that starts no block of these kinds: INVALID_VALUE */
struct device *memory_device(const void *pointer); /* NULL: not device memory of this process */
bool memory_block(const void *pointer, struct block *copy);
void memory_clear(struct device *device);
void pages_drop(uintptr_t address, size_t bytes); /* they read as zeros and cost nothing */
bool pool_charge(struct pool *pool, size_t bytes);
void pool_uncharge(struct pool *pool, size_t bytes);
void pools_release_idle(struct device *device, bool beyond_threshold_only);
void pools_clear(struct device *device);
void pool_init(struct pool *pool, int ordinal, bool is_default);
void virtual_memory_clear(struct device *device);
void shared_file_map(uintptr_t address, size_t bytes, int fd, bool keep_contents);

/* ---- host memory (host_memory.c) ------------------------------------------------------------------------------ */
enum host_kind { HOST_NONE, HOST_PINNED, HOST_MANAGED, HOST_REGISTERED };
enum host_kind host_memory_kind(const void *pointer, void **start, size_t *bytes);
status host_free_managed(void *pointer);
enum host_count { HOST_COUNT_TENSORS = 1, HOST_COUNT_PINNED };
void host_counted(enum host_count what, int64_t bytes); /* more, or less, is held (host_counts.c) */

/* ---- which bytes are computed, and copies (computed.c, copies.c) ----------------------------------------------- */
void computed_init(struct device *device);
void computed_set(const void *pointer, size_t bytes, bool computed);
bool computed_all(const void *pointer, size_t bytes);
bool computed_any(const void *pointer, size_t bytes);
size_t computed_run(const void *pointer, size_t bytes, bool *computed); /* length of the leading run of one kind */
void computed_copy(const void *to, const void *from, size_t bytes);
void fill_bytes(void *to, const void *as_if_at, size_t bytes); /* what uncomputed bytes at an address read as */
void copy_now(void *to, const void *from, size_t bytes);
void set_now(void *to, uint32_t value, size_t value_bytes, size_t count);

/* ---- streams, capture, graphs (streams.c, graphs.c) ------------------------------------------------------------- */
enum node_type { NODE_KERNEL, NODE_MEMCPY, NODE_MEMSET, NODE_HOST, NODE_GRAPH, NODE_EMPTY, NODE_WAIT_EVENT,
                 NODE_RECORD_EVENT, NODE_ALLOCATE = 10, NODE_FREE = 11 };
struct graph;
struct node {
  uint32_t magic;
  enum node_type type;
  struct graph *graph;
  void *to;
  const void *from;
  size_t pitch_to, pitch_from, width, height, value_bytes;
  uint32_t value;
  void (*call)(void *);
  void (*stream_call)(void *, int, void *);
  void *argument;
  struct graph *child;
};
bool capture_node(void *stream, const struct node *node); /* true: the stream captures, so nothing is to be done now */
struct graph *stream_capture(void *stream); /* the graph being captured, NULL */
struct graph *graph_new(void);
struct node *graph_add(struct graph *graph, const struct node *node);
void graph_free(struct graph *graph);
void graph_own(struct graph *graph, void *pointer); /* memory that lives as long as the graph */
void node_run(const struct node *node, void *stream);

void stream_submitted(void *stream); /* work that the host may wait for */
void stream_awaited(void *stream);   /* by the host, in a call that waits for its own work */

/* ---- when work is done (completion.c) ---------------------------------------------------------------------------- */
struct moment { /* of the card's work */
  uint64_t number, launches;
};
struct moment moment_next(void); /* of an event that is recorded */
struct moment moment_now(void);  /* of the last one: what is submitted now is behind it */
void moment_awaited(struct moment moment); /* by the host */
void all_work_awaited(void);
bool moment_is_done(struct moment moment, bool only_asks); /* only_asks: a thread that submits nothing */
bool moment_is_over(struct moment moment); /* awaited, or behind a full queue of launches */

/* ---- what torch's watchdog thread is told of collectives (watchdog.c) --------------------------------------------- */
struct watched;
void watched_begin(struct watched **slot, struct moment moment); /* of the event that a collective ends with */
void watched_end(struct watched **slot); /* it is waited for, or recorded anew */
bool watched_asked(struct watched **slot, bool *done); /* false: it is not watched */
void collective_begins(void);
void watchdog_told_everything(void); /* a process group ends, or the program */
bool collectives_are_watched(void);
void stream_carries_collective(void *stream); /* the next event that this thread records may be its end */
enum threads_state { THREADS_NONE, THREADS_SLEEP, THREADS_RUN };
enum threads_state threads_named(const char *name); /* of this process (threads.c) */

/* ---- what must be known (report.c) ------------------------------------------------------------------------------ */
void trace(int level, const char *format, ...) PRINTF_LIKE(2, 3);
void report_event(const char *kind, const char *name, const char *detail); /* a line of events.jsonl */
bool report_once(const char *kind, const char *name, const char *detail); /* the first time for a literal name: true */
_Noreturn void fatal_unknown(const char *library, const char *name);
int unsupported(const char *library, const char *name, int code); /* says so, returns the code */
const char *unsupported_sentence(void); /* of this thread's last one */
API const char *emu_generic_string(void);
API status emu_cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                                 size_t height, int kind, void *stream);
void count_call(const char *name);
void count_launch(const char *name, struct cuda_dim3 grid, struct cuda_dim3 block, size_t shared_bytes);
uint64_t launches(void);
status function_named(void **function, const char *name); /* of a module or a library; as long as the process */
uint64_t graphs_most_bytes(void); /* held by instances of graphs (graphs.c) */
double now_milliseconds(void);
API void *emu_lookup(const char *name);
#endif
