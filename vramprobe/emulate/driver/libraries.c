/* What cuFFT, cuRAND, CUPTI and NVRTC answer: versions, plans, no records. They compute nothing.
 *
 * True of it: versions are CUDA's. Left out: NVRTC compiles to one byte; CUPTI delivers no activity. */
#include "emulator.h" /* first: it asks for GNU's interfaces */

#include <stdlib.h>
#include <string.h>

API int emu_cufftCreate(int *plan) {
  static int next;
  *plan = __atomic_add_fetch(&next, 1, __ATOMIC_RELAXED);
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
API int emu_cuptiActivityGetNextRecord(void *buffer, size_t bytes, void **record) {
  UNUSED(buffer), UNUSED(bytes), UNUSED(record);
  return 12; /* CUPTI_ERROR_MAX_LIMIT_REACHED: no more records */
}
API int emu_cuptiActivityGetNumDroppedRecords(void *context, uint32_t stream, size_t *dropped) {
  UNUSED(context), UNUSED(stream);
  *dropped = 0;
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
