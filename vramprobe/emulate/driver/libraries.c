/* What cuBLAS, cuDNN, cuFFT, NVRTC and CUPTI answer: versions, heuristics, sizes. They compute nothing.
 *
 * True of it: versions are those that torch was built with. Left out: cuDNN's graph engines' workspace is said to be 0,
 * so what uses it is a lower bound; its heuristics give one engine, cuBLASLt's give as many as are asked for, all with
 * no workspace. NVRTC compiles to one byte. */
#include "emulator.h" /* first: it asks for GNU's interfaces */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- cuBLAS, cuBLASLt ------------------------------------------------------------------------------------------------ */
/* NVIDIA numbers cuBLAS 12.1.3 as 120103: near enough to CUDA's own version times ten for every comparison in use. */
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

/* ---- cuDNN ------------------------------------------------------------------------------------------------------------ */
API size_t emu_cudnnGetVersion(void) { return EMU_CUDNN_VERSION; }
API size_t emu_cudnnGetCudartVersion(void) { return EMU_CUDA_VERSION; }
API long emu_cudnnGetProperty(int type, int *value) {
  int major = EMU_CUDNN_VERSION >= 90000 ? 10000 : 1000;
  *value = type == 0 ? EMU_CUDNN_VERSION / major : type == 1 ? EMU_CUDNN_VERSION % major / 100 : EMU_CUDNN_VERSION % 100;
  return 0;
}
API void emu_cudnnGetLastErrorString(char *text, size_t room) { snprintf(text, room, "a status of an emulated library"); }
API long emu_cudnnDropoutGetStatesSize(void *handle, size_t *bytes) {
  UNUSED(handle);
  *bytes = 1 << 20;
  return 0;
}
/* The graph interface: every graph is accepted and has one engine. */
API long emu_cudnnBackendFinalize(void *descriptor) {
  UNUSED(descriptor);
  const char *no = getenv("VRAMPROBE_EMULATOR_NO_CUDNN_GRAPH");
  return no && *no ? 3000 : 0; /* CUDNN_STATUS_NOT_SUPPORTED */
}
API long emu_cudnnBackendGetAttribute(void *descriptor, int which, int type, int64_t wanted, int64_t *found,
                                      void *values) {
  UNUSED(descriptor);
  bool none = which == 302 || which == 305 || which == 306 || which == 1303 || which == 1305; /* notes, knobs */
  if (found) *found = none ? 0 : 1;
  if (none || !values || !wanted || type == 15) return 0; /* descriptors: the caller's own, left as they are */
  if (which == 402) report_event("lower_bound", "cudnn_workspace", "the workspace of a cuDNN graph is taken as 0");
  if (type == 3) *(int64_t *)values = 0;
  else if (type == 23) *(int32_t *)values = 0;
  return 0;
}

/* ---- cuFFT, cuRAND, CUPTI, NVRTC ----------------------------------------------------------------------------------------- */
API int emu_cufftCreate(int *plan) {
  static int next;
  *plan = __atomic_add_fetch(&next, 1, __ATOMIC_RELAXED);
  return 0;
}
API int emu_cufftXtMakePlanMany(int plan, int rank, void *n, void *inembed, long long istride, long long idist,
                                int itype, void *onembed, long long ostride, long long odist, int otype,
                                long long batch, size_t *workspace_bytes) {
  UNUSED(plan), UNUSED(rank), UNUSED(n), UNUSED(inembed), UNUSED(istride), UNUSED(idist), UNUSED(itype);
  UNUSED(onembed), UNUSED(ostride), UNUSED(odist), UNUSED(otype), UNUSED(batch);
  report_event("lower_bound", "cufft_workspace", "the workspace of a cuFFT plan is taken as 0");
  *workspace_bytes = 0;
  return 0;
}
API int emu_curandGetVersion(int *version) {
  *version = 10400;
  return 0;
}
API int emu_cuptiGetVersion(uint32_t *version) {
  *version = 130000;
  return 0;
}
API int emu_cuptiGetTimestamp(uint64_t *nanoseconds) {
  *nanoseconds = (uint64_t)(now_milliseconds() * 1e6);
  return 0;
}
API int emu_nvrtcVersion(int *major, int *minor) {
  *major = EMU_CUDA_VERSION / 1000;
  *minor = EMU_CUDA_VERSION / 10 % 100;
  return 0;
}
API int emu_nvrtcCreateProgram(void **program) {
  *program = calloc(1, 64);
  return 0;
}
#define ONE_BYTE(name)                            \
  API int emu_##name##Size(void *p, size_t *n) {  \
    UNUSED(p);                                    \
    *n = 1;                                       \
    return 0;                                     \
  }                                               \
  API int emu_##name(void *p, char *text) {       \
    UNUSED(p);                                    \
    *text = 0;                                    \
    return 0;                                     \
  }
ONE_BYTE(nvrtcGetCUBIN)
ONE_BYTE(nvrtcGetPTX)
ONE_BYTE(nvrtcGetProgramLog)
API int emu_nvrtcGetLoweredName(void *program, const char *expression, const char **name) {
  UNUSED(program);
  *name = expression;
  return 0;
}
API int emu_nvrtcGetNumSupportedArchs(int *num) {
  *num = 7;
  return 0;
}
API int emu_nvrtcGetSupportedArchs(int *list) {
  static const int ARCHITECTURES[] = {75, 80, 86, 89, 90, 100, 120};
  memcpy(list, ARCHITECTURES, sizeof ARCHITECTURES);
  return 0;
}
