/* Streams, events, host functions.
 *
 * True of it: work is done as completion.c has it; a stream knows its device,
 * flags and priority; an event that was made with timing measures the host's clock. Waiting for a stream gives idle
 * pool memory back, as a real driver does. While a stream captures, work on it becomes nodes of a graph; waiting for it
 * spoils the capture (900, then 901 at its end). Left out: overlap, ordering across streams. */
#include "emulator.h" /* first: it asks for GNU's interfaces */

#include <stdlib.h>
#include <string.h>

enum { STREAM_MAGIC = 0x57EA3, EVENT_MAGIC = 0xE7E27, CAPTURE_NONE = 0, CAPTURE_ACTIVE = 1, CAPTURE_INVALID = 2 };
enum { MODE_GLOBAL, MODE_THREAD, MODE_RELAXED };

struct capture {
  uint64_t id;
  struct graph *graph;
  const void *origin, *thread;
  int mode, references;
  bool invalid, ended, into_given_graph;
};
struct stream {
  uint32_t magic;
  int ordinal, priority;
  unsigned flags;
  uint64_t id;
  struct moment moment; /* of its newest work */
  struct capture *capture;
};
struct event {
  uint32_t magic;
  int ordinal;
  bool timed, recorded;
  double milliseconds;
  struct moment moment; /* number 0: it was never recorded */
  struct capture *capture;
  struct watched *watched; /* it ends a collective that the watchdog looks at */
};

static uint64_t next_id = 1;
static struct stream legacy = {.magic = STREAM_MAGIC}, per_thread = {.magic = STREAM_MAGIC};
static __thread int capture_mode;
static __thread char thread_mark;
static __thread bool records; /* events; torch's watchdog only asks */
/* How torch calls a collective beside the computation (syncStream): an event of the one stream is recorded, and the
 * other made to wait for it. */
static __thread const void *last_event, *forked, *carries;

static struct stream *checked(void *stream) {
  if ((uintptr_t)stream <= 1) return &legacy;
  if ((uintptr_t)stream == 2) return &per_thread;
  struct stream *s = stream;
  return s->magic == STREAM_MAGIC ? s : NULL;
}
static struct event *checked_event(void *event) {
  struct event *e = event;
  return e && e->magic == EVENT_MAGIC ? e : NULL;
}
static struct capture *active(struct stream *s) {
  if (s && s->capture && s->capture->ended) s->capture = NULL;
  return s ? s->capture : NULL;
}

struct graph *stream_capture(void *stream) {
  struct capture *c = active(checked(stream));
  return c ? c->graph : NULL;
}
bool capture_node(void *stream, const struct node *node) {
  struct capture *c = active(checked(stream));
  if (!c) return false;
  graph_add(c->graph, node);
  return true;
}

void stream_submitted(void *stream) {
  struct stream *s = checked(stream);
  if (s) s->moment = moment_now();
}
void stream_awaited(void *stream) {
  struct stream *s = checked(stream);
  if (s) moment_awaited(s->moment);
}

/* ---- streams ------------------------------------------------------------------------------------------------------ */
static status create(void **stream, unsigned flags, int priority) {
  if (!stream || flags > 1) return INVALID_VALUE;
  struct stream *s = calloc(1, sizeof *s);
  if (!s) return OUT_OF_MEMORY;
  *s = (struct stream){.magic = STREAM_MAGIC, .ordinal = current_device, .flags = flags,
                       .priority = priority > 0 ? 0 : priority < -5 ? -5 : priority,
                       .id = __atomic_add_fetch(&next_id, 1, __ATOMIC_RELAXED)};
  *stream = s;
  return OK;
}
static status destroy(void *stream) {
  struct stream *s = checked(stream);
  if (!s || s == &legacy || s == &per_thread) return INVALID_HANDLE;
  s->magic = 0;
  free(s);
  return OK;
}
static status wait_for(struct stream *s) { /* the host waits */
  if (!s) return INVALID_HANDLE;
  struct capture *c = active(s);
  if (c) {
    c->invalid = true;
    return CAPTURE_UNSUPPORTED;
  }
  moment_awaited(s->moment);
  process_lock();
  pools_release_idle(&devices[s == &legacy || s == &per_thread ? current_device : s->ordinal], true);
  process_unlock();
  return OK;
}
static status wait_event(void *stream, void *event) {
  struct stream *s = checked(stream);
  struct event *e = checked_event(event);
  if (!s || !e) return INVALID_HANDLE;
  struct capture *of_event = e->capture && !e->capture->ended ? e->capture : NULL, *own = active(s);
  if (of_event && own && own != of_event) {
    own->invalid = of_event->invalid = true;
    return 902;
  }
  if (of_event) s->capture = of_event; /* the stream joins the capture */
  forked = e == last_event ? s : NULL;
  watched_end(&e->watched); /* as a work's wait() does, which gives its tensors back */
  return OK;
}
void stream_carries_collective(void *stream) {
  const struct stream *s = checked(stream);
  carries = s && s == forked && collectives_are_watched() ? s : NULL;
}
static status add_host_function(void *stream, const struct node *node) {
  if (!checked(stream)) return INVALID_HANDLE;
  if (!capture_node(stream, node)) node_run(node, stream);
  return OK;
}

API status emu_cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
  TRY(context_enter());
  return fail(create(stream, flags, priority));
}
API status emu_cudaStreamCreateWithFlags(void **stream, unsigned flags) {
  return emu_cudaStreamCreateWithPriority(stream, flags, 0);
}
API status emu_cudaStreamCreate(void **stream) { return emu_cudaStreamCreateWithPriority(stream, 0, 0); }
API status emu_cudaStreamDestroy(void *stream) { return fail(destroy(stream)); }
API status emu_cudaStreamSynchronize(void *stream) {
  TRY(context_enter());
  return fail(wait_for(checked(stream)));
}
API status emu_cudaStreamQuery(void *stream) {
  TRY(context_enter());
  struct stream *s = checked(stream);
  if (active(s)) s->capture->invalid = true;
  return fail(!s ? INVALID_HANDLE : s->capture ? CAPTURE_UNSUPPORTED : moment_is_done(s->moment, !records) ? OK : NOT_READY);
}
API status emu_cudaDeviceSynchronize(void) {
  TRY(context_enter());
  all_work_awaited();
  return fail(wait_for(&legacy));
}
API status emu_cudaStreamWaitEvent(void *stream, void *event, unsigned flags) {
  UNUSED(flags);
  TRY(context_enter());
  return fail(wait_event(stream, event));
}
API status emu_cudaStreamGetPriority(void *stream, int *priority) {
  struct stream *s = checked(stream);
  if (!s) return fail(INVALID_HANDLE);
  *priority = s->priority;
  return OK;
}
API status emu_cudaStreamGetFlags(void *stream, unsigned *flags) {
  struct stream *s = checked(stream);
  if (!s) return fail(INVALID_HANDLE);
  *flags = s->flags;
  return OK;
}
API status emu_cudaStreamGetId(void *stream, unsigned long long *id) {
  struct stream *s = checked(stream);
  if (!s) return fail(INVALID_HANDLE);
  *id = s == &legacy ? 1 : s == &per_thread ? 2 : s->id;
  return OK;
}
API status emu_cudaStreamGetDevice(void *stream, int *ordinal) {
  struct stream *s = checked(stream);
  if (!s) return fail(INVALID_HANDLE);
  *ordinal = s == &legacy || s == &per_thread ? current_device : s->ordinal;
  return OK;
}
API status emu_cudaStreamAddCallback(void *stream, void (*call)(void *, int, void *), void *argument, unsigned flags) {
  UNUSED(flags);
  TRY(context_enter());
  return fail(add_host_function(stream, &(struct node){.type = NODE_HOST, .stream_call = call, .argument = argument}));
}
API status emu_cudaLaunchHostFunc(void *stream, void (*call)(void *), void *argument) {
  TRY(context_enter());
  return fail(add_host_function(stream, &(struct node){.type = NODE_HOST, .call = call, .argument = argument}));
}
API status emu_cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
  TRY_DRIVER(context_current(NULL));
  return create(stream, flags, priority);
}
API status emu_cuStreamCreate(void **stream, unsigned flags) { return emu_cuStreamCreateWithPriority(stream, flags, 0); }
API status emu_cuStreamDestroy_v2(void *stream) { return destroy(stream); }
API status emu_cuStreamSynchronize(void *stream) {
  TRY_DRIVER(context_current(NULL));
  return wait_for(checked(stream));
}
API status emu_cuStreamQuery(void *stream) {
  TRY_DRIVER(context_current(NULL));
  struct stream *s = checked(stream);
  return !s ? INVALID_HANDLE : moment_is_done(s->moment, !records) ? OK : NOT_READY;
}
API status emu_cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
  UNUSED(flags);
  TRY_DRIVER(context_current(NULL));
  return wait_event(stream, event);
}
API status emu_cuStreamGetPriority(void *stream, int *priority) { return emu_cudaStreamGetPriority(stream, priority); }
API status emu_cuStreamGetFlags(void *stream, unsigned *flags) { return emu_cudaStreamGetFlags(stream, flags); }
API status emu_cuStreamGetId(void *stream, unsigned long long *id) { return emu_cudaStreamGetId(stream, id); }
API status emu_cuStreamGetCtx(void *stream, void **context) {
  int ordinal;
  TRY_DRIVER(driver_enter());
  TRY_DRIVER(emu_cudaStreamGetDevice(stream, &ordinal));
  struct context *c;
  TRY_DRIVER(context_of(ordinal, &c));
  *context = c;
  return OK;
}
API status emu_cuLaunchHostFunc(void *stream, void (*call)(void *), void *argument) {
  TRY_DRIVER(context_current(NULL));
  return add_host_function(stream, &(struct node){.type = NODE_HOST, .call = call, .argument = argument});
}
#define STREAM_WRITE(name, value_type)                                                                           \
  API status emu_##name(void *stream, void *address, value_type value, unsigned flags) {                        \
    UNUSED(flags);                                                                                              \
    TRY_DRIVER(context_current(NULL));                                                                          \
    if (stream_capture(stream)) fatal_unknown("libcuda", #name " under stream capture");                        \
    copy_now(address, &value, sizeof value);                                                                    \
    return OK;                                                                                                  \
  }
STREAM_WRITE(cuStreamWriteValue32_v2, uint32_t)
STREAM_WRITE(cuStreamWriteValue64_v2, uint64_t)

/* ---- events ------------------------------------------------------------------------------------------------------- */
static status create_event(void **event, unsigned flags) {
  if (!event) return INVALID_VALUE;
  struct event *e = calloc(1, sizeof *e);
  if (!e) return OUT_OF_MEMORY;
  *e = (struct event){.magic = EVENT_MAGIC, .ordinal = current_device, .timed = !(flags & 2)};
  *event = e;
  return OK;
}
static status destroy_event(void *event) {
  struct event *e = checked_event(event);
  if (!e) return INVALID_HANDLE;
  watched_end(&e->watched);
  e->magic = 0;
  free(e);
  return OK;
}
static status record(void *event, void *stream) {
  struct event *e = checked_event(event);
  struct stream *s = checked(stream);
  if (!e || !s) return INVALID_HANDLE;
  e->capture = active(s);
  e->recorded = true;
  e->milliseconds = now_milliseconds();
  watched_end(&e->watched);
  if (!e->capture) s->moment = e->moment = moment_next();
  if (!e->capture && s == carries) watched_begin(&e->watched, e->moment);
  records = true, last_event = e, carries = NULL;
  return OK;
}
static status not_captured(struct event *e) {
  if (!e) return INVALID_HANDLE;
  if (!e->capture || e->capture->ended) return OK;
  e->capture->invalid = true;
  return 907;
}
static status query_event(void *event) {
  struct event *e = checked_event(event);
  TRY_DRIVER(not_captured(e));
  bool done;
  if (!records && watched_asked(&e->watched, &done)) return done ? OK : NOT_READY;
  return moment_is_done(e->moment, !records) ? OK : NOT_READY;
}
static status wait_for_event(void *event) {
  struct event *e = checked_event(event);
  TRY_DRIVER(not_captured(e));
  moment_awaited(e->moment);
  return OK;
}
static status elapsed(float *milliseconds, void *from, void *to) {
  struct event *a = checked_event(from), *b = checked_event(to);
  if (!a || !b || !a->timed || !b->timed || !a->recorded || !b->recorded) return INVALID_HANDLE;
  if (!moment_is_done(a->moment, !records) || !moment_is_done(b->moment, !records)) return NOT_READY;
  *milliseconds = (float)(b->milliseconds - a->milliseconds);
  return OK;
}
API status emu_cudaEventCreateWithFlags(void **event, unsigned flags) {
  TRY(context_enter());
  return fail(create_event(event, flags));
}
API status emu_cudaEventCreate(void **event) { return emu_cudaEventCreateWithFlags(event, 0); }
API status emu_cudaEventDestroy(void *event) { return fail(destroy_event(event)); }
API status emu_cudaEventRecord(void *event, void *stream) {
  TRY(context_enter());
  return fail(record(event, stream));
}
API status emu_cudaEventRecordWithFlags(void *event, void *stream, unsigned flags) {
  UNUSED(flags);
  return emu_cudaEventRecord(event, stream);
}
API status emu_cudaEventQuery(void *event) { return fail(query_event(event)); }
API status emu_cudaEventSynchronize(void *event) {
  status s = wait_for_event(event);
  return fail(s ? s : wait_for(&(struct stream){.magic = STREAM_MAGIC, .ordinal = ((struct event *)event)->ordinal}));
}
API status emu_cudaEventElapsedTime(float *ms, void *from, void *to) { return fail(elapsed(ms, from, to)); }
API status emu_cudaEventElapsedTime_v2(float *ms, void *from, void *to) { return fail(elapsed(ms, from, to)); }
API status emu_cuEventCreate(void **event, unsigned flags) {
  TRY_DRIVER(context_current(NULL));
  return create_event(event, flags);
}
API status emu_cuEventDestroy_v2(void *event) { return destroy_event(event); }
API status emu_cuEventRecord(void *event, void *stream) { return record(event, stream); }
API status emu_cuEventRecordWithFlags(void *event, void *stream, unsigned flags) {
  UNUSED(flags);
  return record(event, stream);
}
API status emu_cuEventQuery(void *event) { return query_event(event); }
API status emu_cuEventSynchronize(void *event) { return wait_for_event(event); }
API status emu_cuEventElapsedTime(float *ms, void *from, void *to) { return elapsed(ms, from, to); }
API status emu_cuEventElapsedTime_v2(float *ms, void *from, void *to) { return elapsed(ms, from, to); }

/* ---- capture ------------------------------------------------------------------------------------------------------ */
static status begin(void *stream, struct graph *given, int mode) {
  struct stream *s = checked(stream);
  if (!s || s == &legacy) return s ? CAPTURE_UNSUPPORTED : INVALID_HANDLE;
  if (active(s)) return 401;
  struct capture *c = calloc(1, sizeof *c);
  *c = (struct capture){.id = __atomic_add_fetch(&next_id, 1, __ATOMIC_RELAXED), .graph = given ? given : graph_new(),
                        .origin = s, .thread = &thread_mark, .mode = mode, .into_given_graph = given != NULL};
  s->capture = c; /* never freed: events and streams that joined may still point to it */
  return OK;
}
static status end(void *stream, void **graph) {
  struct stream *s = checked(stream);
  struct capture *c = active(s);
  if (!c) return 401;
  if (c->origin != s) return CAPTURE_UNMATCHED;
  if (c->mode != MODE_RELAXED && c->thread != &thread_mark) return CAPTURE_WRONG_THREAD;
  c->ended = true;
  s->capture = NULL;
  if (graph) *graph = c->invalid ? NULL : c->graph;
  return c->invalid ? CAPTURE_INVALIDATED : OK;
}
static status info(void *stream, int *state, unsigned long long *id, void **graph, const void **dependencies,
                   size_t *num_dependencies) {
  struct stream *s = checked(stream);
  if (!s) return INVALID_HANDLE;
  struct capture *c = active(s);
  if (state) *state = !c ? CAPTURE_NONE : c->invalid ? CAPTURE_INVALID : CAPTURE_ACTIVE;
  if (c && id) *id = c->id;
  if (c && graph) *graph = c->graph;
  if (dependencies) *dependencies = NULL;
  if (num_dependencies) *num_dependencies = 0;
  return OK;
}
API status emu_cudaStreamBeginCapture(void *stream, int mode) { return fail(begin(stream, NULL, mode)); }
API status emu_cudaStreamBeginCaptureToGraph(void *stream, void *graph, const void *dependencies, const void *data,
                                             size_t num, int mode) {
  UNUSED(dependencies), UNUSED(data), UNUSED(num);
  return fail(begin(stream, graph, mode));
}
API status emu_cudaStreamEndCapture(void *stream, void **graph) { return fail(end(stream, graph)); }
API status emu_cudaStreamIsCapturing(void *stream, int *state) { return fail(info(stream, state, 0, 0, 0, 0)); }
#if EMU_CUDA_MAJOR >= 13
API status emu_cudaStreamGetCaptureInfo(void *stream, int *state, unsigned long long *id, void **graph,
                                        const void **dependencies, const void **data, size_t *num) {
  if (data) *data = NULL;
  return fail(info(stream, state, id, graph, dependencies, num));
}
#else
API status emu_cudaStreamGetCaptureInfo(void *stream, int *state, unsigned long long *id) {
  return fail(info(stream, state, id, NULL, NULL, NULL));
}
#endif
API status emu_cudaStreamGetCaptureInfo_v2(void *stream, int *state, unsigned long long *id, void **graph,
                                           const void **dependencies, size_t *num) {
  return fail(info(stream, state, id, graph, dependencies, num));
}
API status emu_cudaStreamGetCaptureInfo_v3(void *stream, int *state, unsigned long long *id, void **graph,
                                           const void **dependencies, const void **data, size_t *num) {
  if (data) *data = NULL;
  return fail(info(stream, state, id, graph, dependencies, num));
}
API status emu_cudaThreadExchangeStreamCaptureMode(int *mode) {
  if (*mode < MODE_GLOBAL || *mode > MODE_RELAXED) return fail(INVALID_VALUE);
  int before = capture_mode;
  capture_mode = *mode;
  *mode = before;
  return OK;
}
API status emu_cuStreamIsCapturing(void *stream, int *state) { return info(stream, state, 0, 0, 0, 0); }
API status emu_cuThreadExchangeStreamCaptureMode(int *mode) { return emu_cudaThreadExchangeStreamCaptureMode(mode); }
API status emu_cuStreamGetCaptureInfo_v2(void *stream, int *state, unsigned long long *id, void **graph,
                                         const void **dependencies, size_t *num) {
  return info(stream, state, id, graph, dependencies, num);
}
API status emu_cuStreamGetCaptureInfo_v3(void *stream, int *state, unsigned long long *id, void **graph,
                                         const void **dependencies, const void **data, size_t *num) {
  if (data) *data = NULL;
  return info(stream, state, id, graph, dependencies, num);
}
API status emu_cudaStreamUpdateCaptureDependencies(void) { return OK; } /* order is the order of submission */
