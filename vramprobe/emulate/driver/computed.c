/* Which bytes of device memory are computed: the answer to "did anybody write what the host is about to read?".
 *
 * True of it, byte by byte: fresh memory is not computed; copies from the host and memset make it so; a copy on the
 * device carries it along; freeing takes it away; a launch changes nothing (the values layer says what it computed).
 * A chunk of 64 KiB is none, all or mixed; only a mixed chunk has bits, so marking gigabytes is a memset of one byte
 * a chunk. Bits and states live in NORESERVE memory: what is never mixed costs nothing. */
#include "emulator.h" /* first: it asks for GNU's interfaces */

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { NONE = 0, ALL = 1, MIXED = 2 };
static const size_t CHUNK_BYTES = 64 * KIB;
static uint8_t *states[MAX_DEVICES];  /* a byte a chunk */
static uint64_t *bits[MAX_DEVICES];   /* a bit a byte, valid where the chunk is mixed */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void *reserve(size_t bytes) {
  void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) {
    fprintf(stderr, "vramprobe: no %zu bytes of address space for the map of computed bytes (ulimit -v?)\n", bytes);
    abort();
  }
  madvise(p, bytes, MADV_NOHUGEPAGE);
  madvise(p, bytes, MADV_DONTDUMP);
  return p;
}

void computed_init(struct device *d) {
  size_t span = d->end - d->start;
  states[d->ordinal] = reserve(span / CHUNK_BYTES + 1);
  bits[d->ordinal] = reserve(span / 8 + 8);
  pthread_mutex_init(&lock, NULL);
}

static void set_bits(uint64_t *words, size_t from, size_t n, bool on) {
  while (n) {
    size_t word = from / 64, bit = from % 64, take = 64 - bit < n ? 64 - bit : n;
    uint64_t mask = (take == 64 ? ~0ull : ((1ull << take) - 1)) << bit;
    words[word] = on ? words[word] | mask : words[word] & ~mask;
    from += take, n -= take;
  }
}

static size_t run_of_bits(const uint64_t *words, size_t from, size_t n, bool on) { /* how many from there are `on` */
  size_t done = 0;
  while (done < n) {
    size_t bit = (from + done) % 64, take = 64 - bit < n - done ? 64 - bit : n - done;
    uint64_t word = words[(from + done) / 64] >> bit;
    if (!on) word = ~word;
    size_t same = word == ~0ull ? 64 : (size_t)__builtin_ctzll(~word);
    if (same < take) return done + same;
    done += take;
  }
  return n;
}

static void set_piece(int i, size_t from, size_t n, bool computed) { /* a part of one chunk */
  size_t chunk = from / CHUNK_BYTES;
  uint8_t *state = &states[i][chunk];
  if (*state == (computed ? ALL : NONE)) return;
  if (*state != MIXED) {
    memset(bits[i] + chunk * CHUNK_BYTES / 64, *state == ALL ? 0xff : 0, CHUNK_BYTES / 8);
    *state = MIXED;
  }
  set_bits(bits[i], from, n, computed);
}

static void set_range(int i, size_t from, size_t n, bool computed) {
  size_t head = from % CHUNK_BYTES ? CHUNK_BYTES - from % CHUNK_BYTES : 0;
  if (head > n) head = n;
  if (head) set_piece(i, from, head, computed);
  from += head, n -= head;
  memset(states[i] + from / CHUNK_BYTES, computed ? ALL : NONE, n / CHUNK_BYTES);
  if (n % CHUNK_BYTES) set_piece(i, from + n / CHUNK_BYTES * CHUNK_BYTES, n % CHUNK_BYTES, computed);
}

static size_t clip(const struct device *d, const void *pointer, size_t bytes) { /* to the device's address space */
  size_t room = d->end - (uintptr_t)pointer;
  return bytes < room ? bytes : room;
}

void computed_set(const void *pointer, size_t bytes, bool computed) {
  const struct device *d = memory_device(pointer);
  if (!d || !bytes) return;
  pthread_mutex_lock(&lock);
  set_range(d->ordinal, (uintptr_t)pointer - d->start, clip(d, pointer, bytes), computed);
  pthread_mutex_unlock(&lock);
}

static size_t run_of(int i, size_t from, size_t n, bool *computed) {
  size_t done = 0;
  while (done < n) {
    size_t at = from + done, take = CHUNK_BYTES - at % CHUNK_BYTES;
    if (take > n - done) take = n - done;
    uint8_t state = states[i][at / CHUNK_BYTES];
    if (!done) *computed = state == MIXED ? bits[i][at / 64] >> at % 64 & 1 : state == ALL;
    if (state != MIXED) {
      if ((state == ALL) != *computed) return done;
      done += take;
      continue;
    }
    size_t same = run_of_bits(bits[i], at, take, *computed);
    done += same;
    if (same < take) return done;
  }
  return done;
}

size_t computed_run(const void *pointer, size_t bytes, bool *computed) {
  const struct device *d = memory_device(pointer);
  *computed = true; /* the host's own memory always is */
  if (!d || !bytes) return bytes;
  pthread_mutex_lock(&lock);
  size_t n = run_of(d->ordinal, (uintptr_t)pointer - d->start, clip(d, pointer, bytes), computed);
  pthread_mutex_unlock(&lock);
  return n;
}

bool computed_all(const void *pointer, size_t bytes) {
  bool computed;
  return !bytes || (computed_run(pointer, bytes, &computed) >= bytes && computed);
}

bool computed_any(const void *pointer, size_t bytes) {
  bool computed;
  return bytes && (computed_run(pointer, bytes, &computed) < bytes || computed);
}

void computed_copy(const void *to, const void *from, size_t bytes) {
  const struct device *t = memory_device(to), *f = memory_device(from);
  if (!t) return;
  if (!f) {
    computed_set(to, bytes, true);
    return;
  }
  size_t target = (uintptr_t)to - t->start, source = (uintptr_t)from - f->start;
  bool overlap = t == f && target < source + bytes && source < target + bytes;
  uint8_t *copy = NULL; /* an overlapping copy needs the runs as they were */
  if (overlap) copy = malloc(bytes);
  pthread_mutex_lock(&lock);
  if (overlap && copy) {
    bool computed;
    for (size_t done = 0, n; done < bytes; done += n) {
      n = run_of(f->ordinal, source + done, bytes - done, &computed);
      memset(copy + done, computed, n);
    }
    for (size_t done = 0, n; done < bytes; done += n) {
      for (n = 1; done + n < bytes && copy[done + n] == copy[done];) n++;
      set_range(t->ordinal, target + done, n, copy[done]);
    }
  } else {
    bool computed;
    for (size_t done = 0, n; done < bytes; done += n) {
      n = run_of(f->ordinal, source + done, bytes - done, &computed);
      set_range(t->ordinal, target + done, n, computed);
    }
  }
  pthread_mutex_unlock(&lock);
  free(copy);
}
