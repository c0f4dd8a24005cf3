/* The state that all processes of one machine share: who holds how much of which card.
 *
 * True of it: the file `state` in the machine's folder is mapped by each process; a card's use is the sum of what live
 * processes hold, never more than its total. A process is known by its number and the time it began, so a number
 * that is used again is another process. Who died without a word (kill -9) is reaped by the next that needs room,
 * joins or looks. The lock is robust: where its owner died, the sums are made anew from the processes' own figures.
 * Left out: processes of another PID namespace count as dead; a machine belongs to one container.
 *
 * Layout, read by machine.py: little-endian, offsets as asserted below. */
#include "emulator.h" /* first: it asks for GNU's interfaces */

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MAX_PROCESSES = 512, SLOT_FREE = 0, SLOT_LIVE = 1, SLOT_ENDED = 2 };

struct card_state {
  uint64_t used_bytes, peak_bytes;
};
struct process_state {
  uint32_t pid, slot;
  uint64_t start_ticks; /* field 22 of /proc/PID/stat */
  uint64_t order;       /* of joining, from 1 */
  uint64_t used_bytes[MAX_DEVICES], peak_bytes[MAX_DEVICES];
};
struct state {
  char magic[8];
  uint32_t format, num_devices, max_devices, max_processes;
  uint64_t num_joined;
  char lock[96]; /* a pthread_mutex_t */
  struct card_state card[MAX_DEVICES];
  struct process_state process[MAX_PROCESSES];
};
_Static_assert(sizeof(pthread_mutex_t) <= 96, "the lock has room");
_Static_assert(offsetof(struct state, card) == 128 && offsetof(struct state, process) == 384, "machine.py reads these");
_Static_assert(sizeof(struct process_state) == 280, "machine.py reads these");
static const char MAGIC[8] = {'V', 'P', 'E', 'M', 'U', 'G', 'P', 'U'};

static struct state *state;
static struct process_state *self;
static uint64_t highest_bytes[MAX_DEVICES]; /* of the card, at this process's charges since shared_take_peak_bytes */
static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;

static uint64_t start_ticks(uint32_t pid) { /* 0: there is no such process, or it has ended and waits for its parent */
  char path[64], text[1024];
  snprintf(path, sizeof path, "/proc/%u/stat", pid);
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  ssize_t n = read(fd, text, sizeof text - 1);
  close(fd);
  if (n <= 0) return 0;
  text[n] = 0;
  char *field = strrchr(text, ')'); /* the name before it may hold anything */
  if (!field || field[1] != ' ' || field[2] == 'Z' || field[2] == 'X') return 0;
  for (int k = 2; k < 22 && field; k++) field = strchr(field + 1, ' ');
  return field ? strtoull(field + 1, NULL, 10) : 0;
}

static void sum_up(void) {
  for (int i = 0; i < MAX_DEVICES; i++) {
    uint64_t used_bytes = 0;
    for (int k = 0; k < MAX_PROCESSES; k++)
      if (state->process[k].slot == SLOT_LIVE) used_bytes += state->process[k].used_bytes[i];
    state->card[i].used_bytes = used_bytes;
  }
}

static void lock(void) {
  int e = pthread_mutex_lock((pthread_mutex_t *)(void *)state->lock);
  if (e == EOWNERDEAD) {
    sum_up();
    pthread_mutex_consistent((pthread_mutex_t *)(void *)state->lock);
  }
}
static void unlock(void) { pthread_mutex_unlock((pthread_mutex_t *)(void *)state->lock); }

static void begin(struct state *s) {
  pthread_mutexattr_t a;
  pthread_mutexattr_init(&a);
  pthread_mutexattr_setpshared(&a, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&a, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init((pthread_mutex_t *)(void *)s->lock, &a);
  pthread_mutexattr_destroy(&a);
  s->format = 1;
  s->num_devices = (uint32_t)machine.num_devices;
  s->max_devices = MAX_DEVICES;
  s->max_processes = MAX_PROCESSES;
  __sync_synchronize();
  memcpy(s->magic, MAGIC, sizeof MAGIC);
}

static bool open_state(void) {
  if (state) return true;
  pthread_mutex_lock(&opening);
  if (!state) {
    char path[1200];
    snprintf(path, sizeof path, "%s/state", machine.folder);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    void *map = MAP_FAILED;
    if (fd >= 0 && flock(fd, LOCK_EX) == 0) {
      off_t size = lseek(fd, 0, SEEK_END);
      if ((size >= (off_t)sizeof *state || ftruncate(fd, sizeof *state) == 0))
        map = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
      if (map != MAP_FAILED && memcmp(((struct state *)map)->magic, MAGIC, sizeof MAGIC) != 0) begin(map);
      flock(fd, LOCK_UN);
    }
    if (map == MAP_FAILED) fprintf(stderr, "vramprobe: %s: %s\n", path, strerror(errno));
    else __atomic_store_n(&state, map, __ATOMIC_RELEASE);
    if (fd >= 0) close(fd);
  }
  pthread_mutex_unlock(&opening);
  return state != NULL;
}

static void reap(void) {
  bool changed = false;
  for (int k = 0; k < MAX_PROCESSES; k++) {
    struct process_state *p = &state->process[k];
    if (p->slot != SLOT_LIVE || p == self || start_ticks(p->pid) == p->start_ticks) continue;
    p->slot = SLOT_ENDED; /* its peaks stay readable until the slot is needed */
    memset(p->used_bytes, 0, sizeof p->used_bytes);
    changed = true;
  }
  if (changed) sum_up();
}

static bool join(void) { /* under the lock */
  if (self) return true;
  reap();
  struct process_state *found = NULL;
  for (int k = 0; k < MAX_PROCESSES; k++) {
    struct process_state *p = &state->process[k];
    if (p->slot == SLOT_LIVE) continue;
    if (p->slot == SLOT_FREE) {
      found = p;
      break;
    }
    if (!found || p->order < found->order) found = p;
  }
  if (!found) {
    fprintf(stderr, "vramprobe: more than %d processes use the emulated machine %s\n", MAX_PROCESSES, machine.folder);
    return false;
  }
  memset(found, 0, sizeof *found);
  found->pid = (uint32_t)getpid();
  found->start_ticks = start_ticks(found->pid);
  found->order = ++state->num_joined;
  found->slot = SLOT_LIVE;
  self = found;
  return true;
}

bool shared_charge(int index, uint64_t bytes) {
  if (!open_state()) return false;
  lock();
  bool ok = join();
  if (ok) {
    uint64_t total_bytes = machine.card[index].total_bytes;
    if (state->card[index].used_bytes + bytes > total_bytes) reap();
    ok = bytes <= total_bytes && state->card[index].used_bytes + bytes <= total_bytes;
  }
  if (ok) {
    uint64_t mine = self->used_bytes[index] += bytes, all = state->card[index].used_bytes += bytes;
    if (mine > self->peak_bytes[index]) self->peak_bytes[index] = mine;
    if (all > state->card[index].peak_bytes) state->card[index].peak_bytes = all;
    if (all > highest_bytes[index]) highest_bytes[index] = all;
  }
  unlock();
  return ok;
}

void shared_release(int index, uint64_t bytes) {
  if (!state || !self) return;
  lock();
  if (bytes > self->used_bytes[index]) bytes = self->used_bytes[index];
  self->used_bytes[index] -= bytes;
  state->card[index].used_bytes -= bytes;
  unlock();
}

uint64_t shared_used_bytes(int index) {
  if (!open_state()) return 0;
  lock();
  reap();
  uint64_t bytes = state->card[index].used_bytes;
  unlock();
  return bytes;
}

uint64_t shared_peak_bytes(int index) {
  if (!open_state()) return 0;
  return __atomic_load_n(&state->card[index].peak_bytes, __ATOMIC_RELAXED);
}

uint64_t shared_take_peak_bytes(int index) {
  uint64_t now = shared_used_bytes(index), highest = __atomic_exchange_n(&highest_bytes[index], now, __ATOMIC_RELAXED);
  return highest > now ? highest : now;
}

uint64_t shared_process_used_bytes(int index) { return self ? self->used_bytes[index] : 0; }
uint64_t shared_process_peak_bytes(int index) { return self ? self->peak_bytes[index] : 0; }

int shared_usages(int index, struct shared_usage *usages, int max) {
  if (!open_state()) return 0;
  int n = 0;
  lock();
  reap();
  for (int k = 0; k < MAX_PROCESSES; k++) {
    const struct process_state *p = &state->process[k];
    if (p->slot != SLOT_LIVE || !p->used_bytes[index]) continue;
    if (n < max) usages[n] = (struct shared_usage){p->pid, p->used_bytes[index]};
    n++;
  }
  unlock();
  return n;
}

void shared_after_fork(void) { /* the child holds nothing: what its parent holds stays the parent's */
  self = NULL;
  memset(highest_bytes, 0, sizeof highest_bytes);
  pthread_mutex_init(&opening, NULL);
}
