/* Graphs: what a stream captured, or what was added node by node, done again at each launch, in the order of adding.
 *
 * True of it: copies, memsets and host functions of a graph run at its launch and not at its capture, kernels are
 * counted, memory allocated under capture belongs to the graph and is given back with it, an instance holds memory of
 * its own. Dependencies are kept as the
 * order alone. Left out: conditional nodes, updates of an instance; unknown kinds of node end the run. */
#include "emulator.h" /* first: it asks for GNU's interfaces */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GRAPH_MAGIC = 0x96A94, NODE_MAGIC = 0x90DE };
struct graph {
  uint32_t magic;
  int references;
  struct node **nodes;
  size_t num_nodes, room;
  void **owned;
  size_t num_owned;
  struct device *instance_device;
  uint64_t instance_bytes; /* of each of its instances */
};

static struct graph *checked(void *graph) {
  struct graph *g = graph;
  return g && g->magic == GRAPH_MAGIC ? g : NULL;
}

struct graph *graph_new(void) {
  struct graph *g = calloc(1, sizeof *g);
  if (!g) abort();
  g->magic = GRAPH_MAGIC;
  g->references = 1;
  return g;
}

struct node *graph_add(struct graph *g, const struct node *node) {
  if (g->num_nodes == g->room) {
    g->room = g->room ? 2 * g->room : 32;
    g->nodes = realloc(g->nodes, g->room * sizeof *g->nodes);
    if (!g->nodes) abort();
  }
  struct node *n = malloc(sizeof *n);
  if (!n) abort();
  *n = *node;
  n->magic = NODE_MAGIC;
  n->graph = g;
  return g->nodes[g->num_nodes++] = n;
}

void graph_own(struct graph *g, void *pointer) {
  g->owned = realloc(g->owned, (g->num_owned + 1) * sizeof *g->owned);
  if (!g->owned) abort();
  g->owned[g->num_owned++] = pointer;
}

void graph_free(struct graph *g) { /* a graph and its instances share it */
  if (--g->references) return;
  for (size_t k = 0; k < g->num_nodes; k++) {
    if (g->nodes[k]->child) graph_free(g->nodes[k]->child);
    free(g->nodes[k]);
  }
  for (size_t k = 0; k < g->num_owned; k++) memory_free(g->owned[k], BLOCK_POOL);
  free(g->nodes);
  free(g->owned);
  g->magic = 0;
  free(g);
}

static void launch(const struct graph *g, void *stream) {
  for (size_t k = 0; k < g->num_nodes; k++) {
    if (g->nodes[k]->child) launch(g->nodes[k]->child, stream);
    else node_run(g->nodes[k], stream);
  }
}

API status emu_cudaGraphCreate(void **graph, unsigned flags) {
  UNUSED(flags);
  *graph = graph_new();
  return OK;
}
API status emu_cudaGraphDestroy(void *graph) {
  struct graph *g = checked(graph);
  if (!g) return fail(INVALID_VALUE);
  graph_free(g);
  return OK;
}
API status emu_cudaGraphGetNodes(void *graph, void **nodes, size_t *num) {
  struct graph *g = checked(graph);
  if (!g || !num) return fail(INVALID_VALUE);
  for (size_t k = 0; nodes && k < *num; k++) nodes[k] = k < g->num_nodes ? g->nodes[k] : NULL;
  if (!nodes || *num > g->num_nodes) *num = g->num_nodes;
  return OK;
}
API status emu_cudaGraphGetRootNodes(void *graph, void **nodes, size_t *num) {
  struct graph *g = checked(graph);
  if (!g || !num) return fail(INVALID_VALUE);
  size_t roots = g->num_nodes ? 1 : 0; /* the order is a chain */
  if (nodes && *num && roots) nodes[0] = g->nodes[0];
  *num = roots;
  return OK;
}
API status emu_cudaGraphNodeGetType(void *node, int *type) {
  struct node *n = node;
  if (!n || n->magic != NODE_MAGIC) return fail(INVALID_VALUE);
  *type = (int)n->type;
  return OK;
}
static status dependencies(void *node, void **list, size_t *num) {
  struct node *n = node;
  if (!n || n->magic != NODE_MAGIC || !num) return INVALID_VALUE;
  struct node *before = NULL;
  for (size_t k = 1; k < n->graph->num_nodes; k++)
    if (n->graph->nodes[k] == n) before = n->graph->nodes[k - 1];
  if (list && *num && before) list[0] = before;
  *num = before != NULL;
  return OK;
}
#if EMU_CUDA_MAJOR >= 13
API status emu_cudaGraphNodeGetDependencies(void *node, void **list, void *data, size_t *num) {
  UNUSED(data);
  return fail(dependencies(node, list, num));
}
#else
API status emu_cudaGraphNodeGetDependencies(void *node, void **list, size_t *num) {
  return fail(dependencies(node, list, num));
}
#endif
static status add(void **node, void *graph, const struct node *wanted) {
  struct graph *g = checked(graph);
  if (!g) return INVALID_VALUE;
  struct node *n = graph_add(g, wanted);
  if (node) *node = n;
  return OK;
}
API status emu_cudaGraphAddEmptyNode(void **node, void *graph, const void *list, size_t num) {
  UNUSED(list), UNUSED(num);
  return fail(add(node, graph, &(struct node){.type = NODE_EMPTY}));
}
API status emu_cudaGraphAddKernelNode(void **node, void *graph, const void *list, size_t num, const void *params) {
  UNUSED(list), UNUSED(num), UNUSED(params);
  return fail(add(node, graph, &(struct node){.type = NODE_KERNEL}));
}
API status emu_cudaGraphAddHostNode(void **node, void *graph, const void *list, size_t num,
                                    const struct cuda_host_node *params) {
  UNUSED(list), UNUSED(num);
  return fail(add(node, graph, &(struct node){.type = NODE_HOST, .call = params->fn, .argument = params->userData}));
}
API status emu_cudaGraphAddMemcpyNode1D(void **node, void *graph, const void *list, size_t num, void *to,
                                        const void *from, size_t bytes, int kind) {
  UNUSED(list), UNUSED(num), UNUSED(kind);
  return fail(add(node, graph, &(struct node){.type = NODE_MEMCPY, .to = to, .from = from, .width = bytes, .height = 1}));
}
API status emu_cudaGraphAddMemsetNode(void **node, void *graph, const void *list, size_t num,
                                      const struct cuda_memset_node *p) {
  UNUSED(list), UNUSED(num);
  return fail(add(node, graph, &(struct node){.type = NODE_MEMSET, .to = p->dst, .pitch_to = p->pitch,
                                              .value = p->value, .value_bytes = p->elementSize, .width = p->width,
                                              .height = p->height}));
}
API status emu_cudaGraphAddChildGraphNode(void **node, void *graph, const void *list, size_t num, void *child) {
  UNUSED(list), UNUSED(num);
  struct graph *c = checked(child);
  if (!c) return fail(INVALID_VALUE);
  c->references++;
  return fail(add(node, graph, &(struct node){.type = NODE_GRAPH, .child = c}));
}
API status emu_cudaGraphAddDependencies(void) { return OK; }
API status emu_cudaGraphDebugDotPrint(void *graph, const char *path, unsigned flags) {
  UNUSED(flags);
  struct graph *g = checked(graph);
  FILE *file = g ? fopen(path, "we") : NULL;
  if (!file) return fail(g ? OPERATING_SYSTEM : INVALID_VALUE);
  fprintf(file, "digraph dot {\n");
  for (size_t k = 0; k < g->num_nodes; k++) fprintf(file, "  n%zu [label=\"type %d\"];\n", k, (int)g->nodes[k]->type);
  for (size_t k = 1; k < g->num_nodes; k++) fprintf(file, "  n%zu -> n%zu;\n", k - 1, k);
  fprintf(file, "}\n");
  fclose(file);
  return OK;
}

static uint64_t nodes_of(const struct graph *g) {
  uint64_t num = g->num_nodes;
  for (size_t k = 0; k < g->num_nodes; k++)
    if (g->nodes[k]->child) num += nodes_of(g->nodes[k]->child);
  return num;
}

static uint64_t held_bytes, most_held_bytes; /* by this process's instances, on all devices */

uint64_t graphs_most_bytes(void) { return most_held_bytes; }

static void hold(const struct device *device, uint64_t bytes) {
  process_lock();
  held_bytes += bytes;
  if (held_bytes > most_held_bytes) most_held_bytes = held_bytes;
  process_unlock();
  trace(1, "a graph's instance on cuda:%d: %llu bytes", (int)(device - devices), (unsigned long long)bytes);
}

static void release(const struct device *device, uint64_t bytes) {
  process_lock();
  held_bytes -= bytes;
  process_unlock();
  shared_release(device->index, bytes);
}

/* An instance is the graph itself with one more reference: nothing here changes a graph that has been instantiated. It
 * holds memory of its own on the device until it is destroyed: so much, and so much for each node, as the machine says. */
API status emu_cudaGraphInstantiate(void **instance, void *graph, unsigned long long flags) {
  UNUSED(flags);
  TRY(context_enter());
  struct graph *g = checked(graph);
  if (!g) return fail(INVALID_VALUE);
  uint64_t bytes = machine.graph_bytes + nodes_of(g) * machine.graph_node_bytes;
  struct device *device = &devices[current_device];
  if (!device_charge(device, bytes)) return fail(OUT_OF_MEMORY);
  g->instance_device = device;
  g->instance_bytes = bytes;
  hold(device, bytes);
  g->references++;
  *instance = g;
  return OK;
}
API status emu_cudaGraphInstantiateWithFlags(void **instance, void *graph, unsigned long long flags) {
  return emu_cudaGraphInstantiate(instance, graph, flags);
}
API status emu_cudaGraphInstantiateWithParams(void **instance, void *graph, struct cuda_graph_instantiation *params) {
  params->errNode_out = NULL;
  params->result_out = 0;
  return emu_cudaGraphInstantiate(instance, graph, params->flags);
}
API status emu_cudaGraphExecDestroy(void *instance) {
  struct graph *g = checked(instance);
  if (!g) return fail(INVALID_VALUE);
  release(g->instance_device, g->instance_bytes);
  graph_free(g);
  return OK;
}
API status emu_cudaGraphUpload(void *instance, void *stream) {
  UNUSED(stream);
  return fail(checked(instance) ? OK : INVALID_VALUE);
}
API status emu_cudaGraphLaunch(void *instance, void *stream) {
  TRY(context_enter());
  struct graph *g = checked(instance), *capturing = stream_capture(stream);
  if (!g) return fail(INVALID_VALUE);
  if (!capturing) {
    stream_submitted(stream);
    launch(g, stream);
  } else {
    g->references++;
    graph_add(capturing, &(struct node){.type = NODE_GRAPH, .child = g});
  }
  return OK;
}
