/* What torch's C++ is told of our mode. While any dispatch mode is on, libtorch_cpu takes slower, out-of-place forms
 * (isTensorSubclassLike: autograd adds gradients that meet into new memory), so watching values would change what a step
 * allocates. For as many modes as emu_control_own_modes says, all of which only watch, the answer to libtorch_cpu is no;
 * libtorch_python, which calls the modes, gets the truth. Being preloaded, this definition comes before libc10's. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define EXPORTED __attribute__((visibility("default")))

static int own_modes;
static uintptr_t cpu_start, cpu_end; /* where libtorch_cpu lies */
static bool (*real_enabled)(void);
static int64_t (*stack_length)(void);
static pthread_once_t once = PTHREAD_ONCE_INIT;

EXPORTED void emu_control_own_modes(int count) { own_modes = count; }

static int note_range(struct dl_phdr_info *info, size_t size, void *data) {
  (void)size, (void)data;
  const char *base = strrchr(info->dlpi_name, '/');
  if (!base || strcmp(base, "/libtorch_cpu.so")) return 0;
  for (int i = 0; i < info->dlpi_phnum; i++) {
    if (info->dlpi_phdr[i].p_type != PT_LOAD) continue;
    uintptr_t start = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr, end = start + info->dlpi_phdr[i].p_memsz;
    if (!cpu_start || start < cpu_start) cpu_start = start;
    if (end > cpu_end) cpu_end = end;
  }
  return 1;
}

static void find(void) {
  void *c10 = dlopen("libc10.so", RTLD_NOLOAD | RTLD_LAZY);
  if (!c10) return;
  *(void **)&stack_length = dlsym(c10, "_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv");
  *(void **)&real_enabled = dlsym(c10, "_ZN3c104impl21dispatch_mode_enabledEv");
  dl_iterate_phdr(note_range, NULL);
}

EXPORTED bool _ZN3c104impl21dispatch_mode_enabledEv(void) { /* c10::impl::dispatch_mode_enabled() */
  pthread_once(&once, find);
  if (!real_enabled || !real_enabled()) return false;
  uintptr_t caller = (uintptr_t)__builtin_return_address(0);
  bool asks_for_form = caller >= cpu_start && caller < cpu_end;
  return !(asks_for_form && own_modes && stack_length && stack_length() <= own_modes);
}
