/* How much host memory the program holds: torch's CPU tensors, and what it pins.
 *
 * Being preloaded, alloc_cpu and free_cpu here come before libc10's, through which torch's CPU allocator calls them. A
 * process's RSS tells less: files of holes have no pages, and the emulated cards have buffers of their own. Left out:
 * files that are mapped (safetensors), numpy, Python, libraries, and memory that is registered, which is somebody's
 * already. */
#include "emulator.h" /* first: it asks for GNU's interfaces */

#include <dlfcn.h>
#include <malloc.h>
#include <pthread.h>
#include <stdlib.h>

enum { ALL, NUM_COUNTED = HOST_COUNT_PINNED + 1 };
static int64_t held[NUM_COUNTED], highest[NUM_COUNTED]; /* by enum host_count; the first is their sum */
static void *(*real_alloc)(size_t bytes);
static void (*real_free)(void *pointer);
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void add(int what, int64_t bytes) {
  int64_t now = __atomic_add_fetch(&held[what], bytes, __ATOMIC_RELAXED);
  int64_t most = __atomic_load_n(&highest[what], __ATOMIC_RELAXED);
  while (now > most && !__atomic_compare_exchange_n(&highest[what], &most, now, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
    ;
}

void host_counted(enum host_count what, int64_t bytes) {
  add(ALL, bytes);
  add(what, bytes);
}

/* The most that was held since the last call: of both, of tensors, of pinned memory. */
API void emu_control_take_host_peaks(uint64_t peaks[NUM_COUNTED]) {
  for (int what = 0; what < NUM_COUNTED; what++) {
    int64_t now = __atomic_load_n(&held[what], __ATOMIC_RELAXED);
    int64_t most = __atomic_exchange_n(&highest[what], now, __ATOMIC_RELAXED);
    peaks[what] = (uint64_t)(most > now ? most : now);
  }
}

static void find(void) {
  void *c10 = dlopen("libc10.so", RTLD_NOLOAD | RTLD_LAZY);
  if (!c10) abort(); /* nobody else calls these */
  *(void **)&real_alloc = dlsym(c10, "_ZN3c109alloc_cpuEm");
  *(void **)&real_free = dlsym(c10, "_ZN3c108free_cpuEPv");
  if (!real_alloc || !real_free) abort();
}

API void *_ZN3c109alloc_cpuEm(size_t bytes) { /* c10::alloc_cpu */
  pthread_once(&once, find);
  void *pointer = real_alloc(bytes);
  if (pointer) host_counted(HOST_COUNT_TENSORS, (int64_t)malloc_usable_size(pointer));
  return pointer;
}

API void _ZN3c108free_cpuEPv(void *pointer) { /* c10::free_cpu */
  pthread_once(&once, find);
  if (pointer) host_counted(HOST_COUNT_TENSORS, -(int64_t)malloc_usable_size(pointer));
  real_free(pointer);
}
