/* Devices: what the visible cards say of themselves, to the runtime and to the driver.
 *
 * True of it: what a card reports comes from machine.txt; the rest are constants of the architecture or of CUDA; peers
 * can access each other. Left out: textures' limits per architecture, affinity, NVLink. */
#include "emulator.h" /* first: it asks for GNU's interfaces */

#include <stdio.h>
#include <string.h>

static int64_t attribute(int ordinal, int which) { /* cudaDeviceAttr and CUdevice_attribute agree in number */
  const struct card *c = devices[ordinal].card;
  bool ampere = c->capability_major >= 8;
  switch (which) {
    case 1: case 2: case 3: return 1024; /* threads per block */
    case 4: return 64;
    case 5: return 2147483647;
    case 6: case 7: return 65535;
    case 8: return c->shared_memory_per_block_bytes;
    case 9: return 65536; /* constant memory */
    case 10: return 32;   /* warp */
    case 11: return 2147483647;
    case 12: return c->registers_per_block;
    case 13: return c->clock_khz;
    case 14: return 512;
    case 15: return 1;
    case 16: return c->sm_count;
    case 18: return c->integrated;
    case 19: return 1;
    case 21: return 131072;
    case 22: return 131072;
    case 23: return 65536;
    case 24: case 25: case 26: return 16384;
    case 30: return 512;
    case 31: return 1;
    case 32: return c->ecc;
    case 33: return c->pci_bus;
    case 34: return c->pci_device;
    case 36: return c->memory_clock_khz;
    case 37: return c->memory_bus_bits;
    case 38: return c->l2_bytes;
    case 39: return c->threads_per_sm;
    case 40: return c->async_engines;
    case 41: return 1; /* unified addressing */
    case 50: return c->pci_domain;
    case 51: return 32;
    case 75: return c->capability_major;
    case 76: return c->capability_minor;
    case 78: case 79: case 80: return 1; /* stream priorities, caching in L1 */
    case 81: return c->shared_memory_per_sm_bytes;
    case 82: return c->registers_per_sm;
    case 83: return 1; /* managed memory */
    case 87: return c->single_to_double_ratio;
    case 89: case 90: case 91: return 1; /* concurrent managed access, preemption, host pointers */
    case 92: case 93: return 1;          /* stream memory operations */
    case 94: return 1;
    case 95: return 1; /* cooperative launch */
    case 97: return c->shared_memory_per_block_optin_bytes;
    case 98: case 99: return 1; /* host registration */
    case 102: case 103: return 1; /* virtual memory management, handles as file descriptors */
    case 106: return c->blocks_per_sm;
    case 108: return c->persisting_l2_bytes;
    case 109: return ampere ? 134213632 : 0; /* access policy window */
    case 111: return c->reserved_shared_memory_per_block_bytes;
    case 113: return 1;
    case 115: return 1; /* memory pools */
    case 119: return 1; /* pools' handles: file descriptors */
    case 120: return c->capability_major >= 9; /* clusters */
    case 125: return 1;
    case 126: return c->capability_major >= 9 ? 4 : 1;
    case 131: return -1; /* no NUMA node */
    case 134: return -1;
    default: return 0; /* fabric handles (128), multicast (132), GPUDirect (116), MPS (133): no */
  }
}

/* ---- the runtime -------------------------------------------------------------------------------------------------- */
API status emu_cudaGetDeviceCount(int *count) {
  *count = 0;
  TRY(driver_enter());
  *count = num_devices;
  return OK;
}
API status emu_cudaDriverGetVersion(int *version) {
  if (driver_enter() && !machine.driver_version) { /* no machine: as where no driver is installed */
    *version = 0;
    return OK;
  }
  *version = machine.driver_version;
  return OK;
}
API status emu_cudaRuntimeGetVersion(int *version) {
  *version = EMU_CUDA_VERSION;
  return OK;
}
static status checked(int ordinal) {
  status s = driver_enter();
  if (s) return s;
  return ordinal < 0 || ordinal >= num_devices ? INVALID_DEVICE : OK;
}
API status emu_cudaDeviceGetAttribute(int *value, int which, int ordinal) {
  TRY(checked(ordinal));
  *value = (int)attribute(ordinal, which);
  return OK;
}
API status emu_cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  TRY(context_enter());
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return OK;
}
API status emu_cudaDeviceGetPCIBusId(char *text, int room, int ordinal) {
  TRY(checked(ordinal));
  snprintf(text, (size_t)room, "%s", devices[ordinal].card->pci_bus_id);
  return OK;
}
API status emu_cudaDeviceGetByPCIBusId(int *ordinal, const char *text) {
  TRY(driver_enter());
  unsigned domain = 0, bus = 0, device = 0;
  if (sscanf(text, "%x:%x:%x", &domain, &bus, &device) != 3) return fail(INVALID_VALUE);
  for (int i = 0; i < num_devices; i++) {
    const struct card *c = devices[i].card;
    if (c->pci_domain != domain || c->pci_bus != bus || c->pci_device != device) continue;
    *ordinal = i;
    return OK;
  }
  return fail(INVALID_DEVICE);
}
API status emu_cudaDeviceCanAccessPeer(int *can, int a, int b) {
  TRY(checked(a));
  TRY(checked(b));
  *can = a != b;
  return OK;
}
API status emu_cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
  TRY(checked(peer));
  TRY(context_enter());
  struct device *d = &devices[current_device];
  if (flags || peer == current_device) return fail(flags ? INVALID_VALUE : INVALID_DEVICE);
  if (d->peers_enabled & 1u << peer) return fail(PEER_ACCESS_ALREADY_ENABLED);
  d->peers_enabled |= 1u << peer;
  return OK;
}
API status emu_cudaDeviceDisablePeerAccess(int peer) {
  TRY(checked(peer));
  struct device *d = &devices[current_device];
  if (!(d->peers_enabled & 1u << peer)) return fail(PEER_ACCESS_NOT_ENABLED);
  d->peers_enabled &= ~(1u << peer);
  return OK;
}
API status emu_cudaDeviceGetP2PAttribute(int *value, int which, int a, int b) {
  TRY(checked(a));
  TRY(checked(b));
  *value = which == 2 ? a != b : 0; /* access: yes; atomics and arrays over it: no; rank: 0 */
  return OK;
}
static size_t limits[7] = {1024, 1048576, 8388608, 2, 2048, 128, 0};
API status emu_cudaDeviceGetLimit(size_t *value, int which) {
  TRY(context_enter());
  if (which < 0 || which > 6) return fail(215);
  *value = limits[which];
  return OK;
}
API status emu_cudaDeviceSetLimit(int which, size_t value) {
  TRY(context_enter());
  if (which < 0 || which > 6) return fail(215);
  limits[which] = value;
  return OK;
}
API status emu_cudaDeviceGetCacheConfig(int *config) {
  TRY(context_enter());
  *config = 0;
  return OK;
}
API status emu_cudaDeviceGetSharedMemConfig(int *config) {
  TRY(context_enter());
  *config = 1;
  return OK;
}

static void describe(struct cuda_device_properties *p, int ordinal) {
  const struct card *c = devices[ordinal].card;
#define ATTRIBUTE(n) ((int)attribute(ordinal, n))
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "%s", c->name);
  memcpy(p->uuid, c->uuid, 16);
  p->totalGlobalMem = c->total_bytes;
  p->sharedMemPerBlock = (size_t)c->shared_memory_per_block_bytes;
  p->regsPerBlock = ATTRIBUTE(12), p->warpSize = 32, p->memPitch = 2147483647;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536;
  p->major = c->capability_major, p->minor = c->capability_minor;
  p->textureAlignment = 512, p->texturePitchAlignment = 32;
  p->multiProcessorCount = (int)c->sm_count;
  p->integrated = (int)c->integrated, p->canMapHostMemory = 1;
  p->maxTexture1D = 131072, p->maxTexture1DMipmap = 32768;
  p->maxTexture2D[0] = 131072, p->maxTexture2D[1] = 65536;
  p->maxTexture3D[0] = p->maxTexture3D[1] = p->maxTexture3D[2] = 16384;
  p->surfaceAlignment = 512, p->concurrentKernels = 1, p->ECCEnabled = (int)c->ecc;
  p->pciBusID = (int)c->pci_bus, p->pciDeviceID = (int)c->pci_device, p->pciDomainID = (int)c->pci_domain;
  p->asyncEngineCount = (int)c->async_engines, p->unifiedAddressing = 1;
  p->memoryBusWidth = (int)c->memory_bus_bits, p->l2CacheSize = (int)c->l2_bytes;
  p->persistingL2CacheMaxSize = (int)c->persisting_l2_bytes;
  p->maxThreadsPerMultiProcessor = (int)c->threads_per_sm;
  p->streamPrioritiesSupported = p->globalL1CacheSupported = p->localL1CacheSupported = 1;
  p->sharedMemPerMultiprocessor = (size_t)c->shared_memory_per_sm_bytes;
  p->regsPerMultiprocessor = (int)c->registers_per_sm;
  p->managedMemory = p->concurrentManagedAccess = p->computePreemptionSupported = 1;
  p->canUseHostPointerForRegisteredMem = p->cooperativeLaunch = 1;
  p->sharedMemPerBlockOptin = (size_t)c->shared_memory_per_block_optin_bytes;
  p->maxBlocksPerMultiProcessor = (int)c->blocks_per_sm;
  p->accessPolicyMaxWindowSize = ATTRIBUTE(109);
  p->reservedSharedMemPerBlock = (size_t)c->reserved_shared_memory_per_block_bytes;
  p->hostRegisterSupported = p->hostRegisterReadOnlySupported = p->memoryPoolsSupported = 1;
  p->memoryPoolSupportedHandleTypes = 1, p->ipcEventSupported = 1;
  p->clusterLaunch = c->capability_major >= 9;
#if EMU_CUDA_MAJOR < 13
  p->clockRate = (int)c->clock_khz, p->memoryClockRate = (int)c->memory_clock_khz, p->deviceOverlap = 1;
  p->singleToDoublePrecisionPerfRatio = (int)c->single_to_double_ratio;
  p->cooperativeMultiDeviceLaunch = 1, p->maxTexture1DLinear = 268435456;
#else
  p->deviceNumaId = p->hostNumaId = -1;
#endif
}
API status emu_cudaGetDeviceProperties_v2(struct cuda_device_properties *properties, int ordinal) {
  TRY(checked(ordinal));
  describe(properties, ordinal);
  return OK;
}
API status emu_cudaGetDeviceProperties(struct cuda_device_properties *properties, int ordinal) {
  TRY(checked(ordinal));
  struct cuda_device_properties all;
  describe(&all, ordinal);
  /* In 12 the name without _v2 is CUDA 11's, whose struct ends after reservedSharedMemPerBlock. */
  size_t bytes = EMU_CUDA_MAJOR < 13 ? offsetof(struct cuda_device_properties, hostRegisterSupported) : sizeof all;
  memcpy(properties, &all, bytes);
  return OK;
}

/* ---- the driver --------------------------------------------------------------------------------------------------- */
API status emu_cuDriverGetVersion(int *version) { return emu_cudaDriverGetVersion(version); }
API status emu_cuDeviceGetCount(int *count) {
  TRY_DRIVER(driver_enter());
  *count = num_devices;
  return OK;
}
API status emu_cuDeviceGet(int *device, int ordinal) {
  TRY_DRIVER(checked(ordinal));
  *device = ordinal;
  return OK;
}
API status emu_cuDeviceGetName(char *text, int room, int ordinal) {
  TRY_DRIVER(checked(ordinal));
  snprintf(text, (size_t)room, "%s", devices[ordinal].card->name);
  return OK;
}
API status emu_cuDeviceTotalMem_v2(size_t *bytes, int ordinal) {
  TRY_DRIVER(checked(ordinal));
  *bytes = devices[ordinal].card->total_bytes;
  return OK;
}
API status emu_cuDeviceGetAttribute(int *value, int which, int ordinal) {
  TRY_DRIVER(checked(ordinal));
  *value = (int)attribute(ordinal, which);
  return OK;
}
API status emu_cuDeviceComputeCapability(int *major, int *minor, int ordinal) {
  TRY_DRIVER(checked(ordinal));
  *major = devices[ordinal].card->capability_major;
  *minor = devices[ordinal].card->capability_minor;
  return OK;
}
API status emu_cuDeviceGetUuid(void *uuid, int ordinal) {
  TRY_DRIVER(checked(ordinal));
  memcpy(uuid, devices[ordinal].card->uuid, 16);
  return OK;
}
API status emu_cuDeviceGetUuid_v2(void *uuid, int ordinal) { return emu_cuDeviceGetUuid(uuid, ordinal); }
API status emu_cuDeviceGetPCIBusId(char *text, int room, int ordinal) {
  TRY_DRIVER(checked(ordinal));
  snprintf(text, (size_t)room, "%s", devices[ordinal].card->pci_bus_id);
  return OK;
}
API status emu_cuDeviceCanAccessPeer(int *can, int a, int b) {
  TRY_DRIVER(checked(a));
  TRY_DRIVER(checked(b));
  *can = a != b;
  return OK;
}
API status emu_cuCtxEnablePeerAccess(void *context, unsigned flags) {
  TRY_DRIVER(context_current(NULL));
  UNUSED(flags);
  if (!context) return INVALID_CONTEXT;
  devices[current_device].peers_enabled |= 1u << ((struct context *)context)->ordinal;
  return OK;
}
API status emu_cuCtxGetLimit(size_t *value, int which) {
  TRY_DRIVER(context_current(NULL));
  if (which < 0 || which > 6) return 215;
  *value = limits[which];
  return OK;
}
API status emu_cuCtxSetLimit(int which, size_t value) {
  TRY_DRIVER(context_current(NULL));
  if (which < 0 || which > 6) return 215;
  limits[which] = value;
  return OK;
}
