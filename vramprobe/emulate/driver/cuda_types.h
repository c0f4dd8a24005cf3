/* The few types of CUDA's interface that the driver must agree on with its callers, for CUDA 12 and 13.
 *
 * Why by hand and not from NVIDIA's headers: building must need nothing of NVIDIA's, and these are facts of a binary
 * interface that cannot change within a major version. What is declared: every struct that the driver reads or
 * writes on behalf of a caller. What is not: enums are ints here, handles are void *, device pointers are void *
 * (CUdeviceptr is an integer of the same size in the same registers). Fields that nobody reads are still there,
 * because their neighbours' offsets depend on them. tests/emulate/test_driver_types.py compares sizes and offsets
 * with NVIDIA's headers where a copy is at hand. */
#ifndef EMULATE_CUDA_TYPES_H
#define EMULATE_CUDA_TYPES_H
#include <stddef.h>
#include <stdint.h>

#ifndef EMU_CUDA_MAJOR
#define EMU_CUDA_MAJOR 13
#endif
#ifndef EMU_CUDA_VERSION
#define EMU_CUDA_VERSION (EMU_CUDA_MAJOR * 1000)
#endif
#ifndef EMU_CUDNN_VERSION
#define EMU_CUDNN_VERSION 91900
#endif
#ifndef EMU_NCCL_VERSION
#define EMU_NCCL_VERSION 22809
#endif

struct cuda_device_properties { /* cudaDeviceProp: 12 still has the fields that 13 dropped */
  char name[256];
  unsigned char uuid[16];
  char luid[8];
  unsigned int luidDeviceNodeMask;
  size_t totalGlobalMem, sharedMemPerBlock;
  int regsPerBlock, warpSize;
  size_t memPitch;
  int maxThreadsPerBlock, maxThreadsDim[3], maxGridSize[3];
#if EMU_CUDA_MAJOR < 13
  int clockRate;
#endif
  size_t totalConstMem;
  int major, minor;
  size_t textureAlignment, texturePitchAlignment;
#if EMU_CUDA_MAJOR < 13
  int deviceOverlap;
#endif
  int multiProcessorCount;
#if EMU_CUDA_MAJOR < 13
  int kernelExecTimeoutEnabled;
#endif
  int integrated, canMapHostMemory;
#if EMU_CUDA_MAJOR < 13
  int computeMode;
#endif
  int maxTexture1D, maxTexture1DMipmap;
#if EMU_CUDA_MAJOR < 13
  int maxTexture1DLinear;
#endif
  int maxTexture2D[2], maxTexture2DMipmap[2], maxTexture2DLinear[3], maxTexture2DGather[2], maxTexture3D[3];
  int maxTexture3DAlt[3], maxTextureCubemap, maxTexture1DLayered[2], maxTexture2DLayered[3];
  int maxTextureCubemapLayered[2], maxSurface1D, maxSurface2D[2], maxSurface3D[3], maxSurface1DLayered[2];
  int maxSurface2DLayered[3], maxSurfaceCubemap, maxSurfaceCubemapLayered[2];
  size_t surfaceAlignment;
  int concurrentKernels, ECCEnabled, pciBusID, pciDeviceID, pciDomainID, tccDriver, asyncEngineCount;
  int unifiedAddressing;
#if EMU_CUDA_MAJOR < 13
  int memoryClockRate;
#endif
  int memoryBusWidth, l2CacheSize, persistingL2CacheMaxSize, maxThreadsPerMultiProcessor;
  int streamPrioritiesSupported, globalL1CacheSupported, localL1CacheSupported;
  size_t sharedMemPerMultiprocessor;
  int regsPerMultiprocessor, managedMemory, isMultiGpuBoard, multiGpuBoardGroupID, hostNativeAtomicSupported;
#if EMU_CUDA_MAJOR < 13
  int singleToDoublePrecisionPerfRatio;
#endif
  int pageableMemoryAccess, concurrentManagedAccess, computePreemptionSupported;
  int canUseHostPointerForRegisteredMem, cooperativeLaunch;
#if EMU_CUDA_MAJOR < 13
  int cooperativeMultiDeviceLaunch;
#endif
  size_t sharedMemPerBlockOptin;
  int pageableMemoryAccessUsesHostPageTables, directManagedMemAccessFromHost, maxBlocksPerMultiProcessor;
  int accessPolicyMaxWindowSize;
  size_t reservedSharedMemPerBlock;
  int hostRegisterSupported, sparseCudaArraySupported, hostRegisterReadOnlySupported;
  int timelineSemaphoreInteropSupported, memoryPoolsSupported, gpuDirectRDMASupported;
  unsigned int gpuDirectRDMAFlushWritesOptions;
  int gpuDirectRDMAWritesOrdering;
  unsigned int memoryPoolSupportedHandleTypes;
  int deferredMappingCudaArraySupported, ipcEventSupported, clusterLaunch, unifiedFunctionPointers;
  int deviceNumaConfig, deviceNumaId, mpsEnabled, hostNumaId; /* 12.1 called all that follows reserved */
  unsigned int gpuPciDeviceID, gpuPciSubsystemID;
  int hostNumaMultinodeIpcSupported, reserved[56];
};

struct cuda_function_attributes { /* cudaFuncAttributes */
  size_t sharedSizeBytes, constSizeBytes, localSizeBytes;
  int maxThreadsPerBlock, numRegs, ptxVersion, binaryVersion, cacheModeCA, maxDynamicSharedSizeBytes;
  int preferredShmemCarveout, clusterDimMustBeSet, requiredClusterWidth, requiredClusterHeight;
  int requiredClusterDepth, clusterSchedulingPolicyPreference, nonPortableClusterSizeAllowed, reserved[16];
};

enum { POINTER_UNREGISTERED, POINTER_HOST, POINTER_DEVICE, POINTER_MANAGED }; /* cudaMemoryType */
struct cuda_pointer_attributes { /* cudaPointerAttributes; 13 appended eight reserved longs */
  int type, device;
  void *devicePointer, *hostPointer;
#if EMU_CUDA_MAJOR >= 13
  long reserved[8];
#endif
};

struct cuda_dim3 { /* dim3: passed by value, so it must be a struct of three unsigned ints */
  unsigned int x, y, z;
};

struct cuda_launch_config { /* cudaLaunchConfig_t */
  struct cuda_dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  void *stream, *attrs;
  unsigned int numAttrs;
};

struct cuda_driver_launch_config { /* CUlaunchConfig */
  unsigned int gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes;
  void *hStream, *attrs;
  unsigned int numAttrs;
};

enum { LOCATION_NONE, LOCATION_DEVICE, LOCATION_HOST }; /* cudaMemLocationType */
struct cuda_memory_location { /* cudaMemLocation, CUmemLocation */
  int type, id;
};

struct cuda_memory_access { /* CUmemAccessDesc */
  struct cuda_memory_location location;
  int flags;
};

struct cuda_allocation_properties { /* CUmemAllocationProp */
  int type, requestedHandleTypes;
  struct cuda_memory_location location;
  void *win32HandleMetaData;
  struct {
    unsigned char compressionType, gpuDirectRDMACapable;
    unsigned short usage;
    unsigned char reserved[4];
  } allocFlags;
};

struct cuda_pool_properties { /* cudaMemPoolProps, CUmemPoolProps; 12.1 has all after the pointer reserved */
  int allocType, handleTypes;
  struct cuda_memory_location location;
  void *win32SecurityAttributes;
  size_t maxSize;
  unsigned short usage;
  unsigned char reserved[54];
};

struct cuda_ipc_handle { /* cudaIpcMemHandle_t, cudaIpcEventHandle_t: passed by value */
  char bytes[64];
};

struct cuda_copy_3d { /* cudaMemcpy3DParms */
  void *srcArray;
  size_t srcX, srcY, srcZ;
  struct { void *ptr; size_t pitch, xsize, ysize; } src;
  void *dstArray;
  size_t dstX, dstY, dstZ;
  struct { void *ptr; size_t pitch, xsize, ysize; } dst;
  size_t width, height, depth;
  int kind;
};

struct cuda_copy_2d { /* CUDA_MEMCPY2D_v2; memory types: 1 host, 2 device, 3 array, 4 unified */
  size_t srcXInBytes, srcY;
  int srcMemoryType;
  const void *srcHost;
  void *srcDevice, *srcArray;
  size_t srcPitch, dstXInBytes, dstY;
  int dstMemoryType;
  void *dstHost, *dstDevice, *dstArray;
  size_t dstPitch, WidthInBytes, Height;
};

struct cuda_host_node { /* cudaHostNodeParams */
  void (*fn)(void *);
  void *userData;
};

struct cuda_memset_node { /* cudaMemsetParams */
  void *dst;
  size_t pitch;
  unsigned int value, elementSize;
  size_t width, height;
};

struct cuda_graph_instantiation { /* cudaGraphInstantiateParams */
  unsigned long long flags;
  void *uploadStream, *errNode_out;
  int result_out;
};
#endif
