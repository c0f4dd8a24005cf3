/* vramprobe.allocator._plain: blocks.c for Python. PlainAllocator is what compiled.py describes; it stands in for a
 * CachingAllocator and its Ledger, whose counters it carries itself. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <stddef.h>

#include "blocks.h"
#include "pairing.h"

static PyObject *usage_type, *out_of_memory; /* ledger.py's Usage and OutOfMemory */

struct object {
  PyObject_HEAD
  struct allocator allocator;
  PyObject *live, *awaiting; /* name → block: in callers' hands; freed, perhaps in use on another stream */
  int32_t *numbered;         /* of play_log's requests */
  Py_ssize_t num_numbered;
};

static PyObject *usage(const struct counters *c) {
  return PyObject_CallFunction(
      usage_type, "LLLLL", (long long)c->requested_bytes, (long long)c->allocated_bytes, (long long)c->active_bytes,
      (long long)c->reserved_bytes, (long long)c->num_segments);
}

/* cached blocks serve others once other streams are done with them (synchronize_and_free_events) */
static void complete_all(struct object *self) {
  PyObject *name, *number;
  for (Py_ssize_t at = 0; PyDict_Next(self->awaiting, &at, &name, &number);)
    complete_free(&self->allocator, (int32_t)PyLong_AsLong(number));
  PyDict_Clear(self->awaiting);
}

/* What a full card, and who asks for it, make of the cache (release_cached_blocks). */
static void empty(struct object *self) {
  complete_all(self);
  release_cached(&self->allocator);
}

static void raise_full(struct object *self, int64_t size_bytes) {
  struct allocator *a = &self->allocator;
  int64_t block_bytes = rounded_bytes(size_bytes);
  PyObject *seen = usage(&a->now), *nothing = PyTuple_New(0);
  PyObject *told = seen ? Py_BuildValue(
      "{sLsLsLsOsL}", "requested_bytes", (long long)size_bytes, "block_bytes", (long long)block_bytes, "segment_bytes",
      (long long)segment_bytes(a, block_bytes), "usage", seen, "free_bytes",
      (long long)(a->limit_bytes - a->now.reserved_bytes)) : NULL;
  PyObject *error = told && nothing ? PyObject_Call(out_of_memory, nothing, told) : NULL;
  if (error) PyErr_SetObject(out_of_memory, error);
  Py_XDECREF(error);
  Py_XDECREF(told);
  Py_XDECREF(nothing);
  Py_XDECREF(seen);
}

/* A block, or NONE with an exception set (malloc). */
static int32_t serve(struct object *self, int64_t size_bytes, int64_t stream) {
  struct allocator *a = &self->allocator;
  int32_t block = allocate_block(a, size_bytes, stream);
  if (block == FULL) {
    empty(self);
    a->num_alloc_retries++;
    block = allocate_new(a, size_bytes, stream);
    if (block == FULL) raise_full(self, size_bytes);
  }
  if (block == NO_HOST_MEMORY) PyErr_NoMemory();
  return block >= 0 ? block : NONE;
}

/* None, with the block in the dict under this name; or NULL. */
static PyObject *kept(PyObject *dict, PyObject *name, int32_t block) {
  PyObject *number = PyLong_FromLong(block);
  int failed = !number || PyDict_SetItem(dict, name, number);
  Py_XDECREF(number);
  if (failed) return NULL;
  Py_RETURN_NONE;
}

static PyObject *allocate(struct object *self, PyObject *args, PyObject *options) {
  static char *names[] = {"name", "size_bytes", "stream", NULL};
  PyObject *name;
  long long size_bytes, stream = 0;
  if (!PyArg_ParseTupleAndKeywords(args, options, "OL|L", names, &name, &size_bytes, &stream)) return NULL;
  int held = PyDict_Contains(self->live, name);
  if (held < 0) return NULL;
  if (held) return PyErr_Format(PyExc_AssertionError, "%R is already allocated", name);
  int32_t block = NONE; /* a request of no bytes, which never gets here in torch */
  if (size_bytes && (block = serve(self, size_bytes, stream)) == NONE) return NULL;
  return kept(self->live, name, block);
}

/* The block of this name, which leaves the dict; FULL with KeyError where there is none. */
static int32_t popped(PyObject *dict, PyObject *name) {
  PyObject *number = PyDict_GetItemWithError(dict, name);
  if (!number) {
    if (!PyErr_Occurred()) PyErr_SetObject(PyExc_KeyError, name);
    return FULL;
  }
  int32_t block = (int32_t)PyLong_AsLong(number);
  return PyDict_DelItem(dict, name) ? FULL : block;
}

static PyObject *free_at_once(struct object *self, PyObject *name) {
  int32_t block = popped(self->live, name);
  if (block == FULL) return NULL;
  if (block != NONE) {
    request_free(&self->allocator, block);
    complete_free(&self->allocator, block);
  }
  Py_RETURN_NONE;
}

static PyObject *free_requested(struct object *self, PyObject *name) {
  int32_t block = popped(self->live, name);
  if (block == FULL) return NULL;
  if (block == NONE) Py_RETURN_NONE;
  request_free(&self->allocator, block);
  return kept(self->awaiting, name, block);
}

static PyObject *free_completed(struct object *self, PyObject *name) {
  int awaits = PyDict_Contains(self->awaiting, name);
  if (awaits < 0) return NULL;
  if (!awaits) Py_RETURN_NONE;
  int32_t block = popped(self->awaiting, name);
  if (block == FULL) return NULL;
  complete_free(&self->allocator, block);
  Py_RETURN_NONE;
}

static PyObject *empty_cache(struct object *self, PyObject *unused) {
  (void)unused;
  empty(self);
  Py_RETURN_NONE;
}

static bool play_request(struct object *self, Py_ssize_t number, int64_t size_bytes, int64_t stream) {
  if (number >= self->num_numbered) {
    Py_ssize_t wanted = 2 * number + 1024;
    int32_t *grown = PyMem_Realloc(self->numbered, (size_t)wanted * sizeof *grown);
    if (!grown) return PyErr_NoMemory(), false;
    for (Py_ssize_t k = self->num_numbered; k < wanted; k++) grown[k] = NONE;
    self->numbered = grown;
    self->num_numbered = wanted;
  }
  if (self->numbered[number] != NONE)
    return PyErr_Format(PyExc_AssertionError, "%zd is already allocated", number), false;
  self->numbered[number] = serve(self, size_bytes, stream);
  return self->numbered[number] != NONE;
}

static bool is_numbered(struct object *self, long long number) {
  if (number >= 0 && number < self->num_numbered && self->numbered[number] != NONE) return true;
  PyErr_Format(PyExc_KeyError, "%lld", number);
  return false;
}

static bool play_free(struct object *self, long long number) {
  if (!is_numbered(self, number)) return false;
  request_free(&self->allocator, self->numbered[number]);
  complete_free(&self->allocator, self->numbered[number]);
  self->numbered[number] = NONE;
  return true;
}

/* A free whose block other streams still use, and that they are done with it. */
static bool play_late(struct object *self, int64_t number, bool is_request) {
  if (is_request && !is_numbered(self, number)) return false;
  PyObject *name = PyLong_FromLongLong(number), *done = NULL;
  if (name && !is_request) done = free_completed(self, name);
  if (name && is_request) {
    request_free(&self->allocator, self->numbered[number]);
    done = kept(self->awaiting, name, self->numbered[number]);
    self->numbered[number] = NONE;
  }
  Py_XDECREF(name);
  Py_XDECREF(done);
  return done != NULL;
}

enum { ALLOCATE, FREE, REQUEST_FREE, COMPLETE_FREE, EMPTY_CACHE }; /* of allocator.py */

static bool play_event(struct object *self, int8_t action, int64_t size_bytes, int64_t block, int8_t stream) {
  switch (action) {
    case ALLOCATE: return play_request(self, block, size_bytes, stream);
    case FREE: return play_free(self, block);
    case EMPTY_CACHE: return empty(self), true;
    default: return play_late(self, block, action == REQUEST_FREE);
  }
}

static PyObject *play_log(struct object *self, PyObject *args) {
  Py_buffer actions, sizes, blocks, streams;
  if (!PyArg_ParseTuple(args, "y*y*y*y*", &actions, &sizes, &blocks, &streams)) return NULL;
  bool done = true;
  for (Py_ssize_t at = 0; done && at < actions.len; at++)
    done = play_event(
        self, ((int8_t *)actions.buf)[at], ((int64_t *)sizes.buf)[at], ((int64_t *)blocks.buf)[at],
        ((int8_t *)streams.buf)[at]);
  Py_buffer *all[] = {&actions, &sizes, &blocks, &streams};
  for (int k = 0; k < 4; k++) PyBuffer_Release(all[k]);
  if (!done) return NULL;
  Py_RETURN_NONE;
}

/* The blocks' numbers as bytes; ValueError names an event that no block answers to. */
static PyObject *paired(PyObject *unused, PyObject *args) {
  (void)unused;
  Py_buffer codes, ranks, sizes;
  if (!PyArg_ParseTuple(args, "y*y*y*", &codes, &ranks, &sizes)) return NULL;
  int64_t num = codes.len / (Py_ssize_t)sizeof num, stop = NO_MEMORY;
  PyObject *found = PyBytes_FromStringAndSize(NULL, codes.len);
  if (found) stop = pair_events(num, codes.buf, ranks.buf, sizes.buf, (int64_t *)PyBytes_AsString(found));
  Py_buffer *all[] = {&codes, &ranks, &sizes};
  for (int k = 0; k < 3; k++) PyBuffer_Release(all[k]);
  if (found && stop == num) return found;
  Py_XDECREF(found);
  return stop == NO_MEMORY ? PyErr_NoMemory() : PyErr_Format(PyExc_ValueError, "event %lld", (long long)stop);
}

static PyObject *now(struct object *self, PyObject *unused) {
  (void)unused;
  return usage(&self->allocator.now);
}

static PyObject *peak(struct object *self, PyObject *unused) {
  (void)unused;
  return usage(&self->allocator.peak);
}

static PyObject *reset_peaks(struct object *self, PyObject *unused) {
  (void)unused;
  self->allocator.peak = self->allocator.now;
  Py_RETURN_NONE;
}

static PyObject *ledger(PyObject *self, void *unused) {
  (void)unused;
  return Py_NewRef(self);
}

static int init(struct object *self, PyObject *args, PyObject *options) {
  static char *names[] = {"limit_bytes", "large_segment_bytes", NULL};
  PyObject *limit;
  long long limit_bytes = NONE, large_segment_bytes;
  if (!PyArg_ParseTupleAndKeywords(args, options, "OL", names, &limit, &large_segment_bytes)) return -1;
  if (limit != Py_None && (limit_bytes = PyLong_AsLongLong(limit)) == -1 && PyErr_Occurred()) return -1;
  allocator_clear(&self->allocator);
  allocator_init(&self->allocator, limit_bytes, large_segment_bytes);
  PyMem_Free(self->numbered);
  self->numbered = NULL;
  self->num_numbered = 0;
  Py_XDECREF(self->live);
  Py_XDECREF(self->awaiting);
  self->live = PyDict_New();
  self->awaiting = PyDict_New();
  return self->live && self->awaiting ? 0 : -1;
}

static void dealloc(struct object *self) {
  PyTypeObject *type = Py_TYPE((PyObject *)self);
  allocator_clear(&self->allocator);
  PyMem_Free(self->numbered);
  Py_XDECREF(self->live);
  Py_XDECREF(self->awaiting);
  PyObject_Free(self);
  Py_DECREF(type);
}

#define COUNTER(name, field) {name, T_LONGLONG, offsetof(struct object, allocator.field), READONLY, NULL}
static PyMemberDef members[] = {
    COUNTER("requested", now.requested_bytes), COUNTER("requested_peak", peak.requested_bytes),
    COUNTER("allocated", now.allocated_bytes), COUNTER("allocated_peak", peak.allocated_bytes),
    COUNTER("active", now.active_bytes), COUNTER("active_peak", peak.active_bytes),
    COUNTER("reserved", now.reserved_bytes), COUNTER("reserved_peak", peak.reserved_bytes),
    COUNTER("num_segments", now.num_segments), COUNTER("num_segments_peak", peak.num_segments),
    COUNTER("num_alloc_retries", num_alloc_retries), {NULL}};
static PyGetSetDef properties[] = {{"ledger", ledger, NULL, "Its counters: itself.", NULL}, {NULL}};

#define METHOD(name, function, flags, text) {name, (PyCFunction)(void (*)(void))function, flags, text}
static PyMethodDef methods[] = {
    METHOD("allocate", allocate, METH_VARARGS | METH_KEYWORDS, "Serve a request. Raises OutOfMemory."),
    METHOD("free", free_at_once, METH_O, "Take a block back at once."),
    METHOD("request_free", free_requested, METH_O, "The caller's half of a free."),
    METHOD("complete_free", free_completed, METH_O, "The other half, once other streams are done."),
    METHOD("empty_cache", empty_cache, METH_NOARGS, "Give back every segment without a live block."),
    METHOD("play_log", play_log, METH_VARARGS, "Play events: actions, sizes, blocks and streams, as arrays."),
    METHOD("now", now, METH_NOARGS, "The counters as they stand."),
    METHOD("peak", peak, METH_NOARGS, "Each counter's highest value since the peaks were reset."),
    METHOD("reset_peaks", reset_peaks, METH_NOARGS, "reset_peak_memory_stats."),
    {NULL}};

static PyType_Slot slots[] = {
    {Py_tp_doc, "A CachingAllocator under torch's default settings, with its Ledger."},
    {Py_tp_new, PyType_GenericNew}, {Py_tp_init, init}, {Py_tp_dealloc, dealloc},
    {Py_tp_methods, methods}, {Py_tp_members, members}, {Py_tp_getset, properties}, {0, NULL}};
static PyType_Spec spec = {
    .name = "vramprobe.allocator._plain.PlainAllocator", .basicsize = sizeof(struct object),
    .flags = Py_TPFLAGS_DEFAULT, .slots = slots};
static PyMethodDef functions[] = {
    METHOD("paired", paired, METH_VARARGS, "The block of each event: codes, ranks and sizes, as arrays of int64."),
    {NULL}};
static PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "_plain", .m_doc = "CUDA's caching allocator under its default settings.",
    .m_size = -1, .m_methods = functions};

static PyObject *attribute(const char *of_module, const char *name) {
  PyObject *from = PyImport_ImportModule(of_module), *found = from ? PyObject_GetAttrString(from, name) : NULL;
  Py_XDECREF(from);
  return found;
}

PyMODINIT_FUNC PyInit__plain(void) {
  usage_type = attribute("vramprobe.allocator.ledger", "Usage");
  out_of_memory = attribute("vramprobe.allocator.ledger", "OutOfMemory");
  if (!usage_type || !out_of_memory) return NULL;
  PyObject *made = PyModule_Create(&module), *type = made ? PyType_FromSpec(&spec) : NULL;
  if (!type || PyModule_AddObjectRef(made, "PlainAllocator", type)) {
    Py_XDECREF(type);
    Py_XDECREF(made);
    return NULL;
  }
  Py_DECREF(type);
  return made;
}
