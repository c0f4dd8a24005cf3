/* What must be known of a run: events.jsonl, traces, counts, and the end of a run at a function that is not emulated.
 *
 * True of it: an event is one line written by one call of write on an O_APPEND file, so processes do not mix.
 * VRAMPROBE_EMULATOR_STATS=1 prints at exit what was called; trace 1 prints allocations, 2 every launch. */
#include "emulator.h" /* first: it asks for GNU's interfaces */

#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { NUM_TOLD = 128 };
static uint64_t num_launches;

double now_milliseconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

void trace(int level, const char *format, ...) {
  if (machine.trace < level) return;
  char text[700];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  fprintf(stderr, "[emulated gpu %d] %s\n", (int)getpid(), text);
}

static void escape(char *to, size_t room, const char *from) { /* a JSON string's inside */
  size_t k = 0;
  for (; *from && k + 7 < room; from++) {
    unsigned char c = (unsigned char)*from;
    if (c == '"' || c == '\\') k += (size_t)snprintf(to + k, room - k, "\\%c", c);
    else if (c < 32) k += (size_t)snprintf(to + k, room - k, "\\u%04x", c);
    else to[k++] = (char)c;
  }
  to[k] = 0;
}

void report_event(const char *kind, const char *name, const char *detail) {
  if (!machine.folder[0]) return;
  char path[1200], a[600], b[1200], line[2200];
  escape(a, sizeof a, name ? name : "");
  escape(b, sizeof b, detail ? detail : "");
  snprintf(path, sizeof path, "%s/events.jsonl", machine.folder);
  int length = snprintf(line, sizeof line, "{\"kind\": \"%s\", \"name\": \"%s\", \"pid\": %d, \"detail\": \"%s\"}\n", kind,
                        a, (int)getpid(), b);
  int fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
  if (fd < 0) return;
  if (write(fd, line, (size_t)length) != length) trace(1, "an event could not be written to %s", path);
  close(fd);
}

bool report_once(const char *kind, const char *name, const char *detail) {
  static const char *told[NUM_TOLD];
  for (int k = 0; k < NUM_TOLD; k++) {
    const char *nobody = NULL;
    if (__atomic_compare_exchange_n(&told[k], &nobody, name, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) break;
    if (!strcmp(nobody, name)) return false;
  }
  report_event(kind, name, detail);
  return true;
}

/* A function of a math library: the caller's own check of statuses turns it into an exception with this sentence, or with
 * the function's name. It is printed the first time. */
static __thread char last_unsupported[400];
const char *unsupported_sentence(void) {
  return *last_unsupported ? last_unsupported : "a status of an emulated library";
}
int unsupported(const char *library, const char *name, int code) {
  snprintf(last_unsupported, sizeof last_unsupported,
           "%s of %s is not emulated: its answer is not known without a GPU. Compute this operation on the CPU, or leave "
           "it out of the emulated run", name, library);
  if (report_once("unsupported_function", name, last_unsupported)) fprintf(stderr, "vramprobe: %s\n", last_unsupported);
  return code;
}

void fatal_unknown(const char *library, const char *name) {
  static char said[600];
  snprintf(said, sizeof said,
           "%s%s%s is not emulated: it would have written a result that the program reads, and the run ends here rather "
           "than go on with garbage",
           library && *library ? library : "", library && *library ? ": " : "", name);
  report_event("unknown_function", name, said);
  fprintf(stderr, "vramprobe: %s\n", said);
  fflush(stderr);
  abort();
}

/* ---- counts: names are string literals of the stubs, compared by address ---------------------------------------- */
enum { NUM_SLOTS = 8192 };
static struct {
  const char *name;
  uint64_t count;
} calls[NUM_SLOTS];
static pthread_mutex_t count_lock = PTHREAD_MUTEX_INITIALIZER;

void count_call(const char *name) {
  size_t k = ((uintptr_t)name * 0x9E3779B97F4A7C15u >> 40) % NUM_SLOTS;
  pthread_mutex_lock(&count_lock);
  for (size_t tried = 0; tried < NUM_SLOTS; tried++, k = (k + 1) % NUM_SLOTS) {
    if (calls[k].name && calls[k].name != name) continue;
    if (!calls[k].name) trace(1, "first call of %s, which computes nothing", name);
    calls[k].name = name;
    calls[k].count++;
    break;
  }
  pthread_mutex_unlock(&count_lock);
}

void count_launch(const char *name, struct cuda_dim3 grid, struct cuda_dim3 block, size_t shared_bytes) {
  __atomic_fetch_add(&num_launches, 1, __ATOMIC_RELAXED);
  if (machine.trace >= 2)
    trace(2, "launch %s <<<%ux%ux%u, %ux%ux%u, %zu>>>", name, grid.x, grid.y, grid.z, block.x, block.y, block.z,
          shared_bytes);
}

uint64_t launches(void) { return __atomic_load_n(&num_launches, __ATOMIC_RELAXED); }

__attribute__((destructor)) static void print_stats(void) {
  const char *wanted = getenv("VRAMPROBE_EMULATOR_STATS");
  if (!wanted || !*wanted || !strcmp(wanted, "0") || !driver_is_entered()) return;
  fprintf(stderr, "[emulated gpu %d] %llu launches", (int)getpid(), (unsigned long long)launches());
  for (int i = 0; i < num_devices; i++) {
    const struct device *d = &devices[i];
    fprintf(stderr, "; cuda:%d %s: %.1f MiB in use, %.1f MiB at the peak, %llu allocations, %llu frees", i, d->card->name,
            (double)shared_process_used_bytes(d->index) / MIB, (double)shared_process_peak_bytes(d->index) / MIB,
            (unsigned long long)d->num_allocations, (unsigned long long)d->num_frees);
  }
  fprintf(stderr, "; counted:");
  for (int k = 0; k < NUM_SLOTS; k++)
    if (calls[k].name) fprintf(stderr, " %s:%llu", calls[k].name, (unsigned long long)calls[k].count);
  fputc('\n', stderr);
}
