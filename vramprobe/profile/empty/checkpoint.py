"""A checkpoint of any size that takes no room: real safetensors headers over files of holes, which read as zeros.

In: a config of transformers', a folder. Out: ``model.safetensors``, or shards with their index, with the names and
shapes that this very transformers would save. Real loaders read it. After ../shared/emulator/try/sparse_checkpoint.py.
"""

import contextlib
import copy
import os
import sys

from vramprobe_profile.holes import described, write_holes

from . import quantised
from .replacements import write_json

MAX_SHARD_BYTES = 4 << 30  # one file of over 100 GB cannot be mapped
_METADATA = {"format": "pt"}


def model_of(config):
    """The model of ``config`` without memory, of the class that its checkpoint names."""
    import transformers

    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    kind = getattr(transformers, (config.architectures or [""])[0], None)
    with without_memory():
        return transformers.AutoModelForCausalLM.from_config(config) if kind is None else kind(config)


@contextlib.contextmanager
def without_memory():
    """Models that are made within have shapes alone."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), _without_zero3(), torch.device("meta"):
        yield


@contextlib.contextmanager
def _without_zero3():
    """transformers partitions a submodel, as a vision tower, while it is made for a program that uses ZeRO-3."""
    module, name = sys.modules.get("transformers.integrations.deepspeed"), "_hf_deepspeed_config_weak_ref"
    kept = getattr(module, name, None)
    if kept is None:
        yield
        return
    setattr(module, name, None)
    try:
        yield
    finally:
        setattr(module, name, kept)


def write(
    model, folder, dtype="bfloat16", max_shard_bytes=MAX_SHARD_BYTES, quantization=None, *, stem="model", variant=""
):
    """The weights of ``model``, those of floating point as ``dtype``; -> how many elements the model has.

    ``quantization``: the config's, for a checkpoint that is quantised already. ``stem``, ``variant``: of its
    files' names.
    """
    tensors = _saved(model)
    count = sum(tensor.numel() for tensor in tensors.values())
    shards, at, contents = [{}], 0, {}
    for name, tensor in quantised.packed(tensors, quantization or {}, dtype).items():
        if isinstance(tensor, bytes):
            contents[name] = tensor
            about = "U8", [len(tensor)], len(tensor)
        else:
            about = described(tensor)
        size = about[-1]
        if at + size > max_shard_bytes and shards[-1]:
            shards.append({})
            at = 0
        shards[-1][name] = about
        at += size
    os.makedirs(folder, exist_ok=True)
    end = f".{variant}" if variant else ""
    if len(shards) == 1:
        write_holes(os.path.join(folder, f"{stem}{end}.safetensors"), shards[0], _METADATA, contents)
        return count
    file_of, total = {}, 0
    for number, shard in enumerate(shards, start=1):
        file = f"{stem}{end}-{number:05d}-of-{len(shards):05d}.safetensors"
        total += write_holes(os.path.join(folder, file), shard, _METADATA, contents)
        file_of.update(dict.fromkeys(shard, file))
    index = {"metadata": {"total_size": total}, "weight_map": file_of}
    write_json(folder, f"{stem}.safetensors.index{end}.json", index)
    return count


def _saved(model):
    """Return the tensors that ``save_pretrained`` would write: a tied weight once, experts as the hub has them."""
    own = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    # Without memory transformers 5.0 has not tied them yet: a head that is saved beside its embedding stays untied.
    tied = {name for name, source in getattr(model, "all_tied_weights_keys", {}).items() if source in own}
    found = {name: tensor for name, tensor in model.state_dict().items() if name in own - tied}
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before transformers 5 names were those of the checkpoint
        return found
    return revert_weight_conversion(model, found)
