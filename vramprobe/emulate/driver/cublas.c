/* What cuBLAS and cuBLASLt answer, and the stream that a library's handle was given. They compute nothing.
 *
 * True of it: the version is CUDA's own, near enough for every comparison in use (NVIDIA writes 12.1.3 as 120103); copies
 * of matrices are made. cuBLASLt's heuristics give as many algorithms as are asked for, none with a workspace of its own
 * (torch hands it one). */
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

/* Copies of columns between the host and the device: a vector is a matrix of one row. */
enum { TO_DEVICE = 1, TO_HOST = 2 };
API long emu_cublasSetMatrixAsync(int rows, int columns, int bytes, const void *from, int from_rows, void *to, int to_rows,
                                  void *stream) {
  return emu_cudaMemcpy2DAsync(to, (size_t)to_rows * (size_t)bytes, from, (size_t)from_rows * (size_t)bytes,
                               (size_t)rows * (size_t)bytes, (size_t)columns, TO_DEVICE, stream);
}
API long emu_cublasGetMatrixAsync(int rows, int columns, int bytes, const void *from, int from_rows, void *to, int to_rows,
                                  void *stream) {
  return emu_cudaMemcpy2DAsync(to, (size_t)to_rows * (size_t)bytes, from, (size_t)from_rows * (size_t)bytes,
                               (size_t)rows * (size_t)bytes, (size_t)columns, TO_HOST, stream);
}
API long emu_cublasSetVectorAsync(int n, int bytes, const void *from, int from_step, void *to, int to_step, void *stream) {
  return emu_cublasSetMatrixAsync(1, n, bytes, from, from_step, to, to_step, stream);
}
API long emu_cublasGetVectorAsync(int n, int bytes, const void *from, int from_step, void *to, int to_step, void *stream) {
  return emu_cublasGetMatrixAsync(1, n, bytes, from, from_step, to, to_step, stream);
}
