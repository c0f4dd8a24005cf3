/* When work is done, as the host learns of it.
 *
 * Nothing is computed, so the clock of a card is what its process has submitted. Once that process trains
 * (emu_control_trains; before, while a model is loaded, the card waits for the host), the host runs ahead of the card:
 * work is done when the host has waited for it, or for any that was submitted after it, on whichever stream, or when
 * LAUNCH_QUEUE launches have followed, because a real launch waits where so many are queued. No time of this machine is
 * in it, so what an allocator keeps for other streams is the same on a fast, a slow and a loaded one. A host that asks
 * for one moment again and again, launching nothing between, waits for it as well. CUDA_LAUNCH_BLOCKING=1 is a card that
 * is done at once. Left out: streams that overtake each other, and a host that a card that trains outruns (small steps):
 * there a real card is done earlier. */
#include "emulator.h" /* first: it asks for GNU's interfaces */

enum {
  LAST_POLL = 256, /* of a host that does nothing but ask: a number, not a time, which would be this machine's */
  LAST_SPIN = 65536, /* of one that asks for several in turn: torch's watchdog as its group ends, which never sleeps */
  LAUNCH_QUEUE = 1024,
};

static bool trains;
static uint64_t submitted, done; /* numbers of moments: an event's is how many were recorded before it, and 1 */

struct moment moment_next(void) {
  return (struct moment){__atomic_add_fetch(&submitted, 1, __ATOMIC_RELAXED), launches()};
}
struct moment moment_now(void) { return (struct moment){__atomic_load_n(&submitted, __ATOMIC_RELAXED), launches()}; }
void moment_awaited(struct moment moment) {
  uint64_t known = __atomic_load_n(&done, __ATOMIC_RELAXED);
  while (known < moment.number &&
         !__atomic_compare_exchange_n(&done, &known, moment.number, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}
void all_work_awaited(void) { moment_awaited(moment_now()); }

API void emu_control_trains(void) {
  all_work_awaited();
  trains = true;
}

/* Whether this thread does nothing but ask. */
static bool host_waits(struct moment moment) {
  static __thread struct {
    uint64_t moment, launches;
    int num_polls, num_of_any;
  } last;
  if (last.launches != launches()) last.num_polls = last.num_of_any = 0;
  if (last.moment != moment.number) last.num_polls = 0;
  last.moment = moment.number, last.launches = launches();
  last.num_polls++, last.num_of_any++;
  return last.num_polls >= LAST_POLL || last.num_of_any >= LAST_SPIN;
}
bool moment_is_over(struct moment moment) {
  return __atomic_load_n(&done, __ATOMIC_RELAXED) >= moment.number || launches() - moment.launches >= LAUNCH_QUEUE;
}
bool moment_is_done(struct moment moment, bool only_asks) {
  if (machine.blocking || !trains || !moment.number || moment_is_over(moment)) return true;
  if (!host_waits(moment)) return false;
  if (!only_asks) moment_awaited(moment); /* else a thread beside the program has waited, as torch's watchdog */
  return true;
}
