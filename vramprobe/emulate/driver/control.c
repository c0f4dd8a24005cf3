/* The control interface: what the values layer and the tests ask the driver about itself, by ctypes. */
#include "emulator.h" /* first: it asks for GNU's interfaces */

static bool known(int device) { return !driver_enter() && device >= 0 && device < num_devices; }

API void emu_control_mark_computed(const void *pointer, size_t num_bytes) { computed_set(pointer, num_bytes, true); }
API void emu_control_mark_uncomputed(const void *pointer, size_t num_bytes) { computed_set(pointer, num_bytes, false); }
API int emu_control_is_computed(const void *pointer, size_t num_bytes) { return computed_all(pointer, num_bytes); }
API int emu_control_any_computed(const void *pointer, size_t num_bytes) { return computed_any(pointer, num_bytes); }

/* As above for `count` pieces of num_bytes, stride_bytes apart: a tensor that is not contiguous. */
API int emu_control_is_computed_strided(const void *pointer, size_t num_bytes, size_t stride_bytes, size_t count) {
  for (size_t k = 0; k < count; k++)
    if (!computed_all((const char *)pointer + k * stride_bytes, num_bytes)) return 0;
  return 1;
}
API void emu_control_copy_computed(const void *to, const void *from, size_t num_bytes) {
  computed_copy(to, from, num_bytes);
}
API void emu_control_set_fill(int kind, uint64_t seed) {
  if (kind < FILL_ZEROS || kind > FILL_KEEP) return;
  machine.fill = (enum fill)kind;
  machine.fill_seed = seed;
}
/* Writes what uncomputed bytes at this address read as; they stay uncomputed. */
API void emu_control_fill(void *pointer, size_t num_bytes) { fill_bytes(pointer, pointer, num_bytes); }
API void emu_control_set_copy_max_bytes(uint64_t num_bytes) { machine.copy_max_bytes = num_bytes; }
API uint64_t emu_control_launches(void) { return launches(); }
API uint64_t emu_control_graph_bytes(void) { return graphs_most_bytes(); }
API int emu_control_is_device_pointer(const void *pointer) { return memory_device(pointer) != NULL; }
API uint64_t emu_control_device_used_bytes(int device) {
  return known(device) ? shared_used_bytes(devices[device].index) : 0;
}
API uint64_t emu_control_device_peak_bytes(int device) {
  return known(device) ? shared_peak_bytes(devices[device].index) : 0;
}
API uint64_t emu_control_take_device_peak_bytes(int device) {
  return known(device) ? shared_take_peak_bytes(devices[device].index) : 0;
}
API uint64_t emu_control_process_used_bytes(int device) {
  return known(device) ? shared_process_used_bytes(devices[device].index) : 0;
}
API uint64_t emu_control_process_peak_bytes(int device) {
  return known(device) ? shared_process_peak_bytes(devices[device].index) : 0;
}
API void emu_control_report(const char *kind, const char *name, const char *detail) { report_event(kind, name, detail); }
API int emu_control_version(void) { return 1; }
