"""A traceback's frames → the phase of the run that ran out of memory.

In: frames as (path, line, function), outermost first. Out: a Phase. The names are those of transformers, TRL,
accelerate, DeepSpeed, Lightning and torch; of a path only what follows site-packages is kept, else the file's name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Frame(NamedTuple):
    """One line of a traceback."""

    path: str
    line: int
    function: str


@dataclass(frozen=True)
class Phase:
    """``name`` decides what helps; ``detail`` narrows it down; ``at``: the frame that tells, innermost one second."""

    name: str
    detail: str = ""
    at: tuple[str, ...] = ()


UNKNOWN = Phase("unknown")

#: Phases that contain others, the first that is found counts: (phase, path, function).
_AROUND: tuple[tuple[str, str, str], ...] = (
    ("load_best", r"", r"_load_best_model"),
    ("resume", r"", r"_load_from_checkpoint|_load_optimizer_and_scheduler|load_checkpoint|_load_checkpoint|load_state"),
    (
        "save",
        r"",
        r"save_model|_save_checkpoint|save_checkpoint|save_pretrained|_save_optimizer_and_scheduler|save_fsdp_\w+|"
        r"_zero3_consolidated_16bit_state_dict|\w*get_state_dict|full_state_dict|_full_\w*state_dict\w*|"
        r"safe_save_model_for_hf_trainer|save_state|_save_ckpt",
    ),
    ("save", r"torch/(?:serialization|distributed/checkpoint)", r"save|_save|async_save"),
    ("merge", r"", r"merge_and_unload|_unload_and_optionally_merge|merge_adapter|unmerge_adapter"),
    (
        "evaluation",
        r"",
        r"evaluate|evaluation_loop|prediction_loop|prediction_step|_evaluate|validation_step|eval_loop|eval_step",
    ),
    ("generation", r"", r"generate|_generate|_generate_and_score_completions|_sample|_beam_search"),
    ("generation", r"\bvllm/", r".*"),
    ("load", r"", r"from_pretrained|_load_pretrained_model|_load_state_dict_into_\w+|load_checkpoint_and_dispatch"),
)
#: Phases of a step; the innermost that is found counts.
_STEP: tuple[tuple[str, str, str], ...] = (
    (
        "optimizer_step",
        r"torch/optim/|bitsandbytes/optim/|apex/optimizers/|deepspeed/ops/adam/|transformers/optim",
        r".*",
    ),
    ("optimizer_step", r"deepspeed/runtime/", r"step|_take_model_step|_optimizer_step|initialize_optimizer_states"),
    ("optimizer_step", r"", r"optimizer_step|clip_grad_norm_"),
    (
        "backward",
        r"torch/(?:_tensor|autograd/\w+)\.py|accelerate/|deepspeed/|lightning",
        r"backward|_engine_run_backward",
    ),
    (
        "prepare",
        r"accelerate/|deepspeed/__init__|deepspeed/runtime/engine|torch/distributed/fsdp|lightning",
        r"prepare|_prepare_\w+|prepare_model|initialize|_configure_\w+|__init__|fully_shard",
    ),
    ("load", r"bitsandbytes/nn/modules\.py", r"to|cuda|_quantize"),
    ("to_device", r"torch/nn/modules/module\.py", r"to|cuda|_apply|convert|half|float|bfloat16"),
)
_LOSS = r"cross_entropy|fixed_cross_entropy|ForCausalLMLoss|ForCausalLM_loss|compute_loss_func"
#: Only where nothing above is found: backward recomputes checkpointed layers by their forward.
_FORWARD = rf"forward|training_step|compute_loss|_wrapped_call_impl|_call_impl|{_LOSS}"
_DETAILS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "evaluation": (
        (
            "gathering its logits",
            r"",
            r"nested_concat|torch_pad_and_concatenate|gather_function|nested_gather|pad_across_\w+",
        ),
    ),
    "optimizer_step": (
        ("creating the optimizer state", r"", r"_init_group|init_state|initialize_optimizer_states|_init_state"),
        ("temporaries of the foreach implementation", r"", r"_multi_tensor_\w+"),
        ("gradient clipping", r"", r"clip_grad_norm_|_get_total_norm|get_total_norm"),
    ),
    "backward": (("recomputing a checkpointed layer", r"", r"recompute_fn|unpack_hook|recompute"),),
    "forward": (("the loss", r"", _LOSS),),
    "prepare": (("creating the optimizer state", r"", r"initialize_optimizer_states"),),
}


def phase_of(frames: Sequence[Frame]) -> Phase:
    """The phase that a traceback, outermost frame first, tells of; UNKNOWN where no frame is of a known library."""
    frames = [frame for frame in frames if "/torch/utils/_contextlib" not in frame.path]
    for name, path, function in _AROUND:
        found = _find(frames, path, function)
        if found is not None:
            return _phase(name, found, frames)
    for frame in reversed(frames):
        for name, path, function in _STEP:
            if _matches(frame, path, function):
                return _phase(name, frame, frames)
    forward = next((frame for frame in reversed(frames) if _matches(frame, "", _FORWARD)), None)
    return UNKNOWN if forward is None else _phase("forward", forward, frames)


def _phase(name: str, told_by: Frame, frames: Sequence[Frame]) -> Phase:
    detail = next((text for text, *rule in _DETAILS.get(name, ()) if _find(frames, *rule) is not None), "")
    return Phase(name, detail, tuple(dict.fromkeys((shown(told_by), shown(frames[-1])))))


def _find(frames: Sequence[Frame], path: str, function: str) -> Frame | None:
    return next((frame for frame in frames if _matches(frame, path, function)), None)


def _matches(frame: Frame, path: str, function: str) -> bool:
    return (
        re.fullmatch(function, frame.function) is not None
        and re.search(path, frame.path.replace("\\", "/")) is not None
    )


def shown(frame: Frame) -> str:
    """A frame without the folders of whoever ran it, and without what a terminal would obey."""
    path = frame.path.replace("\\", "/")
    package = re.search(r"(?:site|dist)-packages/(.+)", path)
    text = f"{package[1] if package else path.rpartition('/')[2]}:{frame.line} in {frame.function}"
    return "".join(character for character in text if character.isprintable())
