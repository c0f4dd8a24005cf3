/* Virtual memory management: reserve addresses, make memory, map it; torch's expandable segments.
 *
 * True of it: a reservation costs nothing, memory is charged when it is made and given back when its last handle and
 * its last mapping are gone; sizes are whole granules. A handle that is mapped twice or exported is moved to a memfd,
 * so all its mappings show the same bytes, in other processes too. The process that made the memory is charged for it;
 * an importer is not. Left out: access rights (mapped memory can be used without cuMemSetAccess), multicast, fabric. */
#include "emulator.h" /* first: it asks for GNU's interfaces */

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MEMORY_MAGIC = 0x3E3084, HANDLE_POSIX_FD = 1 };
struct physical {
  uint32_t magic;
  int ordinal, fd, references; /* handles and mappings */
  bool imported;
  size_t bytes;
  struct cuda_allocation_properties properties;
  struct physical *next;
};
struct mapping {
  uintptr_t address;
  size_t bytes, offset;
  struct physical *physical;
};
static struct mapping *mappings; /* sorted by address */
static size_t count, capacity;
static struct physical *all;

static struct physical *checked(const void *handle) {
  for (struct physical *p = all; p; p = p->next)
    if (p == handle && p->magic == MEMORY_MAGIC) return p;
  return NULL;
}

static void drop(struct physical *p) { /* under the process lock */
  if (--p->references) return;
  if (!p->imported) shared_release(devices[p->ordinal].index, p->bytes);
  if (p->fd >= 0) close(p->fd);
  struct physical **at = &all;
  while (*at && *at != p) at = &(*at)->next;
  if (*at) *at = p->next;
  p->magic = 0;
  free(p);
}

/* The range shows the file from now on; what it showed before goes into the file first. Pages that were never
 * touched read as zeros and stay holes. */
void shared_file_map(uintptr_t address, size_t bytes, int fd, bool keep_contents) {
  static const char zeros[4096];
  for (size_t done = 0; keep_contents && done < bytes; done += PAGE_BYTES)
    if (memcmp((void *)(address + done), zeros, PAGE_BYTES) != 0 &&
        pwrite(fd, (void *)(address + done), PAGE_BYTES, (off_t)done) != (ssize_t)PAGE_BYTES)
      trace(1, "shared memory could not be written");
  void *p = mmap((void *)address, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, fd, 0);
  if (p == MAP_FAILED) abort(); /* a fixed range of our own: cannot fail */
}

static void make_private(uintptr_t address, size_t bytes) {
  mmap((void *)address, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

static bool share(struct physical *p) { /* to a memfd, its present mappings included */
  if (p->fd >= 0) return true;
  p->fd = memfd_create("vramprobe", MFD_CLOEXEC);
  if (p->fd < 0 || ftruncate(p->fd, (off_t)p->bytes) != 0) return false;
  for (size_t k = 0; k < count; k++)
    if (mappings[k].physical == p) shared_file_map(mappings[k].address, mappings[k].bytes, p->fd, true);
  return true;
}

static size_t after(uintptr_t address) {
  size_t low = 0, high = count;
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (mappings[middle].address <= address) low = middle + 1;
    else high = middle;
  }
  return low;
}

API status emu_cuMemGetAllocationGranularity(size_t *bytes, const void *properties, int option) {
  TRY_DRIVER(driver_enter());
  UNUSED(option);
  if (!properties) return INVALID_VALUE;
  *bytes = GRANULE_BYTES;
  return OK;
}
API status emu_cuMemAddressReserve(void **pointer, size_t bytes, size_t alignment, void *wanted,
                                   unsigned long long flags) {
  UNUSED(alignment), UNUSED(wanted); /* a wish */
  TRY_DRIVER(driver_enter());
  if (!pointer || !bytes || bytes % GRANULE_BYTES || flags) return INVALID_VALUE;
  return memory_allocate(&devices[current_device], pointer, bytes, BLOCK_RESERVED, NULL);
}
API status emu_cuMemAddressFree(void *pointer, size_t bytes) {
  TRY_DRIVER(driver_enter());
  struct block b;
  if (!memory_block(pointer, &b) || b.address != (uintptr_t)pointer || b.size_bytes != bytes) return INVALID_VALUE;
  process_lock();
  size_t k = after(b.address + bytes - 1);
  bool mapped = k && mappings[k - 1].address >= b.address;
  process_unlock();
  return mapped ? INVALID_VALUE : memory_free(pointer, BLOCK_RESERVED);
}
API status emu_cuMemCreate(void **handle, size_t bytes, const struct cuda_allocation_properties *wanted,
                           unsigned long long flags) {
  TRY_DRIVER(driver_enter());
  if (!handle || !wanted || !bytes || bytes % GRANULE_BYTES || flags) return INVALID_VALUE;
  if (wanted->location.type != LOCATION_DEVICE) return NOT_SUPPORTED;
  if (wanted->location.id < 0 || wanted->location.id >= num_devices) return INVALID_DEVICE;
  if (wanted->requestedHandleTypes & ~HANDLE_POSIX_FD) return NOT_SUPPORTED; /* fabric: torch then asks for an fd */
  struct device *d = &devices[wanted->location.id];
  process_lock();
  bool ok = device_charge(d, bytes);
  struct physical *p = ok ? calloc(1, sizeof *p) : NULL;
  if (p) {
    *p = (struct physical){MEMORY_MAGIC, d->ordinal, -1, 1, false, bytes, *wanted, all};
    all = p;
  }
  process_unlock();
  if (!ok) return OUT_OF_MEMORY;
  *handle = p;
  trace(1, "cuda:%d: %zu bytes made", d->ordinal, bytes);
  return OK;
}
API status emu_cuMemRelease(void *handle) {
  process_lock();
  struct physical *p = checked(handle);
  if (p) drop(p);
  process_unlock();
  return p ? OK : INVALID_VALUE;
}
API status emu_cuMemMap(void *pointer, size_t bytes, size_t offset, void *handle, unsigned long long flags) {
  struct block b;
  uintptr_t address = (uintptr_t)pointer;
  if (flags || !bytes || bytes % GRANULE_BYTES || address % GRANULE_BYTES) return INVALID_VALUE;
  if (!memory_block(pointer, &b) || b.kind != BLOCK_RESERVED || address + bytes > b.address + b.size_bytes)
    return INVALID_VALUE;
  process_lock();
  struct physical *p = checked(handle);
  size_t k = after(address + bytes - 1);
  bool taken = k && mappings[k - 1].address + mappings[k - 1].bytes > address;
  bool ok = p && !taken && offset == 0 && bytes == p->bytes, again = false;
  for (size_t i = 0; ok && i < count; i++) again |= mappings[i].physical == p;
  if (ok && again) ok = share(p);
  if (ok) {
    if (count == capacity) {
      capacity = capacity ? 2 * capacity : 256;
      mappings = realloc(mappings, capacity * sizeof *mappings);
      if (!mappings) abort();
    }
    memmove(mappings + k + 1, mappings + k, (count - k) * sizeof *mappings);
    mappings[k] = (struct mapping){address, bytes, offset, p};
    count++;
    p->references++;
    if (p->fd >= 0) shared_file_map(address, bytes, p->fd, false);
    if (p->imported) computed_set(pointer, bytes, true); /* the exporter answers for it */
  }
  process_unlock();
  return ok ? OK : taken ? ALREADY_MAPPED : INVALID_VALUE;
}

static void unmap(size_t k) {
  struct mapping m = mappings[k];
  if (m.physical->fd >= 0) make_private(m.address, m.bytes);
  else pages_drop(m.address, m.bytes);
  computed_set((void *)m.address, m.bytes, false);
  memmove(mappings + k, mappings + k + 1, (count - k - 1) * sizeof *mappings);
  count--;
  drop(m.physical);
}
API status emu_cuMemUnmap(void *pointer, size_t bytes) {
  uintptr_t address = (uintptr_t)pointer;
  process_lock();
  size_t first = after(address), covered = 0;
  if (first && mappings[first - 1].address == address) first--;
  for (size_t k = first; k < count && mappings[k].address < address + bytes; k++) covered += mappings[k].bytes;
  bool ok = bytes && covered == bytes; /* whole mappings, without holes */
  while (ok && first < count && mappings[first].address < address + bytes) unmap(first);
  process_unlock();
  return ok ? OK : INVALID_VALUE;
}
API status emu_cuMemSetAccess(void *pointer, size_t bytes, const struct cuda_memory_access *access, size_t num) {
  if (!access || !num) return INVALID_VALUE;
  uintptr_t address = (uintptr_t)pointer, end = address + bytes;
  process_lock();
  bool ok = true;
  while (ok && address < end) {
    size_t k = after(address);
    ok = k && address < mappings[k - 1].address + mappings[k - 1].bytes;
    if (ok) address = mappings[k - 1].address + mappings[k - 1].bytes;
  }
  process_unlock();
  return ok ? OK : INVALID_VALUE;
}
API status emu_cuMemGetAccess(unsigned long long *flags, const struct cuda_memory_location *location, void *pointer) {
  UNUSED(location);
  struct block b;
  if (!memory_block(pointer, &b)) return INVALID_VALUE;
  *flags = 3;
  return OK;
}
API status emu_cuMemGetAllocationPropertiesFromHandle(struct cuda_allocation_properties *properties, void *handle) {
  process_lock();
  struct physical *p = checked(handle);
  if (p) *properties = p->properties;
  process_unlock();
  return p ? OK : INVALID_VALUE;
}
API status emu_cuMemRetainAllocationHandle(void **handle, void *pointer) {
  process_lock();
  size_t k = after((uintptr_t)pointer);
  bool ok = k && (uintptr_t)pointer < mappings[k - 1].address + mappings[k - 1].bytes;
  if (ok) {
    *handle = mappings[k - 1].physical;
    mappings[k - 1].physical->references++;
  }
  process_unlock();
  return ok ? OK : INVALID_VALUE;
}
API status emu_cuMemExportToShareableHandle(void *out, void *handle, int type, unsigned long long flags) {
  if (type != HANDLE_POSIX_FD || flags || !out) return type == HANDLE_POSIX_FD ? INVALID_VALUE : NOT_SUPPORTED;
  process_lock();
  struct physical *p = checked(handle);
  bool allowed = p && (p->properties.requestedHandleTypes & HANDLE_POSIX_FD);
  int fd = allowed && share(p) ? fcntl(p->fd, F_DUPFD_CLOEXEC, 0) : -1;
  process_unlock();
  if (!allowed) return INVALID_VALUE;
  if (fd < 0) return OPERATING_SYSTEM;
  memcpy(out, &fd, sizeof fd);
  return OK;
}
API status emu_cuMemImportFromShareableHandle(void **handle, void *shareable, int type) {
  TRY_DRIVER(driver_enter());
  if (type != HANDLE_POSIX_FD) return NOT_SUPPORTED;
  struct stat about;
  int fd = fcntl((int)(intptr_t)shareable, F_DUPFD_CLOEXEC, 0);
  if (fd < 0 || fstat(fd, &about) != 0 || about.st_size <= 0 || about.st_size % (off_t)GRANULE_BYTES) {
    if (fd >= 0) close(fd);
    return INVALID_VALUE;
  }
  struct physical *p = calloc(1, sizeof *p);
  if (!p) return OUT_OF_MEMORY;
  *p = (struct physical){.magic = MEMORY_MAGIC, .ordinal = current_device, .fd = fd, .references = 1, .imported = true,
                         .bytes = (size_t)about.st_size};
  p->properties = (struct cuda_allocation_properties){.type = 1, .requestedHandleTypes = HANDLE_POSIX_FD,
                                                      .location = {LOCATION_DEVICE, current_device}};
  process_lock();
  p->next = all;
  all = p;
  process_unlock();
  *handle = p;
  return OK;
}

void virtual_memory_clear(struct device *d) {
  process_lock();
  for (size_t k = count; k > 0; k--)
    if (mappings[k - 1].address >= d->start && mappings[k - 1].address < d->end) unmap(k - 1);
  for (struct physical *p = all, *next; p; p = next) {
    next = p->next;
    if (p->ordinal != d->ordinal) continue;
    p->references = 1;
    drop(p);
  }
  process_unlock();
}
