/* What nccl.c, nccl_reduce.c and nccl_traffic.c share. */
#ifndef EMULATE_NCCL_H
#define EMULATE_NCCL_H
#include <stddef.h>

enum { REDUCE_SUM, REDUCE_PRODUCT, REDUCE_MAX, REDUCE_MIN, REDUCE_AVERAGE };
enum nccl_kind { ALL_REDUCE, BROADCAST, REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, SEND, RECEIVE };
enum { NCCL_NUM_KINDS = RECEIVE + 1,
       NCCL_MAX_RANKS = 960 }; /* of a communicator: as many processes as its shared file has room for */
size_t nccl_element_bytes(int type);
/* to[i] = the reduction over ranks of element first + i of inputs[rank]; a premultiplied sum is not known here */
void nccl_reduce(void *to, const char *const *inputs, int num_ranks, size_t first, size_t count, int type, int operation);
/* One call was issued; count as the call has it. */
void nccl_moved(enum nccl_kind kind, int num_ranks, size_t count, size_t element_bytes);
#endif
