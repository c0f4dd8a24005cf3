"""The words that options and records choose from, the same in CLI, YAML and JSON.

In: nothing. Out: types and recipes for spec.py, for rules/, which says what goes together, and for the command line's
help. Never imports pydantic.
"""

import re
from typing import Any, Literal, get_args

from vramprobe.optimizers import OPTIMIZER_NAMES, OPTIMIZERS
from vramprobe.trainers import LOOPS, TRAINERS, TRL

Method = Literal["full", "lora", "qlora"]
Quant = Literal["none", "nf4", "nf4-single", "fp4", "int8"]
Dtype = Literal["bf16", "fp32", "fp16"]
Autocast = Literal["bf16", "fp16", "none"]
Attention = Literal["sdpa", "eager", "flash_attention_2"]
KbitPrep = Literal["none", "peft", "trl"]
Device = Literal["cuda", "cpu"]
#: How head and loss are computed: by the model's own forward, from all logits; or by TRL's fused head (its
#: ``chunked_nll``, and its ``nll`` since logits are no longer made), from tiles of them; or by Cut Cross-Entropy's
#: kernels, which make none.
Loss = Literal["nll", "chunked_nll", "cut_cross_entropy"]
#: Who computes the loss of a micro-batch, and of what (trainers.py).
Trainer = Literal[tuple(TRAINERS)]
#: What the training loop keeps from one step to the next (trainers.py).
LoopName = Literal[tuple(LOOPS)]
Weights = Literal["random", "pretrained"]
#: How several ranks share one model: torch's DDP; DeepSpeed's stages; FSDP2 (``fully_shard``) and FSDP1, both through
#: accelerate, that gather anew in backward or, under shard-grad-op, keep what forward gathered, or, under hybrid, share
#: the model out among the ranks of a group and keep it once in each group. ``tp`` divides every
#: layer, by transformers' ``tp_plan="auto"``. ``device-map`` has no ranks: one process, with transformers'
#: ``device_map="auto"``, whose layers lie on several cards.
Sharding = Literal[
    "ddp",
    "zero1",
    "zero2",
    "zero3",
    "fsdp",
    "fsdp-shard-grad-op",
    "fsdp-hybrid",
    "fsdp1",
    "fsdp1-shard-grad-op",
    "fsdp1-hybrid",
    "tp",
    "device-map",
]
#: How ranks that share each sequence bring keys and values to one another: all at once, or one rank's at a time.
CpRotation = Literal["allgather", "alltoall"]
#: What several ranks keep in host memory: the optimizer's state, the weights that it steps and their gradients; or that
#: and the parameters, which come to the card to be computed with.
Offload = Literal["none", "optimizer", "params"]
#: transformers' own names, and ``adamw_bnb_32bit`` for the optimizer that transformers has no name for.
Optim = Literal[tuple(OPTIMIZERS)]

#: In the order of a run. ``load`` builds the weights and quantises each as it comes, ``prepare`` casts and adds
#: adapters, ``batch`` puts the tokens on the device; then, each step: forward, backward, optimizer_step, zero_grad.
PhaseName = Literal["load", "prepare", "batch", "forward", "backward", "optimizer_step", "zero_grad"]

#: Recipes people name, as the two knobs they turn: the dtype the weights are loaded in, and autocast.
#: With the adapter dtype, these decide bytes per parameter and the dtype of most saved activations.
RECIPES: dict[str, dict[str, str]] = {
    "all-bf16": {"dtype": "bf16", "autocast": "none"},  # weights, gradients and AdamW state in bf16: 8 B/param
    "mixed": {"dtype": "fp32", "autocast": "bf16"},  # a trainer's bf16=True on an fp32 model: 16 B/param + cast copies
    "fp32": {"dtype": "fp32", "autocast": "none"},
    "lora-usual": {"dtype": "bf16", "autocast": "bf16", "lora_dtype": "fp32"},  # peft raises 16-bit adapters to fp32
}

#: Option → the words that it takes, of those whose words are listed here.
WORDS: dict[str, tuple[str, ...]] = {
    "method": get_args(Method),
    "recipe": tuple(RECIPES),
    "quant": get_args(Quant),
    "kbit_prep": get_args(KbitPrep),
    "dtype": get_args(Dtype),
    "lora_dtype": get_args(Dtype),
    "autocast": get_args(Autocast),
    "attn": get_args(Attention),
    "loss": get_args(Loss),
    "trainer": get_args(Trainer),
    "loop": (*get_args(LoopName), TRL),  # the last with TRL's loss, which spec.py resolves
    "weights": get_args(Weights),
    "optim": tuple(OPTIMIZER_NAMES),
    "sharding": get_args(Sharding),
    "cp_rotation": get_args(CpRotation),
    "offload": get_args(Offload),
    "device": ("auto", *get_args(Device)),
}
#: What people write for such a word, as letters and digits alone → the word.
ALIASES: dict[str, str] = {
    "bfloat16": "bf16", "torchbfloat16": "bf16",
    "float16": "fp16", "torchfloat16": "fp16", "half": "fp16",
    "float32": "fp32", "torchfloat32": "fp32", "float": "fp32",
    "fullfinetuning": "full", "fft": "full",
    "adam": "adamw_torch_fused", "adamw": "adamw_torch_fused", "adam8bit": "adamw_8bit", "pagedadam": "paged_adamw",
    "flashattention": "flash_attention_2", "flashattn": "flash_attention_2", "flashattn2": "flash_attention_2",
    "fa2": "flash_attention_2",
    "cce": "cut_cross_entropy",
    "plain": "trainer", "plainkeepsoutputs": "keeps-outputs", "accelerator": "accelerate",
    "fsdp2": "fsdp", "fullshard": "fsdp", "shardgradop": "fsdp-shard-grad-op", "hybridshard": "fsdp-hybrid",
    "fsdp2shardgradop": "fsdp-shard-grad-op", "fsdp2hybrid": "fsdp-hybrid",
    "zerostage1": "zero1", "zerostage2": "zero2", "zerostage3": "zero3",
    "distributeddataparallel": "ddp", "tensorparallel": "tp",
    "8bit": "int8", "llmint8": "int8",
}  # fmt: skip


def meant(option: str, given: Any) -> Any:
    """The word of ``option`` that ``given`` means, whatever its case and separators; ``given`` where it means none."""
    if isinstance(given, list | tuple):
        return type(given)(meant(option, one) for one in given)
    words = WORDS.get(option)
    if words is None or not isinstance(given, str) or given in words:
        return given
    plain = _letters(given)
    alias = ALIASES.get(plain)
    return next((word for word in words if _letters(word) == plain), alias if alias in words else given)


def _letters(text: str) -> str:
    return re.sub("[^a-z0-9]", "", text.lower())
