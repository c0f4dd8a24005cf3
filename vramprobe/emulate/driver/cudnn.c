/* What cuDNN answers. It computes nothing.
 *
 * True of it: the version is the one that torch was built with. Workspaces follow rules (cudnn_workspaces.c); what they
 * do not reach is 0, with an event `lower_bound` for each function (those of others by their row of queries.py). */
#include "cudnn.h"

#include <stdio.h>

API size_t emu_cudnnGetVersion(void) { return EMU_CUDNN_VERSION; }
API size_t emu_cudnnGetCudartVersion(void) { return EMU_CUDA_VERSION; }
API long emu_cudnnGetProperty(int type, int *value) {
  int major = EMU_CUDNN_VERSION >= 90000 ? 10000 : 1000;
  *value = type == 0 ? EMU_CUDNN_VERSION / major : type == 1 ? EMU_CUDNN_VERSION % major / 100 : EMU_CUDNN_VERSION % 100;
  return 0;
}
API void emu_cudnnGetLastErrorString(char *text, size_t room) { snprintf(text, room, "%s", emu_generic_string()); }

size_t workspace_answer(const char *function, int64_t bytes) {
  report_once(bytes < 0 ? "lower_bound" : "assumed_workspace", function, "libcudnn");
  return bytes < 0 ? 0 : (size_t)bytes;
}

/* ---- dropout: what a recurrent network is told of it. The states explain an H200 to the byte: 132 x 48 KiB ---- */
API long emu_cudnnDropoutGetStatesSize(void *handle, size_t *bytes) {
  UNUSED(handle);
  if (context_enter()) return 1001; /* CUDNN_STATUS_NOT_INITIALIZED */
  *bytes = (size_t)devices[current_device].card->sm_count * 1024 * 48; /* a generator's 48 bytes for each thread */
  return 0;
}
API long emu_cudnnSetDropoutDescriptor(float *d, void *handle, float share, void *states, size_t bytes, uint64_t seed) {
  UNUSED(handle), UNUSED(states), UNUSED(bytes), UNUSED(seed);
  *d = share;
  return 0;
}
API long emu_cudnnRestoreDropoutDescriptor(float *d, void *handle, float share, void *states, size_t bytes,
                                           uint64_t seed) {
  return emu_cudnnSetDropoutDescriptor(d, handle, share, states, bytes, seed);
}

/* ---- convolutions of the interface before graphs: one algorithm --------------------------------------------------- */
struct algorithm { /* cudnnConvolutionFwdAlgoPerf_t and its two siblings */
  int algorithm, status;
  float milliseconds;
  size_t workspace_bytes;
  int determinism, math, reserved[3];
};
API long emu_cudnnSetConvolutionNdDescriptor(int *stride, int num_dims, const int *padding, const int *strides,
                                             const int *dilations, int mode, int type) {
  UNUSED(padding), UNUSED(dilations), UNUSED(mode), UNUSED(type);
  *stride = num_dims > 0 ? strides[num_dims - 1] : 1;
  return 0;
}
static size_t workspace_of(enum pass pass, const char *function, const struct tensor *a, const struct tensor *b,
                           const int *stride, const struct tensor *d) {
  const struct tensor *x = pass == PASS_DATA ? d : a, *w = pass == PASS_DATA ? a : pass == PASS_FILTER ? d : b;
  const struct tensor *y = pass == PASS_FORWARD ? d : b;
  struct convolution c = convolution_of(pass, x, w, y, *stride);
  return workspace_answer(function, convolution_workspace(&c));
}
#define CONVOLUTION(direction, pass)                                                                                  \
  static size_t workspace_##pass(const struct tensor *a, const struct tensor *b, const int *stride,                   \
                                 const struct tensor *d) {                                                            \
    return workspace_of(pass, "cudnnGetConvolution" #direction "WorkspaceSize", a, b, stride, d);                     \
  }                                                                                                                   \
  API long emu_cudnnGetConvolution##direction##WorkspaceSize(void *h, void *a, void *b, void *c, void *d, int which,  \
                                                             size_t *bytes) {                                         \
    UNUSED(h), UNUSED(which);                                                                                         \
    *bytes = workspace_##pass(a, b, c, d);                                                                            \
    return 0;                                                                                                         \
  }                                                                                                                   \
  API long emu_cudnnGetConvolution##direction##Algorithm_v7(void *h, void *a, void *b, void *c, void *d, int wanted,  \
                                                            int *found, struct algorithm *results) {                  \
    UNUSED(h);                                                                                                        \
    *found = wanted > 0;                                                                                              \
    if (*found)                                                                                                       \
      results[0] = (struct algorithm){.algorithm = 1, .determinism = 1, .workspace_bytes = workspace_##pass(a, b, c, d)}; \
    return 0;                                                                                                         \
  }                                                                                                                   \
  API long emu_cudnnFindConvolution##direction##AlgorithmEx(                                                          \
      void *h, void *a, void *at_a, void *b, void *at_b, void *c, void *d, void *at_d, int wanted, int *found,        \
      struct algorithm *results, void *workspace, size_t bytes) {                                                     \
    UNUSED(at_a), UNUSED(at_b), UNUSED(at_d), UNUSED(workspace), UNUSED(bytes);                                       \
    return emu_cudnnGetConvolution##direction##Algorithm_v7(h, a, b, c, d, wanted, found, results);                   \
  }
CONVOLUTION(Forward, PASS_FORWARD)
CONVOLUTION(BackwardData, PASS_DATA)
CONVOLUTION(BackwardFilter, PASS_FILTER)

/* ---- batch norm --------------------------------------------------------------------------------------------------- */
API long emu_cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *h, int mode, int fused,
                                                                      const struct tensor *x, void *z, void *y,
                                                                      void *scale, void *activation, size_t *bytes) {
  UNUSED(h), UNUSED(mode), UNUSED(fused), UNUSED(z), UNUSED(y), UNUSED(scale), UNUSED(activation);
  *bytes = workspace_answer("cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize", norm_workspace(x, false));
  return 0;
}
API long emu_cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *h, int mode, int fused, const struct tensor *x,
                                                               void *y, void *dy, void *dz, void *dx, void *scale,
                                                               void *activation, size_t *bytes) {
  UNUSED(h), UNUSED(mode), UNUSED(fused), UNUSED(y), UNUSED(dy), UNUSED(dz), UNUSED(dx), UNUSED(scale);
  UNUSED(activation);
  *bytes = workspace_answer("cudnnGetBatchNormalizationBackwardExWorkspaceSize", norm_workspace(x, true));
  return 0;
}
API long emu_cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *h, int mode, int fused, void *activation,
                                                                  void *x, size_t *bytes) {
  UNUSED(h), UNUSED(mode), UNUSED(fused), UNUSED(activation), UNUSED(x);
  *bytes = workspace_answer("cudnnGetBatchNormalizationTrainingExReserveSpaceSize", 0); /* 0 in all rows */
  return 0;
}
