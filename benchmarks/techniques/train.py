"""A fine-tuning script as users of transformers' Trainer write it; each technique is switched on by one argument.

    train.py --model meta-llama/Llama-3.1-8B --adapter 'LoraConfig(target_modules="all-linear")' [TrainingArguments]

``--quantization``, ``--adapter``, ``--patch`` and the like are Python, as the technique's own documentation has it, so
that a new technique is a row of the registry and no code here. Nothing in it knows of vramprobe.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import peft
import torch
import transformers
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments


@dataclass
class Arguments:
    """Arguments of the training."""

    model: str
    seq_len: int = 2048
    dtype: str = "bfloat16"
    attn: str = "sdpa"
    quantization: str = ""  # a quantization config of transformers
    adapter: str = ""  # a PeftConfig
    device_map: str = ""  # where it is loaded; on the host without it, or on the GPU with a quantization config
    patch: str = ""  # run before the model is made
    loaded: str = ""  # run with the model before it has an adapter
    then: str = ""  # run with the model that is trained
    optimizer: str = ""  # an optimizer of `model` that TrainingArguments has no name for


class Rows(torch.utils.data.Dataset):
    """Tokens of no meaning: what a step allocates does not depend on them."""

    def __init__(self, length: int, vocabulary: int) -> None:
        self.length, self.vocabulary = length, vocabulary

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(self.length) + index) % self.vocabulary
        return {"input_ids": tokens, "labels": tokens}


class _Names(dict):
    """Names that transformers and peft offer, each loaded when it is asked for."""

    def __missing__(self, name: str):
        for package in (transformers, peft):
            if hasattr(package, name):
                return getattr(package, name)
        raise KeyError(name)


def _made(words: str, **more):
    """The value of a user's Python, imports before it; names of transformers, peft and torch are known."""
    *before, last = words.split("; ")
    names = _Names(torch=torch, **more)
    for line in before:
        exec(line, {}, names)
    return eval(last, {}, names)


def main() -> None:
    """Train as the arguments say."""
    given, training = HfArgumentParser((Arguments, TrainingArguments)).parse_args_into_dataclasses()
    if given.patch:
        exec(given.patch, {})
    options = {"dtype": getattr(torch, given.dtype), "attn_implementation": given.attn}
    if given.quantization:
        options |= {"quantization_config": _made(given.quantization), "device_map": {"": 0}}
    if given.device_map:
        options |= {"device_map": given.device_map}
    model = AutoModelForCausalLM.from_pretrained(given.model, **options)
    if given.loaded:
        exec(given.loaded, {"model": model})
    if given.adapter:
        if training.gradient_checkpointing:
            model.enable_input_require_grads()
        model = peft.get_peft_model(model, _made(given.adapter))
        model.print_trainable_parameters()
    if given.then:
        exec(given.then, {"model": model})
    rows = Rows(given.seq_len, model.config.get_text_config().vocab_size)
    optimizer = _made(given.optimizer, model=model.cuda()) if given.optimizer else None
    Trainer(model, training, train_dataset=rows, optimizers=(optimizer, None)).train()


if __name__ == "__main__":
    sys.exit(main())
