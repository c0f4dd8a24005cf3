/* Contexts: when CUDA begins in a process, when a card is charged for it, and what a forked child may do.
 *
 * True of it: counting devices charges nothing; a device's primary context is made, and its bytes are charged, by the
 * first call that needs one (cudaSetDevice since CUDA 12, memory, streams, events). After fork() in a process that had
 * called CUDA, every call in the child fails with 3; in one that had not, the child begins afresh.
 * Left out: lazy module loading does not grow a context. */
#include "emulator.h" /* first: it asks for GNU's interfaces */

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static pthread_mutex_t lock_of_process = PTHREAD_MUTEX_INITIALIZER;
static volatile int entered; /* 0 not yet, 1 with devices, else -status */
static volatile bool forked;
static __thread struct context *stack[16];
static __thread int depth;
static __thread bool bound; /* the thread has a current context: the primary one of current_device or stack's top */
__thread int current_device;
enum { CONTEXT_MAGIC = 0xC0C7E87 };

void process_lock(void) { pthread_mutex_lock(&lock_of_process); }
void process_unlock(void) { pthread_mutex_unlock(&lock_of_process); }

static void before_fork(void) { process_lock(); }
static void in_parent(void) { process_unlock(); }
static void in_child(void) {
  pthread_mutex_init(&lock_of_process, NULL);
  if (entered) forked = true;
  shared_after_fork();
}
__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(before_fork, in_parent, in_child); }

bool driver_is_entered(void) { return entered == 1 && !forked; }

status driver_enter(void) {
  if (entered == 1 && !forked) return OK;
  if (forked) return NOT_INITIALIZED;
  process_lock();
  if (!entered) {
    bool loaded = machine_load();
    devices_load();
    __atomic_store_n(&entered, loaded && num_devices ? 1 : -NO_DEVICE, __ATOMIC_RELEASE);
  }
  process_unlock();
  return entered == 1 ? OK : -entered;
}

static status activate(struct context *context) {
  if (context->is_active) return OK;
  const struct device *device = &devices[context->ordinal];
  process_lock();
  bool ok = context->is_active || shared_charge(device->index, device->card->context_bytes);
  if (ok) context->is_active = true;
  process_unlock();
  if (ok) trace(1, "context on cuda:%d: %llu bytes", context->ordinal, (unsigned long long)device->card->context_bytes);
  return ok ? OK : OUT_OF_MEMORY;
}

static void deactivate(struct context *context) {
  if (!context->is_active) return;
  context->is_active = false;
  shared_release(devices[context->ordinal].index, devices[context->ordinal].card->context_bytes);
}

status context_of(int ordinal, struct context **context) {
  if (ordinal < 0 || ordinal >= num_devices) return INVALID_DEVICE;
  struct context *primary = &devices[ordinal].primary;
  primary->magic = CONTEXT_MAGIC;
  primary->ordinal = ordinal;
  primary->is_primary = true;
  if (context) *context = primary;
  return activate(primary);
}

status context_enter(void) {
  if (bound && entered == 1 && !forked) {
    struct context *top = depth ? stack[depth - 1] : &devices[current_device].primary;
    if (top->is_active) return OK;
  }
  status s = driver_enter();
  if (!s) s = context_of(current_device, NULL);
  if (!s) bound = true;
  return s;
}

status context_current(struct device **device) {
  status s = driver_enter();
  if (s) return s;
  if (!bound) return INVALID_CONTEXT;
  if (device) *device = &devices[current_device];
  return OK;
}

static struct context *top(void) {
  if (!bound) return NULL;
  return depth ? stack[depth - 1] : &devices[current_device].primary;
}

static status set_top(struct context *context) {
  if (!context) {
    bound = false;
    if (depth) depth--;
    return OK;
  }
  if (context->magic != CONTEXT_MAGIC) return INVALID_CONTEXT;
  if (!depth) depth = 1;
  stack[depth - 1] = context;
  current_device = context->ordinal;
  bound = true;
  return OK;
}

/* ---- the runtime -------------------------------------------------------------------------------------------------- */
API status emu_cudaSetDevice(int ordinal) {
  TRY(driver_enter());
  if (ordinal < 0 || ordinal >= num_devices) return fail(INVALID_DEVICE);
  TRY(context_of(ordinal, NULL));
  depth = 0;
  current_device = ordinal;
  bound = true;
  return OK;
}
API status emu_cudaInitDevice(int ordinal, unsigned device_flags, unsigned flags) {
  UNUSED(device_flags), UNUSED(flags);
  TRY(driver_enter());
  TRY(context_of(ordinal, NULL));
  return OK;
}
API status emu_cudaGetDevice(int *ordinal) {
  TRY(driver_enter());
  *ordinal = current_device;
  return OK;
}
API status emu_cudaDeviceReset(void) {
  TRY(driver_enter());
  devices_clear(current_device);
  deactivate(&devices[current_device].primary);
  return OK;
}
API status emu_cudaGetDeviceFlags(unsigned *flags) {
  TRY(driver_enter());
  *flags = devices[current_device].primary.flags | 8; /* host memory can always be mapped */
  return OK;
}
API status emu_cudaSetDeviceFlags(unsigned flags) {
  TRY(driver_enter());
  devices[current_device].primary.flags = flags;
  return OK;
}

/* ---- the driver --------------------------------------------------------------------------------------------------- */
API status emu_cuInit(unsigned flags) {
  if (flags) return INVALID_VALUE;
  return driver_enter();
}
API status emu_cuDevicePrimaryCtxGetState(int ordinal, unsigned *flags, int *active) {
  TRY_DRIVER(driver_enter());
  if (ordinal < 0 || ordinal >= num_devices) return INVALID_DEVICE;
  if (flags) *flags = devices[ordinal].primary.flags;
  if (active) *active = devices[ordinal].primary.is_active;
  return OK;
}
API status emu_cuDevicePrimaryCtxRetain(void **context, int ordinal) {
  TRY_DRIVER(driver_enter());
  struct context *primary;
  TRY_DRIVER(context_of(ordinal, &primary));
  primary->references++;
  *context = primary;
  return OK;
}
API status emu_cuDevicePrimaryCtxRelease_v2(int ordinal) {
  TRY_DRIVER(driver_enter());
  if (ordinal < 0 || ordinal >= num_devices) return INVALID_DEVICE;
  struct context *primary = &devices[ordinal].primary;
  if (primary->references <= 0) return INVALID_CONTEXT;
  primary->references--; /* the runtime holds its own reference: it stays until cudaDeviceReset */
  return OK;
}
API status emu_cuDevicePrimaryCtxReset_v2(int ordinal) {
  TRY_DRIVER(driver_enter());
  if (ordinal < 0 || ordinal >= num_devices) return INVALID_DEVICE;
  devices_clear(ordinal);
  deactivate(&devices[ordinal].primary);
  return OK;
}
API status emu_cuDevicePrimaryCtxSetFlags_v2(int ordinal, unsigned flags) {
  TRY_DRIVER(driver_enter());
  if (ordinal < 0 || ordinal >= num_devices) return INVALID_DEVICE;
  devices[ordinal].primary.flags = flags;
  return OK;
}
API status emu_cuCtxCreate_v2(void **context, unsigned flags, int ordinal) {
  TRY_DRIVER(driver_enter());
  if (ordinal < 0 || ordinal >= num_devices) return INVALID_DEVICE;
  if (depth == 16) return OUT_OF_MEMORY;
  struct context *c = calloc(1, sizeof *c);
  *c = (struct context){.magic = CONTEXT_MAGIC, .ordinal = ordinal, .flags = flags, .references = 1};
  status s = activate(c);
  if (s) {
    free(c);
    return s;
  }
  if (!depth && bound) stack[depth++] = &devices[current_device].primary;
  stack[depth++] = c;
  current_device = ordinal;
  bound = true;
  *context = c;
  return OK;
}
API status emu_cuCtxCreate_v4(void **context, void *parameters, unsigned flags, int ordinal) {
  UNUSED(parameters);
  return emu_cuCtxCreate_v2(context, flags, ordinal);
}
API status emu_cuCtxDestroy_v2(void *context) {
  struct context *c = context;
  if (!c || c->magic != CONTEXT_MAGIC || c->is_primary) return INVALID_CONTEXT;
  deactivate(c);
  if (depth && stack[depth - 1] == c) {
    depth--;
    bound = depth > 0;
    if (bound) current_device = stack[depth - 1]->ordinal;
  }
  c->magic = 0; /* not freed: another thread may have it current, and must be told */
  return OK;
}
API status emu_cuCtxGetCurrent(void **context) {
  TRY_DRIVER(driver_enter());
  *context = top();
  return OK;
}
API status emu_cuCtxSetCurrent(void *context) {
  TRY_DRIVER(driver_enter());
  return set_top(context);
}
API status emu_cuCtxPushCurrent_v2(void *context) {
  TRY_DRIVER(driver_enter());
  struct context *c = context;
  if (!c || c->magic != CONTEXT_MAGIC) return INVALID_CONTEXT;
  if (depth >= 15) return OUT_OF_MEMORY;
  if (!depth && bound) {
    context_of(current_device, &stack[0]);
    depth = 1;
  }
  stack[depth++] = c;
  current_device = c->ordinal;
  bound = true;
  return OK;
}
API status emu_cuCtxPopCurrent_v2(void **context) {
  TRY_DRIVER(driver_enter());
  struct context *c = top();
  if (!c) return INVALID_CONTEXT;
  if (context) *context = c;
  if (depth) depth--;
  bound = depth > 0;
  if (bound) current_device = stack[depth - 1]->ordinal;
  return OK;
}
API status emu_cuCtxGetDevice(int *ordinal) {
  TRY_DRIVER(context_current(NULL));
  *ordinal = current_device;
  return OK;
}
API status emu_cuCtxGetFlags(unsigned *flags) {
  TRY_DRIVER(context_current(NULL));
  *flags = top()->flags;
  return OK;
}
API status emu_cuCtxGetId(void *context, unsigned long long *id) {
  TRY_DRIVER(driver_enter());
  struct context *c = context ? context : top();
  if (!c) return INVALID_CONTEXT;
  *id = (unsigned long long)(uintptr_t)c;
  return OK;
}
API status emu_cuCtxGetApiVersion(void *context, unsigned *version) {
  UNUSED(context);
  *version = 3020;
  return OK;
}
API status emu_cuCtxSynchronize(void) {
  all_work_awaited();
  return context_current(NULL);
}
API status emu_cuCtxGetStreamPriorityRange(int *least, int *greatest) {
  TRY_DRIVER(context_current(NULL));
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return OK;
}
