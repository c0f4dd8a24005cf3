/* What cuDNN's graph ("backend") interface is asked about: a convolution's tensors and steps are kept, and go with the
 * graph to its heuristics, configurations and plans, so that a plan's workspace can be answered.
 *
 * True of it: every graph is accepted and has one engine. Left out: graphs of other operations, and of several, have a
 * workspace of 0, with an event `lower_bound`. */
#include "cudnn.h"

#include <stdlib.h>
#include <string.h>

enum { CONVOLUTION = 1, PLAN = 5, GRAPH = 15, TENSOR = 17 }; /* cudnnBackendDescriptorType_t; the passes are 10 to 12 */
enum { STRIDES = 103, WORKSPACE_BYTES = 402, OPERATIONS = 801, TENSOR_TYPE = 901, TENSOR_DIMS, TENSOR_STRIDES };
enum { OF_INT64 = 3, OF_DESCRIPTORS = 15, OF_INT32 = 23 }; /* cudnnBackendAttributeType_t */
enum part { PART_CONVOLUTION, PART_W, PART_X, PART_Y };
struct descriptor {
  int kind;
  int64_t stride;               /* of a CONVOLUTION, in the last dimension */
  struct tensor tensor[4];      /* of a TENSOR the first, of an operation by part */
  struct convolution operation; /* of an operation, and of what knows its graph */
};

API long emu_cudnnBackendCreateDescriptor(int kind, struct descriptor **out) {
  *out = calloc(1, sizeof **out);
  if (!*out) return 2000;
  (*out)->kind = kind;
  return 0;
}
API long emu_cudnnBackendDestroyDescriptor(struct descriptor *d) {
  free(d);
  return 0;
}
API long emu_cudnnBackendFinalize(struct descriptor *d) {
  const char *no = getenv("VRAMPROBE_EMULATOR_NO_CUDNN_GRAPH");
  if (no && *no) return 3000; /* CUDNN_STATUS_NOT_SUPPORTED */
  if (d->kind >= PASS_FORWARD && d->kind <= PASS_DATA)
    d->operation = convolution_of((enum pass)d->kind, &d->tensor[PART_X], &d->tensor[PART_W], &d->tensor[PART_Y],
                                  d->stride);
  return 0;
}

static void set_tensor(struct tensor *t, int which, int64_t count, const void *values) {
  if (which == TENSOR_TYPE) t->type = *(const int *)values;
  if (which != TENSOR_DIMS && which != TENSOR_STRIDES) return;
  if (which == TENSOR_DIMS) t->num_dims = (int)(count < MAX_DIMS ? count : MAX_DIMS);
  int *to = which == TENSOR_DIMS ? t->dims : t->strides;
  for (int64_t k = 0; k < count && k < MAX_DIMS; k++) to[k] = (int)((const int64_t *)values)[k];
}
/* A convolution's parts are at 702, 708 or 714 and the three numbers behind, in one order for all passes. */
static void set_part(struct descriptor *d, int which, const struct descriptor *given) {
  int part = which - (d->kind == PASS_FORWARD ? 702 : d->kind == PASS_DATA ? 708 : 714);
  if (part == PART_CONVOLUTION) d->stride = given->stride;
  else if (part > PART_CONVOLUTION && part <= PART_Y) d->tensor[part] = given->tensor[0];
}
API long emu_cudnnBackendSetAttribute(struct descriptor *d, int which, int type, int64_t count, void *values) {
  struct descriptor *given = type == OF_DESCRIPTORS && count > 0 && values ? *(struct descriptor **)values : NULL;
  if (!count || !values) return 0;
  if (d->kind == TENSOR) set_tensor(&d->tensor[0], which, count, values);
  else if (d->kind == CONVOLUTION && which == STRIDES) d->stride = ((const int64_t *)values)[count - 1];
  else if (given && d->kind >= PASS_FORWARD && d->kind <= PASS_DATA) set_part(d, which, given);
  else if (given && (which != OPERATIONS || count == 1) && given->operation.pass) d->operation = given->operation;
  return 0;
}
API long emu_cudnnBackendGetAttribute(struct descriptor *d, int which, int type, int64_t wanted, int64_t *found,
                                      void *values) {
  bool none = which == 302 || which == 305 || which == 306 || which == 1303 || which == 1305; /* notes, knobs */
  if (found) *found = none ? 0 : 1;
  if (none || !values || !wanted) return 0;
  if (type == OF_DESCRIPTORS) { /* the caller's own */
    if (*(struct descriptor **)values) (*(struct descriptor **)values)->operation = d->operation;
  } else if (type == OF_INT64) {
    bool asked = which == WORKSPACE_BYTES;
    *(int64_t *)values =
        asked ? (int64_t)workspace_answer("cudnnBackendGetAttribute", convolution_workspace(&d->operation)) : 0;
  } else if (type == OF_INT32) {
    *(int32_t *)values = 0;
  }
  return 0;
}
