/* Kernels: known by name, counted when launched, never run.
 *
 * True of it: a function's binary version is that of the image in its fat binary which the card would load (CUB asks,
 * and fails on another); occupancy follows threads, blocks and shared memory of the card; module globals and __device__
 * variables have memory of their own, not charged: a real card counts them in the context. Left out: registers (32 is
 * said) and spills, so occupancy can be too high, local memory, parameters. */
#include "emulator.h" /* first: it asks for GNU's interfaces */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- registration by the compiler's own start-up code --------------------------------------------------------------- */
struct function {
  const void *host;
  const char *name;
  void **binary;
};
struct variable {
  const void *host;
  const char *name;
  size_t bytes;
  void *memory[MAX_DEVICES];
};
static struct function *functions; /* a hash table by host address */
static size_t num_functions, table_size;
static struct variable *variables;
static size_t num_variables, variable_room;

static size_t place(const struct function *table, size_t size, const void *host) {
  size_t k = ((uintptr_t)host * 0x9E3779B97F4A7C15u >> 20) & (size - 1);
  while (table[k].host && table[k].host != host) k = (k + 1) & (size - 1);
  return k;
}
static const struct function *function_of(const void *host) {
  if (!table_size) return NULL;
  const struct function *f = &functions[place(functions, table_size, host)];
  return f->host ? f : NULL;
}
static const char *name_of(const void *host) {
  const struct function *f = function_of(host);
  return f && f->name ? f->name : "?";
}

API void **emu___cudaRegisterFatBinary(void *wrapper) {
  void **handle = malloc(sizeof *handle);
  if (handle) *handle = wrapper;
  return handle;
}
API void emu___cudaRegisterFatBinaryEnd(void **handle) { UNUSED(handle); }
API void emu___cudaUnregisterFatBinary(void **handle) { UNUSED(handle); }
API char emu___cudaInitModule(void **handle) {
  UNUSED(handle);
  return 1;
}
API void emu___cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit,
                                    void *a, void *b, void *c, void *d, int *e) {
  UNUSED(device), UNUSED(limit), UNUSED(a), UNUSED(b), UNUSED(c), UNUSED(d), UNUSED(e);
  process_lock();
  if (num_functions * 2 >= table_size) {
    size_t size = table_size ? 2 * table_size : 1 << 16;
    struct function *larger = calloc(size, sizeof *larger);
    if (!larger) abort();
    for (size_t k = 0; k < table_size; k++)
      if (functions[k].host) larger[place(larger, size, functions[k].host)] = functions[k];
    free(functions);
    functions = larger, table_size = size;
  }
  struct function *f = &functions[place(functions, table_size, host)];
  if (!f->host) num_functions++;
  *f = (struct function){host, name, handle};
  process_unlock();
}
API void emu___cudaRegisterVar(void **handle, char *host, char *device, const char *name, int ext, size_t bytes,
                               int constant, int global) {
  UNUSED(handle), UNUSED(device), UNUSED(ext), UNUSED(constant), UNUSED(global);
  process_lock();
  if (num_variables == variable_room) {
    variable_room = variable_room ? 2 * variable_room : 256;
    variables = realloc(variables, variable_room * sizeof *variables);
    if (!variables) abort();
  }
  variables[num_variables++] = (struct variable){.host = host, .name = name, .bytes = bytes};
  process_unlock();
}
static struct variable *variable_of(const void *symbol) {
  for (size_t k = 0; k < num_variables; k++)
    if (variables[k].host == symbol) return &variables[k];
  return NULL;
}
static status address_of(const void *symbol, void **address, size_t *bytes) {
  struct variable *v = variable_of(symbol);
  if (!v) return 13;
  if (bytes) *bytes = v->bytes;
  void **memory = &v->memory[current_device];
  status s = *memory ? OK : memory_allocate(&devices[current_device], memory, v->bytes, BLOCK_MODULE, NULL);
  if (address) *address = *memory;
  return s;
}
API status emu_cudaGetSymbolAddress(void **address, const void *symbol) {
  TRY(context_enter());
  return fail(address_of(symbol, address, NULL));
}
API status emu_cudaGetSymbolSize(size_t *bytes, const void *symbol) {
  TRY(context_enter());
  return fail(address_of(symbol, NULL, bytes));
}
API status emu_cudaMemcpyToSymbol(const void *symbol, const void *from, size_t bytes, size_t offset, int kind) {
  UNUSED(kind);
  TRY(context_enter());
  void *address;
  TRY(address_of(symbol, &address, NULL));
  copy_now((char *)address + offset, from, bytes);
  return OK;
}
API status emu_cudaMemcpyToSymbolAsync(const void *symbol, const void *from, size_t bytes, size_t offset, int kind,
                                       void *stream) {
  UNUSED(stream);
  return emu_cudaMemcpyToSymbol(symbol, from, bytes, offset, kind);
}
API status emu_cudaMemcpyFromSymbol(void *to, const void *symbol, size_t bytes, size_t offset, int kind) {
  UNUSED(kind);
  TRY(context_enter());
  void *address;
  TRY(address_of(symbol, &address, NULL));
  copy_now(to, (const char *)address + offset, bytes);
  return OK;
}

/* Which image of a fat binary the card would load: the highest of its own major version not above its own, else PTX.
 * Layout: a wrapper {magic, version, data}; data {magic, u16 version, u16 header bytes, u64 bytes}; then entries
 * {u16 kind (1 PTX, 2 ELF), u16, u32 header bytes, u64 payload bytes, ..., u32 architecture at 28}. */
static int image_version(const void *host) {
  const struct card *c = devices[current_device].card;
  int own = c->capability_major * 10 + c->capability_minor, best = 0, ptx = 0;
  const struct function *f = function_of(host);
  const char *wrapper = f && f->binary ? *f->binary : NULL;
  uint32_t magic;
  if (!wrapper || (memcpy(&magic, wrapper, 4), magic != 0x466243b1)) return own;
  const char *data;
  memcpy(&data, wrapper + 8, sizeof data);
  memcpy(&magic, data, 4);
  if (magic != 0xBA55ED50) return own;
  uint16_t header, kind;
  uint64_t bytes, payload;
  uint32_t entry_header, architecture;
  memcpy(&header, data + 6, 2), memcpy(&bytes, data + 8, 8);
  for (const char *e = data + header, *end = e + bytes; e + 32 < end; e += entry_header + payload) {
    memcpy(&kind, e, 2), memcpy(&entry_header, e + 4, 4), memcpy(&payload, e + 8, 8), memcpy(&architecture, e + 28, 4);
    int a = (int)architecture;
    if (kind == 2 && a / 10 == c->capability_major && a <= own && a > best) best = a;
    if (kind == 1 && a <= own && a > ptx) ptx = a;
    if (!(entry_header + payload)) break;
  }
  return best ? best : ptx ? ptx : own;
}

/* ---- launches ------------------------------------------------------------------------------------------------------- */
static status launch(void *stream, const char *name, struct cuda_dim3 grid, struct cuda_dim3 block, size_t shared) {
  const struct card *c = devices[current_device].card;
  uint64_t threads = (uint64_t)block.x * block.y * block.z;
  if (!grid.x || !grid.y || !grid.z || !threads || threads > 1024) return 9;
  if (shared > (size_t)c->shared_memory_per_block_optin_bytes) return 1;
  if (capture_node(stream, &(struct node){.type = NODE_KERNEL})) return OK;
  stream_submitted(stream);
  count_launch(name, grid, block, shared);
  return OK;
}
static __thread struct {
  struct cuda_dim3 grid, block;
  size_t shared;
  void *stream;
} pushed[16];
static __thread int num_pushed;

API unsigned emu___cudaPushCallConfiguration(struct cuda_dim3 grid, struct cuda_dim3 block, size_t shared, void *stream) {
  if (num_pushed == 16) return 1;
  pushed[num_pushed].grid = grid, pushed[num_pushed].block = block;
  pushed[num_pushed].shared = shared, pushed[num_pushed].stream = stream;
  num_pushed++;
  return 0;
}
API status emu___cudaPopCallConfiguration(struct cuda_dim3 *grid, struct cuda_dim3 *block, size_t *shared, void *stream) {
  if (!num_pushed) return fail(52);
  num_pushed--;
  *grid = pushed[num_pushed].grid, *block = pushed[num_pushed].block, *shared = pushed[num_pushed].shared;
  *(void **)stream = pushed[num_pushed].stream;
  return OK;
}
API status emu_cudaLaunchKernel(const void *f, struct cuda_dim3 grid, struct cuda_dim3 block, void **arguments,
                                size_t shared, void *stream) {
  UNUSED(arguments);
  TRY(context_enter());
  return fail(launch(stream, name_of(f), grid, block, shared));
}
API status emu___cudaLaunchKernel(void *f, struct cuda_dim3 grid, struct cuda_dim3 block, void **arguments,
                                  size_t shared, void *stream) {
  return emu_cudaLaunchKernel(f, grid, block, arguments, shared, stream);
}
API status emu_cudaLaunchCooperativeKernel(const void *f, struct cuda_dim3 grid, struct cuda_dim3 block,
                                           void **arguments, size_t shared, void *stream) {
  return emu_cudaLaunchKernel(f, grid, block, arguments, shared, stream);
}
API status emu_cudaLaunchKernelExC(const struct cuda_launch_config *config, const void *f, void **arguments) {
  return emu_cudaLaunchKernel(f, config->gridDim, config->blockDim, arguments, config->dynamicSmemBytes, config->stream);
}
API status emu___cudaGetKernel(void **kernel, const void *f) {
  *kernel = (void *)f;
  return OK;
}
API status emu_cudaGetKernel(void **kernel, const void *f) { return emu___cudaGetKernel(kernel, f); }
API status emu_cudaGetFuncBySymbol(void **function, const void *f) { return emu___cudaGetKernel(function, f); }
API status emu_cudaFuncSetAttribute(const void *f, int which, int value) {
  UNUSED(f);
  TRY(context_enter());
  bool shared = which == 8 && value > devices[current_device].card->shared_memory_per_block_optin_bytes;
  return fail(shared ? INVALID_VALUE : OK);
}
API status emu_cudaFuncGetAttributes(struct cuda_function_attributes *a, const void *f) {
  TRY(context_enter());
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024, a->numRegs = 32;
  a->ptxVersion = a->binaryVersion = image_version(f);
  a->maxDynamicSharedSizeBytes = (int)devices[current_device].card->shared_memory_per_block_bytes;
  return OK;
}

static int resident_blocks(int threads, size_t shared) {
  const struct card *c = devices[current_device].card;
  int64_t by_threads = c->threads_per_sm / (threads > 0 ? (threads + 31) / 32 * 32 : 32), most = c->blocks_per_sm;
  int64_t each = (int64_t)shared + c->reserved_shared_memory_per_block_bytes;
  int64_t by_shared = each ? c->shared_memory_per_sm_bytes / each : most;
  int64_t n = by_threads < by_shared ? by_threads : by_shared;
  return (int)(n < most ? n : most);
}
API status emu_cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *num, const void *f, int threads, size_t shared) {
  UNUSED(f);
  TRY(context_enter());
  *num = resident_blocks(threads, shared);
  return OK;
}
API status emu_cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *num, const void *f, int threads,
                                                                      size_t shared, unsigned flags) {
  UNUSED(flags);
  return emu_cudaOccupancyMaxActiveBlocksPerMultiprocessor(num, f, threads, shared);
}
API status emu_cudaOccupancyAvailableDynamicSMemPerBlock(size_t *bytes, const void *f, int blocks, int threads) {
  UNUSED(f), UNUSED(threads);
  TRY(context_enter());
  const struct card *c = devices[current_device].card;
  if (blocks < 1) return fail(INVALID_VALUE);
  *bytes = (size_t)(c->shared_memory_per_sm_bytes / blocks - c->reserved_shared_memory_per_block_bytes);
  return OK;
}

/* ---- modules of the driver: what Triton and NVRTC's users load -------------------------------------------------------- */
struct module_function {
  char name[240];
};
static char a_module;
static status load(void **module) {
  TRY_DRIVER(context_current(NULL));
  *module = &a_module;
  return OK;
}
API status emu_cuModuleLoadData(void **module, const void *image) { return UNUSED(image), load(module); }
API status emu_cuModuleLoadDataEx(void **module, const void *image, unsigned num, void *options, void **values) {
  return UNUSED(image), UNUSED(num), UNUSED(options), UNUSED(values), load(module);
}
API status emu_cuModuleLoadFatBinary(void **module, const void *image) { return UNUSED(image), load(module); }
API status emu_cuModuleLoad(void **module, const char *path) { return UNUSED(path), load(module); }
API status emu_cuModuleUnload(void *module) { return UNUSED(module), OK; }
API status emu_cuModuleGetLoadingMode(int *mode) {
  *mode = 2; /* lazy */
  return OK;
}
status function_named(void **function, const char *name) {
  struct module_function *f = calloc(1, sizeof *f);
  if (!f) return OUT_OF_MEMORY;
  snprintf(f->name, sizeof f->name, "%s", name);
  *function = f; /* as long as its module, which is the process */
  return OK;
}
API status emu_cuModuleGetFunction(void **function, void *module, const char *name) {
  return UNUSED(module), function_named(function, name);
}
API status emu_cuKernelGetFunction(void **function, void *kernel) {
  *function = kernel;
  return OK;
}
API status emu_cuFuncGetName(const char **name, void *f) {
  *name = ((struct module_function *)f)->name;
  return OK;
}
API status emu_cuFuncGetAttribute(int *value, int which, void *f) {
  UNUSED(f);
  TRY_DRIVER(context_current(NULL));
  const struct card *c = devices[current_device].card;
  switch (which) {
    case 0: *value = 1024; break;
    case 4: *value = 32; break;
    case 5: case 6: *value = c->capability_major * 10 + c->capability_minor; break;
    case 8: *value = (int)c->shared_memory_per_block_bytes; break;
    case 9: *value = -1; break;
    default: *value = 0;
  }
  return OK;
}
API status emu_cuFuncSetAttribute(void *f, int which, int value) {
  UNUSED(f);
  TRY_DRIVER(context_current(NULL));
  bool shared = which == 8 && value > devices[current_device].card->shared_memory_per_block_optin_bytes;
  return shared ? INVALID_VALUE : OK;
}
static status launch_driver(void *f, struct cuda_dim3 grid, struct cuda_dim3 block, size_t shared, void *stream) {
  TRY_DRIVER(context_current(NULL));
  return launch(stream, ((struct module_function *)f)->name, grid, block, shared);
}
API status emu_cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                              unsigned shared, void *stream, void **arguments, void **extra) {
  UNUSED(arguments), UNUSED(extra);
  return launch_driver(f, (struct cuda_dim3){gx, gy, gz}, (struct cuda_dim3){bx, by, bz}, shared, stream);
}
API status emu_cuLaunchCooperativeKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                         unsigned bz, unsigned shared, void *stream, void **arguments) {
  return emu_cuLaunchKernel(f, gx, gy, gz, bx, by, bz, shared, stream, arguments, NULL);
}
API status emu_cuLaunchKernelEx(const struct cuda_driver_launch_config *c, void *f, void **arguments, void **extra) {
  return emu_cuLaunchKernel(f, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ,
                            c->sharedMemBytes, c->hStream, arguments, extra);
}
API status emu_cuOccupancyMaxActiveBlocksPerMultiprocessor(int *num, void *f, int threads, size_t shared) {
  UNUSED(f);
  TRY_DRIVER(context_current(NULL));
  *num = resident_blocks(threads, shared);
  return OK;
}
API status emu_cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *num, void *f, int threads, size_t shared,
                                                                    unsigned flags) {
  UNUSED(flags);
  return emu_cuOccupancyMaxActiveBlocksPerMultiprocessor(num, f, threads, shared);
}
API status emu_cuOccupancyMaxActiveClusters(int *num, void *f, const struct cuda_driver_launch_config *c) {
  UNUSED(f), UNUSED(c);
  TRY_DRIVER(context_current(NULL));
  *num = (int)devices[current_device].card->sm_count;
  return OK;
}
API status emu_cuLinkCreate_v2(unsigned num, void *options, void **values, void **link) {
  return UNUSED(num), UNUSED(options), UNUSED(values), load(link);
}
API status emu_cuLinkAddData_v2(void *link, int type, void *data, size_t bytes, const char *name, unsigned num,
                                void *options, void **values) {
  UNUSED(link), UNUSED(type), UNUSED(data), UNUSED(bytes), UNUSED(name), UNUSED(num), UNUSED(options), UNUSED(values);
  return OK;
}
API status emu_cuLinkComplete(void *link, void **image, size_t *bytes) {
  UNUSED(link);
  *image = &a_module;
  *bytes = 1;
  return OK;
}
API status emu_cuLinkDestroy(void *link) { return UNUSED(link), OK; }
/* A descriptor of 128 bytes that kernels alone read. */
API status emu_cuTensorMapEncodeTiled(void *map) {
  memset(map, 0, 128);
  return OK;
}
API status emu_cuTensorMapEncodeIm2col(void *map) { return emu_cuTensorMapEncodeTiled(map); }
API status emu_cuTensorMapReplaceAddress(void *map, void *address) { return UNUSED(map), UNUSED(address), OK; }
