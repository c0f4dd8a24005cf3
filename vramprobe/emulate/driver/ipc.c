/* Memory and events of another process: cudaIpc handles.
 *
 * True of it: an exported allocation moves to a file in the machine's folder, which the importer maps: both see the
 * same bytes; the exporter alone is charged. A packed allocation shares its whole granule, as on a card. Left out: the
 * map of computed bytes is each process's own; the importer takes over what it was at the export, all or nothing. */
#include "emulator.h" /* first: it asks for GNU's interfaces */

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct memory_handle { /* the 64 bytes of cudaIpcMemHandle_t */
  char magic[4];
  int32_t pid, index, computed;
  uint64_t file, bytes, offset;
};
struct exported {
  uintptr_t address;
  size_t bytes;
  uint64_t file, block_id;
};
static struct exported *exports;
static size_t num_exports;
static uint64_t next_file;

static int open_file(int pid, uint64_t number, bool create) {
  char path[1200];
  snprintf(path, sizeof path, "%s/ipc-%d-%llu", machine.folder, pid, (unsigned long long)number);
  return open(path, O_RDWR | O_CLOEXEC | (create ? O_CREAT | O_EXCL : 0), 0600);
}

static status export_memory(struct cuda_ipc_handle *out, void *pointer) {
  struct block b;
  struct device *d = memory_device(pointer);
  if (!out || !d || !memory_block(pointer, &b) || b.kind != BLOCK_MALLOC) return INVALID_VALUE;
  bool packed = b.address < d->packed.end;
  uintptr_t start = packed ? b.address / GRANULE_BYTES * GRANULE_BYTES : b.address;
  size_t bytes = packed ? GRANULE_BYTES : b.size_bytes, k = 0;
  process_lock();
  while (k < num_exports && (exports[k].address != start || (!packed && exports[k].block_id != b.id))) k++;
  status s = OK;
  if (k == num_exports) {
    int fd = open_file((int)getpid(), ++next_file, true);
    if (fd < 0 || ftruncate(fd, (off_t)bytes) != 0) {
      s = OPERATING_SYSTEM;
    } else {
      shared_file_map(start, bytes, fd, true);
      exports = realloc(exports, (num_exports + 1) * sizeof *exports);
      if (!exports) abort();
      exports[num_exports++] = (struct exported){start, bytes, next_file, b.id};
    }
    if (fd >= 0) close(fd);
  }
  struct memory_handle h = {.pid = (int32_t)getpid(), .index = d->index, .bytes = bytes};
  if (!s) h.file = exports[k].file, h.offset = b.address - start;
  process_unlock();
  if (s) return s;
  memcpy(h.magic, "EMU", 4);
  h.computed = computed_all((void *)b.address, b.requested_bytes);
  memset(out, 0, sizeof *out);
  memcpy(out, &h, sizeof h);
  return OK;
}

static status import_memory(void **pointer, const struct cuda_ipc_handle *handle) {
  struct memory_handle h;
  memcpy(&h, handle, sizeof h);
  if (memcmp(h.magic, "EMU", 4) != 0) return INVALID_VALUE;
  if (h.pid == (int32_t)getpid()) return INVALID_CONTEXT; /* a process cannot open its own */
  struct device *d = NULL;
  for (int i = 0; i < num_devices; i++)
    if (devices[i].index == h.index) d = &devices[i];
  if (!d) return INVALID_DEVICE;
  int fd = open_file(h.pid, h.file, false);
  if (fd < 0) return 205;
  void *start;
  status s = memory_allocate(d, &start, h.bytes, BLOCK_IMPORTED, NULL);
  if (!s) {
    shared_file_map((uintptr_t)start, h.bytes, fd, false);
    if (h.computed) computed_set(start, h.bytes, true);
    *pointer = (char *)start + h.offset;
  }
  close(fd);
  return s;
}

static status close_memory(void *pointer) {
  struct block b;
  if (!memory_block(pointer, &b) || b.kind != BLOCK_IMPORTED) return INVALID_VALUE;
  return memory_free((void *)b.address, BLOCK_IMPORTED);
}

API status emu_cudaIpcGetMemHandle(struct cuda_ipc_handle *handle, void *pointer) {
  TRY(context_enter());
  return fail(export_memory(handle, pointer));
}
API status emu_cudaIpcOpenMemHandle(void **pointer, struct cuda_ipc_handle handle, unsigned flags) {
  UNUSED(flags);
  TRY(context_enter());
  return fail(import_memory(pointer, &handle));
}
API status emu_cudaIpcCloseMemHandle(void *pointer) { return fail(close_memory(pointer)); }
API status emu_cuIpcGetMemHandle(struct cuda_ipc_handle *handle, void *pointer) {
  TRY_DRIVER(context_current(NULL));
  return export_memory(handle, pointer);
}
API status emu_cuIpcOpenMemHandle_v2(void **pointer, struct cuda_ipc_handle handle, unsigned flags) {
  UNUSED(flags);
  TRY_DRIVER(context_current(NULL));
  return import_memory(pointer, &handle);
}
API status emu_cuIpcCloseMemHandle(void *pointer) { return close_memory(pointer); }

/* Events are always ready, so another process's is a new one of our own. */
API status emu_cudaEventCreateWithFlags(void **event, unsigned flags);
API status emu_cudaIpcGetEventHandle(struct cuda_ipc_handle *handle, void *event) {
  UNUSED(event);
  memset(handle, 0, sizeof *handle);
  memcpy(handle, "EVT", 4);
  return OK;
}
API status emu_cudaIpcOpenEventHandle(void **event, struct cuda_ipc_handle handle) {
  if (memcmp(handle.bytes, "EVT", 4) != 0) return fail(INVALID_VALUE);
  return emu_cudaEventCreateWithFlags(event, 2);
}
