/* The collectives that torch's watchdog thread ends (ProcessGroupNCCL::Watchdog::runLoop).
 *
 * A collective beside the computation (async_op) keeps its tensors until its work is waited for; a future's wait() is
 * not that. Such a work ends as the watchdog, which looks every 100 ms, finds its event done; its tensors are given back
 * at the process group's next collective (workEnqueue). How often a program calls before the watchdog has looked is the
 * pace of this machine, so the next collective decides: there the watchdog is told of what is over (completion.c), and the
 * call waits until it has looked.
 * True of it: a step that is longer than 100 ms. Left out: shorter ones, which keep what 100 ms of them call. */
#include "emulator.h" /* first: it asks for GNU's interfaces */

#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

enum { LAST_POLL = 4096, SILENCE_MILLISECONDS = 20000 };
#define NAME "pt_nccl_watchdg"

struct watched { /* an event that a work ends with */
  struct watched **slot, *next;
  struct moment moment;
  bool told;
  int num_polls;
};
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct watched *all;
static bool silent; /* somebody else's collectives, beside a watchdog */

static void end(struct watched *w) {
  struct watched **at = &all;
  while (*at != w) at = &(*at)->next;
  *at = w->next;
  *w->slot = NULL;
  free(w);
}
void watched_end(struct watched **slot) {
  pthread_mutex_lock(&lock);
  if (*slot) end(*slot);
  pthread_mutex_unlock(&lock);
}
void watched_begin(struct watched **slot, struct moment moment) {
  struct watched *w = calloc(1, sizeof *w);
  if (!w) abort();
  pthread_mutex_lock(&lock);
  *w = (struct watched){.slot = slot, .next = all, .moment = moment};
  *slot = all = w;
  pthread_mutex_unlock(&lock);
}

/* Whether the event is watched; `done`: what the watchdog is told. One that asks without end waits for the work itself:
 * its process group is being shut down. */
bool watched_asked(struct watched **slot, bool *done) {
  pthread_mutex_lock(&lock);
  struct watched *w = *slot;
  bool watched = w;
  *done = w && (w->told || ++w->num_polls >= LAST_POLL);
  if (*done) end(w);
  pthread_mutex_unlock(&lock);
  return watched;
}

static int tell(bool everything) {
  int num_told = 0;
  pthread_mutex_lock(&lock);
  for (struct watched *w = all; w; w = w->next) {
    w->told = w->told || everything || moment_is_over(w->moment);
    num_told += w->told;
  }
  pthread_mutex_unlock(&lock);
  return num_told;
}
void watchdog_told_everything(void) { tell(true); }

static void forget(void) {
  pthread_mutex_lock(&lock);
  while (all) end(all);
  pthread_mutex_unlock(&lock);
}
void collective_begins(void) {
  if (!__atomic_load_n(&all, __ATOMIC_RELAXED) || !tell(false)) return;
  double since = now_milliseconds();
  for (int num_times = 0; num_times < 2;) {
    silent = silent || now_milliseconds() - since > SILENCE_MILLISECONDS;
    enum threads_state state = threads_named(NAME);
    if (silent || state == THREADS_NONE) return forget();
    num_times = state == THREADS_SLEEP && !tell(false) ? num_times + 1 : 0;
    usleep(500);
  }
}
bool collectives_are_watched(void) { return !silent; }
