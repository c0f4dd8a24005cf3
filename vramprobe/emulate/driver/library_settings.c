/* What a caller sets on a handle of cuBLAS, cuDNN, cuSPARSE or cuSOLVER and reads back: stream, pointer mode, math mode.
 *
 * True of it: a getter gives what the setter was given, 0 before, as the libraries' defaults are. Left out: nothing is
 * done with them; a handle that is destroyed keeps its row until its address is made a handle again. */
#include "emulator.h" /* first: it asks for GNU's interfaces */

#include <pthread.h>
#include <stdlib.h>

enum setting { STREAM, POINTER_MODE, MATH_MODE, ATOMICS_MODE, NUM_SETTINGS };
struct row {
  const void *handle;
  uintptr_t value[NUM_SETTINGS];
};
static struct row *rows;
static size_t num_rows, room;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static long set(const void *handle, enum setting which, uintptr_t value) {
  pthread_mutex_lock(&lock);
  size_t k = 0;
  while (k < num_rows && rows[k].handle != handle) k++;
  if (k == num_rows && num_rows == room) {
    struct row *more = realloc(rows, (room + 64) * sizeof *rows);
    if (!more) abort();
    rows = more, room += 64;
  }
  if (k == num_rows) rows[num_rows++] = (struct row){.handle = handle};
  rows[k].value[which] = value;
  pthread_mutex_unlock(&lock);
  return 0;
}
static uintptr_t get(const void *handle, enum setting which) {
  uintptr_t value = 0;
  pthread_mutex_lock(&lock);
  for (size_t k = 0; k < num_rows; k++)
    if (rows[k].handle == handle) value = rows[k].value[which];
  pthread_mutex_unlock(&lock);
  return value;
}

#define STREAM_OF(setter, getter) \
  API long emu_##setter(void *handle, void *stream) { return set(handle, STREAM, (uintptr_t)stream); } \
  API long emu_##getter(void *handle, void **stream) { return *stream = (void *)get(handle, STREAM), 0; }
#define MODE_OF(which, setter, getter) \
  API long emu_##setter(void *handle, int mode) { return set(handle, which, (uintptr_t)mode); } \
  API long emu_##getter(void *handle, int *mode) { return *mode = (int)get(handle, which), 0; }

STREAM_OF(cudnnSetStream, cudnnGetStream)
STREAM_OF(cublasSetStream_v2, cublasGetStream_v2)
STREAM_OF(cusparseSetStream, cusparseGetStream)
STREAM_OF(cusolverDnSetStream, cusolverDnGetStream)
MODE_OF(POINTER_MODE, cublasSetPointerMode_v2, cublasGetPointerMode_v2)
MODE_OF(POINTER_MODE, cusparseSetPointerMode, cusparseGetPointerMode)
MODE_OF(MATH_MODE, cublasSetMathMode, cublasGetMathMode)
MODE_OF(ATOMICS_MODE, cublasSetAtomicsMode, cublasGetAtomicsMode)
