/* Libraries of kernels: by an image, whose kernels are asked for by name, or by a file, whose kernels are counted.
 *
 * True of it: the kernels of a cubin are those of its ELF sections `.text.NAME`; a file that is none is refused as the
 * driver refuses it. Left out: what an image in memory has, which may be a fat binary; asking for it ends the run. */
#include "emulator.h" /* first: it asks for GNU's interfaces */

#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char TEXT[] = ".text.";
enum { LIBRARY_MAGIC = 0x11B7A };
struct library {
  uint32_t magic;
  unsigned num_kernels;
  char **kernels;
};
static struct library an_image; /* its magic is 0: nothing is known of it */

static struct library *of_file(void *library) {
  struct library *found = library;
  return found && found->magic == LIBRARY_MAGIC ? found : NULL;
}

static char *contents(const char *path, size_t *num_bytes) {
  FILE *file = fopen(path, "re");
  if (!file) return NULL;
  fseek(file, 0, SEEK_END);
  *num_bytes = (size_t)ftell(file);
  rewind(file);
  char *bytes = malloc(*num_bytes + 1);
  if (!bytes) abort();
  *num_bytes = fread(bytes, 1, *num_bytes, file);
  bytes[*num_bytes] = 0; /* a name at the very end ends */
  fclose(file);
  return bytes;
}

/* Names of the sections that hold a kernel's code; false for what is no cubin. */
static bool read_kernels(struct library *library, const char *bytes, size_t num_bytes) {
  const Elf64_Ehdr *head = (const void *)bytes;
  if (num_bytes < sizeof *head || memcmp(bytes, ELFMAG, SELFMAG) || bytes[EI_CLASS] != ELFCLASS64) return false;
  if (head->e_shoff + (size_t)head->e_shnum * sizeof(Elf64_Shdr) > num_bytes) return false;
  const Elf64_Shdr *sections = (const void *)(bytes + head->e_shoff);
  if (head->e_shstrndx >= head->e_shnum || sections[head->e_shstrndx].sh_offset >= num_bytes) return false;
  library->kernels = calloc((size_t)head->e_shnum + 1, sizeof *library->kernels);
  if (!library->kernels) abort();
  for (unsigned k = 0; k < head->e_shnum; k++) {
    size_t at = sections[head->e_shstrndx].sh_offset + sections[k].sh_name;
    if (at < num_bytes && !strncmp(bytes + at, TEXT, sizeof TEXT - 1))
      library->kernels[library->num_kernels++] = strdup(bytes + at + sizeof TEXT - 1);
  }
  return true;
}

API status emu_cuLibraryLoadData(void **library, const void *image, void *a, void **b, unsigned c, void *d, void **e,
                                 unsigned f) {
  UNUSED(image), UNUSED(a), UNUSED(b), UNUSED(c), UNUSED(d), UNUSED(e), UNUSED(f);
  TRY_DRIVER(driver_enter());
  *library = &an_image;
  return OK;
}
API status emu_cuLibraryLoadFromFile(void **library, const char *path, void *a, void **b, unsigned c, void *d, void **e,
                                     unsigned f) {
  UNUSED(a), UNUSED(b), UNUSED(c), UNUSED(d), UNUSED(e), UNUSED(f);
  TRY_DRIVER(driver_enter());
  size_t num_bytes = 0;
  char *bytes = contents(path, &num_bytes);
  if (!bytes) return FILE_NOT_FOUND;
  struct library *found = calloc(1, sizeof *found);
  if (!found) abort();
  found->magic = LIBRARY_MAGIC;
  bool is_cubin = read_kernels(found, bytes, num_bytes);
  free(bytes);
  if (!is_cubin) return free(found), INVALID_IMAGE;
  *library = found; /* as long as the process: kernels outlive it */
  return OK;
}
API status emu_cuLibraryGetKernelCount(unsigned *count, void *library) {
  const struct library *found = of_file(library);
  if (!found) fatal_unknown("libcuda.so.1", "cuLibraryGetKernelCount of an image in memory");
  *count = found->num_kernels;
  return OK;
}
API status emu_cuLibraryEnumerateKernels(void **kernels, unsigned num, void *library) {
  const struct library *found = of_file(library);
  if (!found) fatal_unknown("libcuda.so.1", "cuLibraryEnumerateKernels of an image in memory");
  for (unsigned k = 0; k < num && k < found->num_kernels; k++)
    TRY_DRIVER(function_named(&kernels[k], found->kernels[k]));
  return OK;
}
API status emu_cuLibraryGetKernel(void **kernel, void *library, const char *name) {
  return UNUSED(library), function_named(kernel, name);
}
API status emu_cuLibraryUnload(void *library) { return UNUSED(library), OK; }
API status emu_cudaLibraryLoadData(void **library, const void *image, void *a, void **b, unsigned c, void *d, void **e,
                                   unsigned f) {
  return fail(emu_cuLibraryLoadData(library, image, a, b, c, d, e, f));
}
API status emu_cudaLibraryLoadFromFile(void **library, const char *path, void *a, void **b, unsigned c, void *d,
                                       void **e, unsigned f) {
  return fail(emu_cuLibraryLoadFromFile(library, path, a, b, c, d, e, f));
}
API status emu_cudaLibraryGetKernel(void **kernel, void *library, const char *name) {
  return UNUSED(library), fail(function_named(kernel, name));
}
