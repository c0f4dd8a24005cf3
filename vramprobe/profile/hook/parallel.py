"""Record how the ranks of a run share a model: sizes of tensor, context and pipeline parallelism, by the program's own
groups.

In: Megatron's groups, torch's named device meshes and pipelines, a transformers model's ``tp_size``. Out: a line
``parallel`` at the end of the first step; nothing where ranks only replicate or shard.
"""

import gc
import sys

_NAMES = {  # a mesh's dimension: ours
    **dict.fromkeys(("tp", "tensor", "tensor_parallel"), "tensor"),
    **dict.fromkeys(("cp", "sp", "context_parallel"), "context"),
    **dict.fromkeys(("pp", "pipeline"), "pipeline"),
}


#: What Megatron has kernels from, and runs without.
_KERNELS = {"transformer_engine": "Transformer Engine", "apex": "Apex"}


def missing_kernels():
    """One sentence where Megatron runs without the libraries that its published runs have; None elsewhere."""
    missing = [name for module, name in _KERNELS.items() if sys.modules.get(module) is None]
    if "megatron.core" not in sys.modules or not missing:
        return None
    return (
        f"Megatron runs without {' and '.join(missing)}: its softmax, norms, gradient accumulation and optimizer in "
        "PyTorch allocate in place of their kernels, which other runs have (docs/megatron.md)"
    )


def parallel_sizes(modules):
    """By kind, those above 1; ``virtual``: a pipeline rank's chunks of layers, where its schedule interleaves them."""
    found = {}
    for name, size in (*_of_meshes(), *_of_schedules(), *_of_megatron(), *_of_models(modules)):
        if size and size > found.get(name, 1):
            found[name] = int(size)
    return found


def _objects(module, name):
    kind = getattr(sys.modules.get(module), name, None)
    return [one for one in gc.get_objects() if issubclass(type(one), kind)] if kind else []


def _of_meshes():
    for mesh in _objects("torch.distributed.device_mesh", "DeviceMesh"):
        for at, name in enumerate(getattr(mesh, "mesh_dim_names", None) or ()):
            if name in _NAMES:
                yield _NAMES[name], mesh.size(at)


def _of_schedules():
    """torch's own pipelines, which need no mesh."""
    for schedule in _objects("torch.distributed.pipelining.schedules", "_PipelineSchedule"):
        stages = getattr(schedule, "_stages", None) or [schedule._stage]
        yield "pipeline", stages[0].group_size
        yield "virtual", len(stages)


def _of_megatron():
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return
    yield "tensor", state.get_tensor_model_parallel_world_size()
    yield "context", state.get_context_parallel_world_size()
    yield "pipeline", state.get_pipeline_model_parallel_world_size()
    yield "virtual", state.get_virtual_pipeline_model_parallel_world_size()


def _of_models(modules):
    for module in modules:
        size = getattr(module, "tp_size", None)
        if isinstance(size, int):
            yield "tensor", size
