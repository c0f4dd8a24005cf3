/* A program's threads at its end. Autograd's own threads free gradients after backward() has returned; where the
 * program ends within that moment, they wait for Python's lock when Python ends them, which C++ answers by an abort.
 * With values on nearly every gradient has a Python object, so they are waited for: emu_control_settle is called at
 * exit, without Python's lock. */
#include "emulator.h"
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* A file of the thread's folder in /proc/self/task as text; "" where it has ended. */
static const char *read_of(const char *thread, const char *name, char line[512]) {
  char path[300];
  snprintf(path, sizeof path, "/proc/self/task/%s/%s", thread, name);
  int file = open(path, O_RDONLY | O_CLOEXEC);
  ssize_t length = file < 0 ? 0 : read(file, line, 511);
  if (file >= 0) close(file);
  line[length > 0 ? length : 0] = 0;
  return line;
}

/* Whether the thread waits for something: its state, the letter behind its name in parentheses. */
static bool sleeps(const char *thread) {
  char line[512];
  const char *name_end = strrchr(read_of(thread, "stat", line), ')');
  return !name_end || name_end[1] != ' ' || name_end[2] == 'S';
}

static bool all_others_sleep(void) {
  DIR *threads = opendir("/proc/self/task");
  bool all = true;
  for (struct dirent *one; threads && all && (one = readdir(threads));)
    if (one->d_name[0] != '.' && atoi(one->d_name) != gettid()) all = sleeps(one->d_name);
  if (threads) closedir(threads);
  return all;
}

enum threads_state threads_named(const char *name) {
  DIR *threads = opendir("/proc/self/task");
  enum threads_state found = THREADS_NONE;
  for (struct dirent *one; threads && found != THREADS_RUN && (one = readdir(threads));) {
    char line[512];
    if (one->d_name[0] == '.' || strncmp(read_of(one->d_name, "comm", line), name, strlen(name))) continue;
    found = sleeps(one->d_name) ? THREADS_SLEEP : THREADS_RUN;
  }
  if (threads) closedir(threads);
  return found;
}

/* Returns once every other thread was asleep twice, a millisecond apart, or after so many milliseconds; 0 then. */
API int emu_control_settle(int max_milliseconds) {
  all_work_awaited(), watchdog_told_everything();
  const struct timespec millisecond = {.tv_nsec = 1000000};
  int num_times = 0;
  for (int i = 0; i <= max_milliseconds && num_times < 2; i++) {
    if (i) nanosleep(&millisecond, NULL);
    num_times = all_others_sleep() ? num_times + 1 : 0;
  }
  return num_times == 2;
}
