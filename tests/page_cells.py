"""Random cells of the page: words that its engine and predict are asked about, and that the oracles freeze.

In: a random.Random. Out: a cell's words, some impossible.
"""

from typing import get_args

from vramprobe import catalog, spec
from vramprobe.choices import TENSOR_PARALLEL, CpRotation, Sharding
from vramprobe.rules.sharding import DTENSOR_OPTIMIZERS, FSDP2, HYBRID, ONE_GROUP


def some_options(rng):
    """A random cell's words, some impossible."""
    method = rng.choice(get_args(spec.Method))
    words = {
        "model": rng.choice([entry.name for entry in catalog.list_models()]),
        "method": method,
        "device": rng.choice(["cuda", "cuda", "cpu"]),
        "batch_size": rng.choice([1, 2, 3, 16]),
        "seq_len": rng.choice([1, 128, 1000, 2048, 8192]),
        "gradient_checkpointing": rng.random() < 0.5,
        "optim": rng.choice(get_args(spec.Optim)),
        "grad_accum": rng.choice([1, 4, 9]),
        "attn": rng.choice([None, "eager", "flash_attention_2"]),
        "dtype": rng.choice([None, "fp32"]),
        "autocast": rng.choice([None, "bf16", "none"]),
        "fused_linear_cross_entropy": rng.random() < 0.25,
    }
    if method != "full":
        words |= {
            "lora_r": rng.choice([8, 64]),
            "lora_dropout": rng.choice([None, 0.1]),
            "lora_targets": rng.choice(["all-linear", "q_v"]),
            "lora_dtype": rng.choice([None, "bf16"]),
        }
    if method == "qlora":
        words |= {
            "quant": rng.choice([None, "fp4", "int8", "nf4-single"]),
            "kbit_prep": rng.choice(get_args(spec.KbitPrep)),
        }
    words["dora"] = rng.random() < (0.02 if method == "full" else 0.3)
    if rng.random() < 0.1:
        words["num_layers"] = rng.choice([1, 2, 5, 30])
    if rng.random() < 0.3:
        words |= {"num_gpus": rng.choice([2, 3, 8, 1000]), "sharding": rng.choice(get_args(Sharding))}
    return {name: value for name, value in words.items() if value is not None}


def some_ranks(rng):
    """A random rank's words: of groups, of shared sequences, offloaded; some impossible."""
    model = rng.choice(["llama-3.2-1b", "qwen2.5-0.5b", "llama-3.1-8b", "mistral-7b-v0.3", "pythia-1b"])
    words = some_options(rng) | {"model": model, "device": "cuda", "seq_len": rng.choice([512, 1000, 2048])}
    words |= {"num_gpus": rng.choice([2, 8, 16, 64]), "optim": rng.choice(["adamw_torch", "adamw_torch_fused", "sgd"])}
    words["fused_linear_cross_entropy"] = rng.random() < 0.05
    words["sharding"] = rng.choice([*HYBRID, *HYBRID, *ONE_GROUP])
    if (words["sharding"] in HYBRID and rng.random() < 0.5) or rng.random() < 0.05:
        words["shard_size"] = rng.choice([2, 4, 5, 8])
    if rng.random() < 0.3:
        words |= {"cp_size": rng.choice([2, 4]), "sharding": rng.choice([*FSDP2, "fsdp1"])}
        words["cp_rotation"] = rng.choice(get_args(CpRotation))
        words.pop("attn", None)
    elif rng.random() < 0.5:
        words["offload"] = rng.choice(["params", "optimizer"])
    return words


def some_of_one_batch(rng, sharding):
    """A random cell whose cards have one batch; some impossible."""
    models = ["llama-3.2-1b", "qwen2.5-0.5b", "llama-3.1-8b", "mistral-7b-v0.3", "qwen3-0.6b", "gemma-2-2b"]
    words = some_options(rng) | {"model": rng.choice(models), "device": "cuda", "seq_len": rng.choice([1, 512, 2048])}
    words |= {"sharding": sharding, "num_gpus": rng.choice([2, 2, 3, 4, 8])}
    words["fused_linear_cross_entropy"] = rng.random() < 0.05
    if rng.random() < 0.9:
        words.pop("attn", None)
    if sharding == TENSOR_PARALLEL and rng.random() < 0.8:  # of what it takes; the rest is refused
        words |= {"dora": False, "optim": rng.choice(DTENSOR_OPTIMIZERS)}
        words |= {} if words["method"] == "full" else {"lora_targets": "q_v"}
    for name, value in (("offload", "params"), ("cp_size", 2), ("shard_size", 2), ("cp_rotation", "alltoall")):
        if rng.random() < 0.03:
            words[name] = value
    return words


def some_replayed_rank(rng):
    """A random rank's words, of a few layers; some impossible."""
    models = ["llama-3.2-1b", "qwen2.5-0.5b", "llama-3.1-8b", "mistral-7b-v0.3", "gemma-2-2b", "pythia-1b"]
    words = some_options(rng) | {"model": rng.choice(models), "device": "cuda", "seq_len": rng.choice([512, 2048])}
    words |= {"sharding": rng.choice([*ONE_GROUP, *HYBRID]), "num_gpus": rng.choice([2, 8, 16]), "dora": False}
    words |= {"num_layers": rng.choice([2, 5, 12]), "fused_linear_cross_entropy": False}
    words["optim"] = rng.choice(["adamw_torch", "adamw_torch_fused", "sgd", "adamw_bnb_8bit"])
    if words["sharding"] in HYBRID:
        words |= rng.choice([{"num_gpus": 16}, {"num_gpus": 8, "shard_size": rng.choice([2, 4])}])
    return words
