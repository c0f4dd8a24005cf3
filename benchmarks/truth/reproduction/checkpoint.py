"""A checkpoint of any size that takes no room: real safetensors headers over files of holes, which read as zeros.

In: a configuration. Out: a folder that real loaders read. Runs in any environment with torch and transformers.
"""

import json
import os
import struct

ITEM_BYTES = {"BF16": 2, "F16": 2, "I32": 4}
GPTQ_BITS, GPTQ_GROUP = 4, 128


def write_checkpoint(config, folder, shard_bytes, gptq=False):
    """The configuration and empty weights, in files of so many bytes, or in one."""
    import torch
    from transformers import AutoModelForCausalLM

    os.makedirs(folder, exist_ok=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    own = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}  # a tied weight is there once
    kept = "F16" if gptq else "BF16"
    tensors = {name: (kept, list(t.shape)) for name, t in model.state_dict().items() if name in own}
    if gptq:
        tensors = _quantized(model, tensors)
        said = {
            "bits": GPTQ_BITS,
            "group_size": GPTQ_GROUP,
            "desc_act": True,
            "sym": True,
            "true_sequential": True,
            "damp_percent": 0.1,
            "model_name_or_path": None,
            "model_file_base_name": "model",
        }
        with open(os.path.join(folder, "quantize_config.json"), "w") as out:
            json.dump(said, out)
    _write_weights(tensors, folder, shard_bytes)
    config.architectures, config.torch_dtype = [type(model).__name__], "float16" if gptq else "bfloat16"
    config.save_pretrained(folder)


def _quantized(model, tensors):
    """The linear layers of the blocks as packed integers; a mixture's router stays as it is."""
    import torch

    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or name == "lm_head" or name.endswith(".gate"):
            continue
        wide, high = module.in_features, module.out_features
        groups = wide // GPTQ_GROUP
        del tensors[f"{name}.weight"]
        tensors |= {
            f"{name}.qweight": ("I32", [wide * GPTQ_BITS // 32, high]),
            f"{name}.qzeros": ("I32", [groups, high * GPTQ_BITS // 32]),
            f"{name}.scales": ("F16", [groups, high]),
            f"{name}.g_idx": ("I32", [wide]),
        }
    return tensors


def _write_weights(tensors, folder, shard_bytes):
    """``tensors``: name → (type, shape). In files of so many bytes, by name in each, as save_pretrained writes them; in
    one file where ``shard_bytes`` is None. One of over 100 GB cannot be mapped.
    """
    shards, held = [{}], 0
    for name, (kind, shape) in tensors.items():
        size = ITEM_BYTES[kind]
        for side in shape:
            size *= side
        if shard_bytes and held + size > shard_bytes and shards[-1]:
            shards.append({})
            held = 0
        shards[-1][name] = kind, shape, size
        held += size
    file_of = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if shard_bytes else "model.safetensors"
        told, at = {"__metadata__": {"format": "pt"}}, 0
        for name in sorted(shard, key=lambda name: (-ITEM_BYTES[shard[name][0]], name)):  # as safetensors writes them
            kind, shape, size = shard[name]
            told[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + size]}
            at += size
        header = json.dumps(told).encode()
        header += b" " * (-len(header) % 8)
        with open(os.path.join(folder, file), "wb") as out:
            out.write(struct.pack("<Q", len(header)) + header)
            out.truncate(8 + len(header) + at)
        file_of.update(dict.fromkeys(shard, file))
    if shard_bytes:
        with open(os.path.join(folder, "model.safetensors.index.json"), "w") as out:
            json.dump({"metadata": {}, "weight_map": file_of}, out)
