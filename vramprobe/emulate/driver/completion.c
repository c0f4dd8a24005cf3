/* When work is done, as the host learns of it.
 *
 * True of it: nothing is computed, so how long work takes is a choice (machine.txt's key late_completion). 0, or
 * CUDA_LAUNCH_BLOCKING=1, is a card that is done at once: every stream and event is ready when it is asked for. 1 is a
 * card that always has work before it, from the moment when its process trains (emu_control_trains; before, while a
 * model is loaded, the card waits for the host): work is done once the host waits for it, or for any that was submitted
 * after it, on whichever stream, and not before; so an allocator keeps what other streams still use. A host that asks
 * for one moment again and again, launching nothing between, waits for it as well. Left out: streams that overtake each
 * other, and a host that a card that trains outruns. */
#include "emulator.h" /* first: it asks for GNU's interfaces */

enum { LAST_POLL = 256 }; /* of a host that does nothing but ask: a number, not a time, which would be this machine's */

static bool trains;
static uint64_t submitted, done; /* moments: an event's is the number of events that were recorded before it, and 1 */

uint64_t moment_next(void) { return __atomic_add_fetch(&submitted, 1, __ATOMIC_RELAXED); }
uint64_t moment_now(void) { return __atomic_load_n(&submitted, __ATOMIC_RELAXED); }
void moment_awaited(uint64_t moment) {
  uint64_t known = __atomic_load_n(&done, __ATOMIC_RELAXED);
  while (known < moment && !__atomic_compare_exchange_n(&done, &known, moment, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}
void all_work_awaited(void) { moment_awaited(moment_now()); }

API void emu_control_trains(void) {
  all_work_awaited();
  trains = true;
}

/* Whether this thread does nothing but ask. */
static bool host_waits(uint64_t moment) {
  static __thread struct {
    uint64_t moment, launches;
    int num_polls;
  } last;
  if (last.moment != moment || last.launches != launches()) last.num_polls = 0;
  last.moment = moment, last.launches = launches();
  return ++last.num_polls >= LAST_POLL;
}
bool moment_was_awaited(uint64_t moment) { return __atomic_load_n(&done, __ATOMIC_RELAXED) >= moment; }
bool moment_is_done(uint64_t moment, bool only_asks) {
  if (!machine.late_completion || !trains || moment_was_awaited(moment)) return true;
  if (!host_waits(moment)) return false;
  if (!only_asks) moment_awaited(moment); /* else a thread beside the program has waited, as torch's watchdog */
  return true;
}
