/* What cuBLAS and cuBLASLt answer, and the stream that a library's handle was given. They compute nothing.
 *
 * True of it: the version is CUDA's own, near enough for every comparison in use (NVIDIA writes 12.1.3 as 120103); a dot
 * product whose result goes to the host ends the run, one whose result stays on the device is counted. cuBLASLt's
 * heuristics give as many algorithms as are asked for, none with a workspace of its own (torch hands it one). */
#include "emulator.h" /* first: it asks for GNU's interfaces */

API long emu_cublasGetVersion_v2(void *handle, int *version) {
  UNUSED(handle);
  *version = EMU_CUDA_VERSION * 10;
  return 0;
}
API long emu_cublasGetProperty(int type, int *value) {
  *value = type == 0 ? EMU_CUDA_VERSION / 1000 : type == 1 ? EMU_CUDA_VERSION / 10 % 100 : 0;
  return 0;
}
API size_t emu_cublasLtGetVersion(void) { return (size_t)EMU_CUDA_VERSION * 10; }
API size_t emu_cublasLtGetCudartVersion(void) { return EMU_CUDA_VERSION; }
struct lt_result { /* cublasLtMatmulHeuristicResult_t */
  uint64_t algorithm[8];
  size_t workspace_bytes;
  int state;
  float waves;
  int reserved[4];
};
API long emu_cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d,
                                            void *preference, int wanted, struct lt_result *results, int *found) {
  UNUSED(handle), UNUSED(operation), UNUSED(a), UNUSED(b), UNUSED(c), UNUSED(d), UNUSED(preference);
  for (int k = 0; k < wanted; k++) results[k] = (struct lt_result){.waves = 1};
  *found = wanted;
  return 0;
}

/* The stream of a handle: kept beside it, because handles are opaque. A stream has no work, so what is kept matters
 * only to who compares. */
static struct {
  const void *handle;
  void *stream;
} streams[256];
static long keep_stream(const void *handle, void *stream) {
  process_lock();
  for (int k = 0; k < 256; k++)
    if (!streams[k].handle || streams[k].handle == handle) {
      streams[k].handle = handle, streams[k].stream = stream;
      break;
    }
  process_unlock();
  return 0;
}
static long kept_stream(const void *handle, void **stream) {
  *stream = NULL;
  for (int k = 0; k < 256 && streams[k].handle; k++)
    if (streams[k].handle == handle) *stream = streams[k].stream;
  return 0;
}
#define KEEPS_STREAM(set, get)                                                             \
  API long emu_##set(void *handle, void *stream) { return keep_stream(handle, stream); }   \
  API long emu_##get(void *handle, void **stream) { return kept_stream(handle, stream); }
KEEPS_STREAM(cublasSetStream_v2, cublasGetStream_v2)
KEEPS_STREAM(cudnnSetStream, cudnnGetStream)
KEEPS_STREAM(cusparseSetStream, cusparseGetStream)
KEEPS_STREAM(cusolverDnSetStream, cusolverDnGetStream)

/* Results of one number go to the device, where nobody computes them, or to the host, where they would be garbage. */
static long one_number(const char *name, const void *result) {
  if (!memory_device(result)) fatal_unknown("libcublas", name);
  count_call(name);
  return 0;
}
#define DOT(name)                                                                                                      \
  API long emu_##name##_v2(void *h, int n, const void *x, int incx, const void *y, int incy, void *result) {          \
    UNUSED(h), UNUSED(n), UNUSED(x), UNUSED(incx), UNUSED(y), UNUSED(incy);                                           \
    return one_number(#name, result);                                                                                 \
  }
#define NORM(name)                                                                         \
  API long emu_##name##_v2(void *h, int n, const void *x, int incx, void *result) {        \
    UNUSED(h), UNUSED(n), UNUSED(x), UNUSED(incx);                                         \
    return one_number(#name, result);                                                      \
  }
DOT(cublasSdot)
DOT(cublasDdot)
DOT(cublasCdotc)
DOT(cublasCdotu)
DOT(cublasZdotc)
DOT(cublasZdotu)
NORM(cublasSnrm2)
NORM(cublasDnrm2)
NORM(cublasScnrm2)
NORM(cublasDznrm2)
NORM(cublasSasum)
NORM(cublasDasum)
API long emu_cublasDotEx(void *h, int n, const void *x, int xtype, int incx, const void *y, int ytype, int incy,
                         void *result, int type, int compute) {
  UNUSED(h), UNUSED(n), UNUSED(x), UNUSED(xtype), UNUSED(incx), UNUSED(y), UNUSED(ytype), UNUSED(incy), UNUSED(type);
  UNUSED(compute);
  return one_number("cublasDotEx", result);
}
