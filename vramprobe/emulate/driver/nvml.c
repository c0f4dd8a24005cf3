/* NVML: the whole machine as seen from outside CUDA, by every process, without a context and without charging anything.
 *
 * True of it: devices are in the machine's order whatever CUDA_VISIBLE_DEVICES says; memory in use and the processes
 * that hold it come from the shared state, the dead reaped; version 2 of the memory query separates what the driver
 * reserves. Left out: what no emulated card has (temperature, power, utilisation, clocks as they vary) is answered as
 * idle or as not supported; MIG and NVLink are not supported. */
#include "emulator.h" /* first: it asks for GNU's interfaces */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS, UNINITIALIZED, INVALID_ARGUMENT, NO_SUPPORT, NO_PERMISSION, NOTHING_FOUND = 6, INSUFFICIENT_SIZE = 7,
       NO_DRIVER = 9 };
static bool initialized, loaded;

static const struct card *checked(const void *device) {
  const struct card *c = device;
  return initialized && c >= machine.card && c < machine.card + machine.num_devices ? c : NULL;
}
static int index_of(const struct card *c) { return (int)(c - machine.card); }
#define CARD_OR_RETURN(device)             \
  if (!initialized) return UNINITIALIZED;  \
  const struct card *c = checked(device);  \
  if (!c) return INVALID_ARGUMENT

static int start(void) {
  if (!loaded && !driver_is_entered()) {
    process_lock();
    loaded = machine.num_devices > 0 || machine_load();
    process_unlock();
  }
  initialized = loaded || driver_is_entered();
  return initialized ? SUCCESS : NO_DRIVER;
}
API int emu_nvmlInit_v2(void) { return start(); }
API int emu_nvmlInit(void) { return start(); }
API int emu_nvmlInitWithFlags(unsigned flags) { return UNUSED(flags), start(); }
API int emu_nvmlShutdown(void) { return initialized ? SUCCESS : UNINITIALIZED; } /* others here may still use it */
API const char *emu_nvmlErrorString(int code) {
  switch (code) {
    case SUCCESS: return "The operation was successful";
    case UNINITIALIZED: return "NVML was not first initialized with nvmlInit()";
    case INVALID_ARGUMENT: return "A supplied argument is invalid";
    case NO_SUPPORT: return "The requested operation is not available on target device";
    case NO_PERMISSION: return "The current user does not have permission for operation";
    case NOTHING_FOUND: return "A query to find an object was unsuccessful";
    case INSUFFICIENT_SIZE: return "An input argument is not large enough";
    case NO_DRIVER: return "NVIDIA driver is not loaded";
    default: return "An internal driver error occurred";
  }
}

/* ---- the system ---------------------------------------------------------------------------------------------------- */
API int emu_nvmlSystemGetDriverVersion(char *text, unsigned room) {
  if (!initialized) return UNINITIALIZED;
  /* the first driver of each CUDA release */
  int v = machine.driver_version / 10 * 10;
  const char *driver = v >= 13000 ? "580.65.06" : v >= 12080 ? "570.86.10" : v >= 12040 ? "550.54.14" : "530.30.02";
  if (room < strlen(driver) + 1) return INSUFFICIENT_SIZE;
  snprintf(text, room, "%s", driver);
  return SUCCESS;
}
API int emu_nvmlSystemGetNVMLVersion(char *text, unsigned room) {
  if (!initialized) return UNINITIALIZED;
  snprintf(text, room, "%d.emulated", machine.driver_version / 1000);
  return SUCCESS;
}
API int emu_nvmlSystemGetCudaDriverVersion_v2(int *version) {
  if (!initialized) return UNINITIALIZED;
  *version = machine.driver_version;
  return SUCCESS;
}
API int emu_nvmlSystemGetCudaDriverVersion(int *version) { return emu_nvmlSystemGetCudaDriverVersion_v2(version); }
API int emu_nvmlSystemGetProcessName(unsigned pid, char *text, unsigned room) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%u/exe", pid);
  ssize_t n = readlink(path, text, room ? room - 1 : 0);
  if (n < 0) return NOTHING_FOUND;
  text[n] = 0;
  return SUCCESS;
}

/* ---- devices --------------------------------------------------------------------------------------------------------- */
API int emu_nvmlDeviceGetCount_v2(unsigned *count) {
  if (!initialized) return UNINITIALIZED;
  *count = (unsigned)machine.num_devices;
  return SUCCESS;
}
API int emu_nvmlDeviceGetCount(unsigned *count) { return emu_nvmlDeviceGetCount_v2(count); }
API int emu_nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
  if (!initialized) return UNINITIALIZED;
  if (index >= (unsigned)machine.num_devices) return INVALID_ARGUMENT;
  *device = &machine.card[index];
  return SUCCESS;
}
API int emu_nvmlDeviceGetHandleByIndex(unsigned index, void **device) {
  return emu_nvmlDeviceGetHandleByIndex_v2(index, device);
}
API int emu_nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
  if (!initialized) return UNINITIALIZED;
  for (int i = 0; i < machine.num_devices; i++)
    if (!strcasecmp(machine.card[i].uuid_text, uuid)) {
      *device = &machine.card[i];
      return SUCCESS;
    }
  return NOTHING_FOUND;
}
API int emu_nvmlDeviceGetHandleByPciBusId_v2(const char *text, void **device) {
  if (!initialized) return UNINITIALIZED;
  unsigned domain, bus, number;
  if (sscanf(text, "%x:%x:%x", &domain, &bus, &number) != 3) return INVALID_ARGUMENT;
  for (int i = 0; i < machine.num_devices; i++) {
    struct card *c = &machine.card[i];
    if (c->pci_domain != domain || c->pci_bus != bus || c->pci_device != number) continue;
    *device = c;
    return SUCCESS;
  }
  return NOTHING_FOUND;
}
API int emu_nvmlDeviceGetHandleByPciBusId(const char *text, void **device) {
  return emu_nvmlDeviceGetHandleByPciBusId_v2(text, device);
}
API int emu_nvmlDeviceGetIndex(void *device, unsigned *index) {
  CARD_OR_RETURN(device);
  *index = (unsigned)index_of(c);
  return SUCCESS;
}
API int emu_nvmlDeviceGetMinorNumber(void *device, unsigned *number) { return emu_nvmlDeviceGetIndex(device, number); }
API int emu_nvmlDeviceGetName(void *device, char *text, unsigned room) {
  CARD_OR_RETURN(device);
  if (room < strlen(c->name) + 1) return INSUFFICIENT_SIZE;
  snprintf(text, room, "%s", c->name);
  return SUCCESS;
}
API int emu_nvmlDeviceGetUUID(void *device, char *text, unsigned room) {
  CARD_OR_RETURN(device);
  if (room < strlen(c->uuid_text) + 1) return INSUFFICIENT_SIZE;
  snprintf(text, room, "%s", c->uuid_text);
  return SUCCESS;
}
struct pci_info { /* nvmlPciInfo_t of version 3 */
  char bus_id_legacy[16];
  unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
  char bus_id[32];
};
API int emu_nvmlDeviceGetPciInfo_v3(void *device, struct pci_info *info) {
  CARD_OR_RETURN(device);
  memset(info, 0, sizeof *info);
  info->domain = c->pci_domain, info->bus = c->pci_bus, info->device = c->pci_device;
  snprintf(info->bus_id_legacy, sizeof info->bus_id_legacy, "%04X:%02X:%02X.0", c->pci_domain & 0xffff, c->pci_bus & 0xff,
           c->pci_device & 0xff);
  snprintf(info->bus_id, sizeof info->bus_id, "%08X:%02X:%02X.0", c->pci_domain, c->pci_bus & 0xff, c->pci_device & 0xff);
  return SUCCESS;
}
API int emu_nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
  CARD_OR_RETURN(device);
  *major = c->capability_major;
  *minor = c->capability_minor;
  return SUCCESS;
}

/* ---- memory and processes ------------------------------------------------------------------------------------------------ */
API int emu_nvmlDeviceGetMemoryInfo(void *device, uint64_t *total_free_used) {
  CARD_OR_RETURN(device);
  if (c->integrated) return NO_SUPPORT; /* as GB10: its memory is the machine's */
  uint64_t used_bytes = shared_used_bytes(index_of(c)) + (c->nvml_total_bytes - c->total_bytes);
  total_free_used[0] = c->nvml_total_bytes;
  total_free_used[1] = c->nvml_total_bytes - used_bytes;
  total_free_used[2] = used_bytes;
  return SUCCESS;
}
struct memory_v2 {
  unsigned version;
  uint64_t total_bytes, reserved_bytes, free_bytes, used_bytes;
};
API int emu_nvmlDeviceGetMemoryInfo_v2(void *device, struct memory_v2 *memory) {
  CARD_OR_RETURN(device);
  if (c->integrated) return NO_SUPPORT;
  if (memory->version != (sizeof *memory | 2u << 24)) return 25; /* argument version mismatch */
  memory->used_bytes = shared_used_bytes(index_of(c));
  memory->total_bytes = c->nvml_total_bytes;
  memory->reserved_bytes = c->nvml_total_bytes - c->total_bytes;
  memory->free_bytes = c->total_bytes - memory->used_bytes;
  return SUCCESS;
}
API int emu_nvmlDeviceGetBAR1MemoryInfo(void *device, uint64_t *total_free_used) {
  CARD_OR_RETURN(device);
  total_free_used[0] = total_free_used[1] = 128 * GIB;
  total_free_used[2] = 0;
  return SUCCESS;
}
struct process_v3 { /* nvmlProcessInfo_t from version 2 on; version 1 ends after the bytes */
  unsigned pid;
  uint64_t used_bytes;
  unsigned gpu_instance, compute_instance;
};
static int processes(void *device, unsigned *count, void *out, size_t stride) {
  CARD_OR_RETURN(device);
  struct shared_usage usages[512];
  int n = shared_usages(index_of(c), usages, 512);
  unsigned room = *count;
  *count = (unsigned)n;
  if ((unsigned)n > room || (n && !out)) return INSUFFICIENT_SIZE;
  for (int k = 0; k < n; k++) {
    struct process_v3 p = {usages[k].pid, usages[k].used_bytes, 0xFFFFFFFFu, 0xFFFFFFFFu};
    memcpy((char *)out + (size_t)k * stride, &p, stride);
  }
  return SUCCESS;
}
API int emu_nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *out) {
  return processes(device, count, out, 16);
}
API int emu_nvmlDeviceGetComputeRunningProcesses_v2(void *device, unsigned *count, void *out) {
  return processes(device, count, out, sizeof(struct process_v3));
}
API int emu_nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, void *out) {
  return processes(device, count, out, sizeof(struct process_v3));
}
static int no_processes(void *device, unsigned *count) {
  CARD_OR_RETURN(device);
  *count = 0;
  return SUCCESS;
}
API int emu_nvmlDeviceGetGraphicsRunningProcesses(void *device, unsigned *count, void *out) {
  return UNUSED(out), no_processes(device, count);
}
API int emu_nvmlDeviceGetGraphicsRunningProcesses_v2(void *device, unsigned *count, void *out) {
  return UNUSED(out), no_processes(device, count);
}
API int emu_nvmlDeviceGetGraphicsRunningProcesses_v3(void *device, unsigned *count, void *out) {
  return UNUSED(out), no_processes(device, count);
}

/* ---- state: an idle card ----------------------------------------------------------------------------------------------------- */
#define ANSWER(name, value_type, answer)                            \
  API int emu_##name(void *device, value_type *value) {             \
    CARD_OR_RETURN(device);                                         \
    *value = (value_type)(answer);                                  \
    return SUCCESS;                                                 \
  }
ANSWER(nvmlDeviceGetPersistenceMode, unsigned, 1)
ANSWER(nvmlDeviceGetComputeMode, unsigned, 0)
ANSWER(nvmlDeviceGetDisplayMode, unsigned, 0)
ANSWER(nvmlDeviceGetDisplayActive, unsigned, 0)
ANSWER(nvmlDeviceGetPowerUsage, unsigned, 0)
ANSWER(nvmlDeviceGetPowerManagementLimit, unsigned, c->power_limit_milliwatts)
ANSWER(nvmlDeviceGetEnforcedPowerLimit, unsigned, c->power_limit_milliwatts)
ANSWER(nvmlDeviceGetPerformanceState, unsigned, 0)
ANSWER(nvmlDeviceGetNumGpuCores, unsigned, c->sm_count * (c->capability_major == 8 && c->capability_minor == 0 ? 64 : 128))
ANSWER(nvmlDeviceGetMemoryBusWidth, unsigned, c->memory_bus_bits)
ANSWER(nvmlDeviceGetMaxMigDeviceCount, unsigned, 0)
ANSWER(nvmlDeviceIsMigDeviceHandle, unsigned, 0)
ANSWER(nvmlDeviceGetArchitecture, unsigned,
       c->capability_major >= 10 ? 10 : c->capability_major == 9 ? 9 : c->capability_major == 8 ? (c->capability_minor == 9 ? 8 : 7)
                                                                                         : c->capability_minor == 5 ? 6 : 5)
ANSWER(nvmlDeviceGetBrand, unsigned, 0)
API int emu_nvmlDeviceGetUtilizationRates(void *device, unsigned *gpu_memory) {
  CARD_OR_RETURN(device);
  gpu_memory[0] = gpu_memory[1] = 0;
  return SUCCESS;
}
API int emu_nvmlDeviceGetTemperature(void *device, unsigned sensor, unsigned *celsius) {
  CARD_OR_RETURN(device);
  UNUSED(sensor);
  *celsius = 30;
  return SUCCESS;
}
static int clock_of(void *device, unsigned type, unsigned *mhz) { /* 0 graphics, 1 SM, 2 memory, 3 video */
  CARD_OR_RETURN(device);
  *mhz = (unsigned)((type == 2 ? c->memory_clock_khz : c->clock_khz) / 1000);
  return SUCCESS;
}
API int emu_nvmlDeviceGetClockInfo(void *device, unsigned type, unsigned *mhz) { return clock_of(device, type, mhz); }
API int emu_nvmlDeviceGetMaxClockInfo(void *device, unsigned type, unsigned *mhz) { return clock_of(device, type, mhz); }
API int emu_nvmlDeviceGetEccMode(void *device, unsigned *current, unsigned *pending) {
  CARD_OR_RETURN(device);
  *current = *pending = (unsigned)c->ecc;
  return SUCCESS;
}
API int emu_nvmlDeviceGetP2PStatus(void *a, void *b, int which, int *state) {
  UNUSED(which);
  if (!checked(a) || !checked(b)) return INVALID_ARGUMENT;
  *state = 0;
  return SUCCESS;
}
API int emu_nvmlDeviceGetTopologyCommonAncestor(void *a, void *b, int *level) {
  if (!checked(a) || !checked(b)) return INVALID_ARGUMENT;
  *level = a == b ? 0 : 50; /* the same node */
  return SUCCESS;
}
API int emu_nvmlDeviceGetCpuAffinity(void *device, unsigned num_words, unsigned long *words) {
  CARD_OR_RETURN(device);
  memset(words, 0xff, num_words * sizeof *words);
  return SUCCESS;
}
/* torch insists on an answer before it lets expandable segments use fabric handles: there is no fabric (state 0). */
API int emu_nvmlDeviceGetGpuFabricInfoV(void *device, unsigned *info) {
  CARD_OR_RETURN(device);
  unsigned bytes = *info & 0xFFFFFF; /* the version word holds the size that the caller knows */
  if (bytes < 4 || bytes > 256) return INVALID_ARGUMENT;
  memset(info + 1, 0, bytes - 4);
  return SUCCESS;
}
API int emu_nvmlDeviceGetGpuFabricInfo(void *device, void *info) {
  CARD_OR_RETURN(device);
  memset(info, 0, 28);
  return SUCCESS;
}
#define REFUSE(name)                            \
  API int emu_##name(void *device) {            \
    CARD_OR_RETURN(device);                     \
    return NO_SUPPORT;                          \
  }
REFUSE(nvmlDeviceGetMigMode)
REFUSE(nvmlDeviceGetNvLinkState)
REFUSE(nvmlDeviceGetNvLinkRemoteDeviceType)
REFUSE(nvmlDeviceGetNvLinkRemotePciInfo_v2)
REFUSE(nvmlDeviceGetNvLinkVersion)
REFUSE(nvmlDeviceGetNvLinkCapability)
REFUSE(nvmlDeviceGetFanSpeed)
REFUSE(nvmlDeviceGetTotalEnergyConsumption)
REFUSE(nvmlDeviceGetMigDeviceHandleByIndex)
REFUSE(nvmlDeviceGetTotalEccErrors)
REFUSE(nvmlDeviceGetSerial)
REFUSE(nvmlDeviceGetFieldValues)
REFUSE(nvmlDeviceGetPcieThroughput)
REFUSE(nvmlDeviceGetCurrPcieLinkGeneration)
REFUSE(nvmlDeviceGetCurrPcieLinkWidth)
REFUSE(nvmlDeviceGetCurrentClocksThrottleReasons)
REFUSE(nvmlDeviceGetCurrentClocksEventReasons)
