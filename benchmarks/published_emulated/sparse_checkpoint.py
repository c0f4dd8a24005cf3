"""A checkpoint of any size that takes no room: real safetensors headers over files of holes, which read as zeros.

    sparse_checkpoint.py CONFIG.json FOLDER

Real loaders read it. After ../shared/emulator/try/sparse_checkpoint.py.
"""

import json
import os
import struct
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

MAX_SHARD_BYTES = 4 << 30  # one file of over 100 GB cannot be mapped
ITEM_BYTES = 2  # BF16


def write(config, folder):
    """The model of ``config`` in bfloat16, in as many files as it needs."""
    os.makedirs(folder, exist_ok=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shards, at, file_of = [{}], 0, {}
    own = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}  # a tied weight is there once
    for name, tensor in model.state_dict().items():
        if name not in own:
            continue
        size = tensor.numel() * ITEM_BYTES
        if at + size > MAX_SHARD_BYTES and shards[-1]:
            shards.append({})
            at = 0
        shards[-1][name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        header = json.dumps({"__metadata__": {"format": "pt"}, **shard}).encode()
        header += b" " * (-len(header) % 8)
        with open(os.path.join(folder, file), "wb") as out:
            out.write(struct.pack("<Q", len(header)) + header)
            out.truncate(8 + len(header) + max(tensor["data_offsets"][1] for tensor in shard.values()))
        file_of.update(dict.fromkeys(shard, file))
    with open(os.path.join(folder, "model.safetensors.index.json"), "w") as out:
        json.dump({"metadata": {}, "weight_map": file_of}, out)
    config.architectures, config.torch_dtype = [type(model).__name__], "bfloat16"
    config.save_pretrained(folder)


if __name__ == "__main__":
    with open(sys.argv[1]) as given:
        write(AutoConfig.for_model(**json.load(given)), sys.argv[2])
