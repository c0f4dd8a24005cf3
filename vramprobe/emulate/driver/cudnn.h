/* What the emulated cuDNN's files share: its tensors, what a convolution is, the workspaces' rules. */
#ifndef VRAMPROBE_CUDNN_H
#define VRAMPROBE_CUDNN_H
#include "emulator.h" /* first: it asks for GNU's interfaces */

enum { MAX_DIMS = 8, FLOAT32 = 0 };
struct tensor { /* of a descriptor */
  int type, format, num_dims, dims[MAX_DIMS], strides[MAX_DIMS];
};
enum pass { NO_CONVOLUTION, PASS_FORWARD = 10, PASS_FILTER, PASS_DATA }; /* numbers of the operations' descriptors */
struct convolution {
  enum pass pass;
  int type;
  bool channels_last, strided, overlaps; /* overlaps: the kernel is wider than its step */
  int64_t rows, in, out, groups, x_pixels, y_pixels, taps;
};
struct rnn {
  int cell, bias, bidirectional, type;
  int64_t input, hidden, projected, layers;
  bool drops; /* between layers */
};
enum { PLAIN_RELU = 0, PLAIN_TANH, LSTM, GRU, TRAINING = 1 };

static inline int64_t type_bytes(int type) { return type == 1 ? 8 : type == 2 || type == 9 ? 2 : type == 3 ? 1 : 4; }
struct convolution convolution_of(enum pass pass, const struct tensor *x, const struct tensor *w,
                                  const struct tensor *y, int64_t stride);
int64_t convolution_workspace(const struct convolution *c); /* -1: nothing near it was measured */
int64_t rnn_workspace(const struct rnn *r, int64_t steps, int64_t rows, int64_t matrix_bytes);
int64_t norm_workspace(const struct tensor *x, bool backward);
size_t workspace_answer(const char *function, int64_t bytes); /* tells the profile what the answer rests on */
#endif
