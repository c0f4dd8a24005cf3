"""A traceback's frames → the phase of the run that ran out of memory.

In: frames as (path, line, function, source), outermost first. Out: a Phase. The rules are tables: names of torch,
transformers, TRL, accelerate, DeepSpeed, Megatron, verl and others. Of a path only what follows site-packages is kept,
else the file's name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Frame(NamedTuple):
    """One line of a traceback; ``source``: the code that it shows, empty where it shows none."""

    path: str
    line: int
    function: str
    source: str = ""


@dataclass(frozen=True)
class Phase:
    """``name`` decides what helps; ``detail`` narrows it down; ``at``: the frame that tells, innermost one second."""

    name: str
    detail: str = ""
    at: tuple[str, ...] = ()


class PhaseRule(NamedTuple):
    """A name, and the frames that show it: all three expressions match. ``function`` is the whole name."""

    name: str
    path: str = ""
    function: str = r".*"
    source: str = ""

    def shows(self, frame: Frame) -> bool:
        """Return True if ``frame`` matches this rule."""
        return (
            re.fullmatch(self.function, frame.function) is not None
            and re.search(self.path, frame.path.replace("\\", "/")) is not None
            and (not self.source or re.search(self.source, frame.source) is not None)
        )


UNKNOWN = Phase("unknown")

#: Phases that contain others: the first that is found counts.
AROUND = (
    PhaseRule("load_best", "", r"_load_best_model"),
    PhaseRule(
        "resume",
        "",
        r"_load_from_checkpoint|_load_optimizer_and_scheduler|load_checkpoint|_load_checkpoint|load_state|resume\w*",
    ),
    PhaseRule(
        "save",
        "",
        r"save_model|_save_checkpoint|save_checkpoint|save_pretrained|_save_optimizer_and_scheduler|save_fsdp_\w+|"
        r"_zero3_consolidated_16bit_state_dict|\w*get_state_dict|full_state_dict|_full_\w*state_dict\w*|"
        r"\w*optim_state_dict\w*|safe_save_model_for_hf_trainer|save_state|_save_ckpt|save_checkpoint_and_time|sharded_state_dict",
    ),
    PhaseRule("save", r"torch/(?:serialization|distributed/checkpoint)|dist_checkpointing", r"save|_save|async_save"),
    PhaseRule("merge", "", r"merge_and_unload|_unload_and_optionally_merge|merge_adapter|unmerge_adapter"),
    PhaseRule(
        "evaluation",
        "",
        r"evaluate|evaluation_loop|prediction_loop|prediction_step|_evaluate|validation_step|eval_loop|eval_step|"
        r"evaluate_and_print_results",
    ),
    PhaseRule("load", r"(?:\bvllm|sglang)/.*(?:model_loader|weight_utils)"),
    PhaseRule("generation", r"\b(?:vllm|sglang|lmdeploy|text_generation_server|comfy)/"),
    PhaseRule("generation", r"(?:diffusers|transformers)/pipelines/", r"__call__|forward|_forward|preprocess"),
    PhaseRule("generation", "", r"_?generate|_generate_and_score_completions|_sample|_beam_search|generate_sequences"),
    PhaseRule("generation", "", r"prefill|stream_chat|chat|inference|infer"),
    PhaseRule(
        "load", "", r"from_pretrained|_load_pretrained_model|_load_state_dict_into_\w+|load_checkpoint_and_dispatch"
    ),
)
_FORWARDS = r"forward|training_step|compute_loss|_wrapped_call_impl|_call_impl|forward_step|pre_forward"
_LOSS = (
    r"cross_entropy|fixed_cross_entropy|\w*ForCausalLM_?[lL]oss|compute_loss_func|vocab_parallel_cross_entropy|"
    r"vocab_parallel_\w*logits\w*|\w*_cross_entropy|compute_language_model_loss|loss_fn|loss_func"
)
_LOG_PROBS = (
    r"selective_log_softmax|_get_per_token_logps\w*|get_batch_logps|entropy_from_logits\w*|logprobs_from_logits\w*|"
    r"log_probs_from_logits|compute_log_probs?|compute_entropy|vocab_parallel_entropy|\w*per_token_logps\w*|"
    r"compute_entropys|_compute_logprob\w*|gather_logprobs\w*|compute_ref_log_prob|calculate_entropy|"
    r"entropy_from_logits_with_chunking|logprobs_of_labels|get_log_probs?|compute_logprobs"
)
_GATHER_FILES = (
    r"_fsdp_collectives|_fsdp_param_group|fsdp/_flat_param|fsdp/flat_param|fsdp/_unshard|fsdp/_runtime_utils|"
    r"zero/partition(?:ed_param_coordinator|_parameters)|megatron/core/distributed/(?:fsdp|param_and_grad)"
)
_GATHERS = (
    r"allocate|all_gather\w*|_?all_gather\w*|_all_gather\w*|_allgather\w*|foreach_all_gather\w*|unshard|_unshard\w*|"
    r"wait_for_unshard|_prefetch_unshard|_?alloc_\w+|_alloc_storage|fetch_sub_module|init_all_gather_outputs|"
    r"alloc_all_gather_outputs|start_param_sync|finish_param_sync|gather"
)
_COMPILED = r"torch/_inductor/|torchinductor|/inductor/"  # Inductor's own code, and what it wrote
#: Phases of a step; the innermost that is found counts.
STEP = (
    PhaseRule(
        "optimizer_step",
        r"torch/optim/|bitsandbytes/optim/|apex/optimizers/|deepspeed/ops/adam/|transformers/optim|torchao/optim|"
        r"optimizers/\w*(?:adam|muon|lion|shampoo)|/muon\.py",
    ),
    PhaseRule(
        "optimizer_step", r"deepspeed/runtime/", r"step|_take_model_step|_optimizer_step|initialize_optimizer_states"
    ),
    PhaseRule("optimizer_step", r"megatron/core/optimizer", r"step\w*|prepare_grads|_copy_\w+"),
    PhaseRule("optimizer_step", "", r"optimizer_step|clip_grad_norm_?|optim_step"),
    PhaseRule("backward", r"_aot_autograd/", r"backward|_backward\w*"),
    PhaseRule("backward", r"_fsdp_collectives", r"foreach_reduce\w*|reduce_scatter\w*"),
    PhaseRule(
        "backward",
        r"torch/(?:_tensor|autograd/\w+)\.py|accelerate/|deepspeed/|lightning|pipeline_parallel/schedules",
        r"backward|_engine_run_backward|backward_step\w*|custom_backward",
    ),
    PhaseRule("backward", "", r"pre_backward|post_backward|_pre_backward\w*|_post_backward\w*"),
    PhaseRule("load", r"zero/partition_parameters", r"wrapper|__init__|__exit__|_post_init_method"),
    PhaseRule(
        "prepare", r"peft/", r"prepare_model_for_\w+|get_peft_model|inject_adapter\w*|_create_and_replace|update_layer"
    ),
    PhaseRule(
        "prepare",
        "",
        r".*",
        r"\.prepare\(|\bfully_shard\(|\bFSDP\(|\bFullyShardedDataParallel\(|\bDDP\(|deepspeed\.initialize\(",
    ),
    PhaseRule(
        "prepare",
        r"accelerate/|deepspeed/__init__|deepspeed/runtime/|torch/distributed/fsdp|lightning",
        r"prepare|_prepare_\w+|prepare_model|initialize|_configure_\w+|__init__|fully_shard",
    ),
    PhaseRule(
        "prepare",
        r"megatron/core/(?:optimizer|distributed)",
        r"__init__|get_megatron_optimizer\w*|_build_\w+|build_\w+",
    ),
    PhaseRule("prepare", r"megatron/training", r"setup_model_and_optimizer|get_model|model_provider"),
    PhaseRule("load", r"bitsandbytes/nn/modules\.py", r"to|cuda|_quantize"),
    PhaseRule("to_device", r"torch/nn/modules/module\.py", r"to|cuda|_apply|convert|half|float|bfloat16"),
)
#: Only where nothing above is found: backward recomputes checkpointed layers by their forward.
FORWARD = (
    PhaseRule("forward", "", rf"{_FORWARDS}|{_LOSS}"),
    PhaseRule(
        "forward", "", rf"{_LOG_PROBS}|update_policy|concatenated_forward|get_batch_loss_metrics|_forward_micro_batch"
    ),
    PhaseRule(
        "forward",
        "",
        r"eager_attention_forward|sdpa_attention_forward|flash_attention_forward|scaled_dot_product_attention|softmax",
    ),
    PhaseRule("forward", r"_dynamo/|_aot_autograd/", r"compile_wrapper|_fn|runtime_wrapper"),
)
#: Only where no step is found either.
OTHERS = (
    PhaseRule("forward or backward", _GATHER_FILES, _GATHERS),
    PhaseRule("forward or backward", _COMPILED),
    PhaseRule("data", r"torch/utils/data|pin_memory"),
    PhaseRule(
        "load",
        r"safetensors|torch/serialization|core_model_loading|modeling_utils",
        r"load\w*|get_tensor|_load\w*|safe_open",
    ),
)
_TOWERS = (
    PhaseRule("the vision tower", r"(?:siglip|modeling_clip|clip_encoder|vision|_vit|intern_vit|dinov2)[^/]*\.py$"),
    PhaseRule(
        "the vision tower", "", r"get_image_features|get_video_features|get_vision_\w+|encode_images?|extract_feature"
    ),
    PhaseRule(
        "the vision tower", "", r".*", r"\bself\.(?:model\.)?(?:visual|vision_tower|vision_model|image_encoder)\("
    ),
)
#: What narrows a phase down: the first that is found counts. "recomputing" and the loss are of the step alone.
_LOSSES = (
    PhaseRule("log probabilities and entropy", "", _LOG_PROBS),
    PhaseRule("the loss", "", _LOSS),
)
_ATTENTION = (
    PhaseRule("attention", "", r"\w*attention_forward|scaled_dot_product_attention|_attn_implementation|_attn|baddbmm"),
    PhaseRule(
        "attention",
        "",
        r".*",
        r"scaled_dot_product_attention\(|softmax\(attn|softmax\(scores|torch\.matmul\(query|attn_weights =",
    ),
)
_GATHER = (PhaseRule("gathering sharded parameters", _GATHER_FILES, _GATHERS),)
DETAILS: dict[str, tuple[PhaseRule, ...]] = {
    "evaluation": (
        PhaseRule(
            "gathering its logits",
            "",
            r"nested_concat|torch_pad_and_concatenate|gather_function|nested_gather|pad_across_\w+|preprocess_logits\w*",
        ),
        *_TOWERS,
        *_LOSSES,
    ),
    "optimizer_step": (
        PhaseRule(
            "creating the optimizer state", "", r"_init_group|init_state\w*|initialize_optimizer_states|_init_state"
        ),
        PhaseRule("temporaries of the foreach implementation", "", r"_multi_tensor_\w+"),
        PhaseRule("gradient clipping", "", r"clip_grad_norm_?|_get_total_norm|get_total_norm"),
    ),
    "backward": (
        *_GATHER,
        PhaseRule("recomputing a checkpointed layer", "", r"recompute_fn|unpack_hook|recompute"),
        PhaseRule("reducing gradients", _GATHER_FILES, r"foreach_reduce\w*|reduce_scatter\w*"),
        PhaseRule("a compiled graph", _COMPILED),
    ),
    "forward": (
        *_GATHER,
        *_TOWERS,
        *_LOSSES,
        *_ATTENTION,
        PhaseRule("a compiled graph", _COMPILED),
    ),
    "forward or backward": (*_GATHER, PhaseRule("a compiled graph", _COMPILED)),
    "prepare": (
        PhaseRule("creating the optimizer state", "", r"initialize_optimizer_states"),
        PhaseRule("raising frozen weights to fp32", r"peft/", r"prepare_model_for_\w+"),
        PhaseRule("adding the adapter", r"peft/", r"get_peft_model|inject_adapter\w*|_create_and_replace|update_layer"),
        PhaseRule("gradient buffers", r"param_and_grad_buffer|distributed_data_parallel"),
    ),
    "load": (PhaseRule("partitioning parameters (zero.Init)", r"zero/partition_parameters"),),
    "generation": (
        *_TOWERS,
        PhaseRule("vLLM", r"\bvllm/"),
        PhaseRule("SGLang", r"\bsglang/"),
        PhaseRule("ComfyUI", r"\bcomfy/|ComfyUI"),
        PhaseRule("a diffusion pipeline", r"diffusers/"),
    ),
}
#: Frames that fill or pin the host's memory: what a CUDA call found none of is then not the GPU's.
HOST_COPIES = (
    PhaseRule("pinning host memory", "", r"pin_memory|_pin_memory\w*|empty_pinned\w*|alloc_pinned\w*"),
    PhaseRule("pinning host memory", "", r".*", r"pin_memory\s*=\s*True|\.pin_memory\(|cudaHostAlloc|cudaHostRegister"),
    PhaseRule(
        "copying to the host",
        "",
        r".*",
        r"\.to\(\s*(?:device\s*=\s*)?['\"]cpu['\"]|\.cpu\(\)|map_location\s*=\s*['\"]cpu['\"]",
    ),
)


def phase_of(frames: Sequence[Frame]) -> Phase:
    """The phase that a traceback, outermost frame first, tells of; UNKNOWN where no frame is of a known library."""
    frames = [frame for frame in frames if "/torch/utils/_contextlib" not in frame.path]
    for rule in AROUND:
        found = find((rule,), frames)
        if found is not None:
            return _phase(rule.name, found[1], frames)
    for rules in (STEP, FORWARD, OTHERS):
        found = find(rules, reversed(frames))
        if found is not None:
            return _phase(found[0].name, found[1], frames)
    return UNKNOWN


def host_copy(frames: Sequence[Frame]) -> str:
    """Return how the innermost frames take the host's memory; empty where they do not."""
    found = find(HOST_COPIES, frames[-2:])
    return found[0].name if found else ""


def find(rules: Iterable[PhaseRule], frames: Iterable[Frame]) -> tuple[PhaseRule, Frame] | None:
    """The first frame that one of ``rules`` matches, and that rule."""
    rules = tuple(rules)
    return next(((rule, frame) for frame in frames for rule in rules if rule.shows(frame)), None)


def _phase(name: str, told_by: Frame, frames: Sequence[Frame]) -> Phase:
    detail = next((rule.name for rule in DETAILS.get(name, ()) if find((rule,), frames) is not None), "")
    return Phase(name, detail, tuple(dict.fromkeys((shown(told_by), shown(frames[-1])))))


def shown(frame: Frame) -> str:
    """A frame without the folders of whoever ran it, and without what a terminal would obey."""
    path = frame.path.replace("\\", "/")
    package = re.search(r"(?:site|dist)-packages/(.+)", path)
    text = f"{package[1] if package else path.rpartition('/')[2]}:{frame.line} in {frame.function}"
    return "".join(character for character in text if character.isprintable())
