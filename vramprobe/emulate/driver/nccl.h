/* What nccl.c and nccl_reduce.c share. */
#ifndef EMULATE_NCCL_H
#define EMULATE_NCCL_H
#include <stddef.h>

enum { REDUCE_SUM, REDUCE_PRODUCT, REDUCE_MAX, REDUCE_MIN, REDUCE_AVERAGE };
size_t nccl_element_bytes(int type);
/* to[i] = the reduction over ranks of element first + i of inputs[rank]; a premultiplied sum is not known here */
void nccl_reduce(void *to, const char *const *inputs, int num_ranks, size_t first, size_t count, int type, int operation);
#endif
