/* What cuDNN answers. It computes nothing.
 *
 * True of it: the version is the one that torch was built with; a graph ("backend" interface) is accepted and has one
 * engine. Left out: workspaces are said to be 0, with an event `lower_bound` for each that a program asked about (those
 * of a function by its row of queries.py). */
#include "emulator.h" /* first: it asks for GNU's interfaces */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

API size_t emu_cudnnGetVersion(void) { return EMU_CUDNN_VERSION; }
API size_t emu_cudnnGetCudartVersion(void) { return EMU_CUDA_VERSION; }
API long emu_cudnnGetProperty(int type, int *value) {
  int major = EMU_CUDNN_VERSION >= 90000 ? 10000 : 1000;
  *value = type == 0 ? EMU_CUDNN_VERSION / major : type == 1 ? EMU_CUDNN_VERSION % major / 100 : EMU_CUDNN_VERSION % 100;
  return 0;
}
API void emu_cudnnGetLastErrorString(char *text, size_t room) { snprintf(text, room, "%s", emu_generic_string()); }
API long emu_cudnnDropoutGetStatesSize(void *handle, size_t *bytes) {
  UNUSED(handle);
  *bytes = 1 << 20;
  return 0;
}
/* Convolutions: one algorithm. */
struct algorithm { /* cudnnConvolutionFwdAlgoPerf_t and its two siblings */
  int algorithm, status;
  float milliseconds;
  size_t workspace_bytes;
  int determinism, math, reserved[3];
};
#define CONVOLUTION(direction)                                                                                        \
  API long emu_cudnnGetConvolution##direction##Algorithm_v7(void *h, void *a, void *b, void *c, void *d, int wanted, \
                                                            int *found, struct algorithm *results) {                 \
    UNUSED(h), UNUSED(a), UNUSED(b), UNUSED(c), UNUSED(d);                                                           \
    *found = wanted > 0;                                                                                             \
    if (*found) results[0] = (struct algorithm){.algorithm = 1, .determinism = 1};                                   \
    return 0;                                                                                                        \
  }                                                                                                                  \
  API long emu_cudnnFindConvolution##direction##AlgorithmEx(                                                         \
      void *h, void *a, void *b, void *c, void *d, void *e, void *f, void *g, int wanted, int *found,                \
      struct algorithm *results, void *workspace, size_t bytes) {                                                    \
    UNUSED(h), UNUSED(a), UNUSED(b), UNUSED(c), UNUSED(d), UNUSED(e), UNUSED(f), UNUSED(g), UNUSED(workspace);       \
    UNUSED(bytes);                                                                                                   \
    *found = wanted > 0;                                                                                             \
    if (*found) results[0] = (struct algorithm){.algorithm = 1, .determinism = 1};                                   \
    return 0;                                                                                                        \
  }
CONVOLUTION(Forward)
CONVOLUTION(BackwardData)
CONVOLUTION(BackwardFilter)
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
  if (which == 402) report_once("lower_bound", "cudnnBackendGetAttribute", "libcudnn");
  if (type == 3) *(int64_t *)values = 0;
  else if (type == 23) *(int32_t *)values = 0;
  return 0;
}
