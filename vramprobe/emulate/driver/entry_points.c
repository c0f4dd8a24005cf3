/* Functions by name: cuGetProcAddress, cudaGetDriverEntryPoint, and the routines behind names without a file of their
 * own: handles, strings, zeros, counted calls, and the end of the run.
 *
 * True of it: a name resolves to the version that the asked-for CUDA would give; a name that neither the driver nor its
 * stub knows is not found, as on a driver too old for it. */
#include "emulator.h" /* first: it asks for GNU's interfaces */

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Which version of a function a caller of that CUDA means; without an entry: _v2 if there is one. */
static const struct {
  const char *name;
  int from_version;
  const char *symbol;
} VERSIONS[] = {
    {"cuGetProcAddress", 12000, "cuGetProcAddress_v2"},     {"cuGetProcAddress", 0, "cuGetProcAddress"},
    {"cuStreamGetCaptureInfo", 12030, "cuStreamGetCaptureInfo_v3"}, {"cuCtxCreate", 12050, "cuCtxCreate_v4"},
    {"cuEventElapsedTime", 12080, "cuEventElapsedTime_v2"}, {"cuEventElapsedTime", 0, "cuEventElapsedTime"},
};

static void *in_library(const char *name) {
  static void *driver; /* its stub, where one is loaded: what it knows exists, even if calling it ends the run */
  if (!driver) driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  return driver ? dlsym(driver, name) : NULL;
}
static void *in_driver(const char *name) {
  static void *self;
  if (!self) {
    Dl_info info;
    if (dladdr((void *)(uintptr_t)&emu_lookup, &info)) self = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  }
  char symbol[256];
  snprintf(symbol, sizeof symbol, "emu_%s", name);
  return self ? dlsym(self, symbol) : NULL;
}
static void *lookup(const char *name, int version) {
  char second[256];
  void *found = NULL;
  for (size_t k = 0; k < sizeof VERSIONS / sizeof *VERSIONS && !found; k++)
    if (!strcmp(VERSIONS[k].name, name) && version >= VERSIONS[k].from_version) found = in_driver(VERSIONS[k].symbol);
  snprintf(second, sizeof second, "%s_v2", name);
  if (!found) found = in_driver(second);
  if (!found) found = in_driver(name);
  if (!found) found = in_library(second);
  if (!found) found = in_library(name);
  if (!found) trace(1, "entry point %s: not known", name);
  return found;
}
API void *emu_lookup(const char *name) { return lookup(name, EMU_CUDA_VERSION); }

static status entry_point(const char *name, void **function, int version, int *found) {
  if (!name || !function) return INVALID_VALUE;
  *function = lookup(name, version);
  if (found) *found = *function ? 0 : 1; /* success, symbol not found */
  return *function ? OK : NOT_FOUND;
}
API status emu_cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *found) {
  UNUSED(flags); /* per-thread streams: all streams are alike */
  return entry_point(name, function, version, found);
}
API status emu_cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
  UNUSED(flags);
  return entry_point(name, function, version, NULL);
}
API status emu_cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags, int *found) {
  UNUSED(flags);
  TRY(driver_enter());
  status s = entry_point(name, function, EMU_CUDA_VERSION, found);
  return fail(s == NOT_FOUND && found ? OK : s); /* the runtime says it in `found` */
}
API status emu_cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                                unsigned long long flags, int *found) {
  UNUSED(flags);
  TRY(driver_enter());
  status s = entry_point(name, function, (int)version, found);
  return fail(s == NOT_FOUND && found ? OK : s);
}
/* Private tables, one of them a handshake: what links CUDA's runtime statically (CuTe DSL) cannot run here. */
API status emu_cuGetExportTable(const void **table, const void *id) {
  UNUSED(id);
  Dl_info info;
  if (!driver_enter() && dladdr(__builtin_return_address(0), &info)) report_once("static_runtime", info.dli_fname, "");
  *table = NULL;
  return NOT_FOUND;
}
API status emu_cudaGetExportTable(const void **table, const void *id) { return emu_cuGetExportTable(table, id); }

/* ---- generic routines, which the generated stubs jump to ------------------------------------------------------------- */
API long emu_generic_create_handle(void **handle) {
  *handle = calloc(1, 4096);
  return *handle ? 0 : 2;
}
API const char *emu_generic_string(void) { return unsupported_sentence(); }
API long emu_generic_string_out_1(long first, const char **text) {
  UNUSED(first);
  *text = emu_generic_string();
  return 0;
}
API long emu_generic_zero_out_1_long(void *handle, uint64_t *value) {
  UNUSED(handle);
  *value = 0;
  return 0;
}
API long emu_generic_counted(const char *name, const char *library) {
  UNUSED(library);
  count_call(name);
  return 0;
}
API long emu_generic_sized(const char *name, const char *library) {
  report_once("lower_bound", name, library);
  return 0;
}
API long emu_generic_unsupported(const char *name, const char *library, int code) {
  return unsupported(library, name, code);
}
API long emu_generic_succeeds(const char *name, const char *library, int code, int *infos, int number) {
  UNUSED(code);
  if (infos && number > 0 && memory_device(infos)) set_now(infos, 0, sizeof *infos, (size_t)number);
  return emu_generic_counted(name, library);
}
API long emu_generic_on_device(const char *name, const char *library, int code, const void *result) {
  return result && !memory_device(result) ? unsupported(library, name, code) : emu_generic_counted(name, library);
}
API long emu_generic_unknown(const char *name, const char *library) { fatal_unknown(library, name); }
