"""The phase that a traceback tells of, by frames of the libraries."""

from __future__ import annotations

import pytest

from vramprobe.explain.advice import ADVICE, MAX_CHANGES
from vramprobe.explain.phases import AROUND, DETAILS, FORWARD, OTHERS, STEP, UNKNOWN, Frame, host_copy, phase_of, shown

SITE = "/home/joe/env/lib/python3.10/site-packages/"
TRAINING = ("train.py:main", "transformers/trainer.py:train", "transformers/trainer.py:_inner_training_loop")
CALL = "torch/nn/modules/module.py:_call_impl"


def frames(*places: str) -> list[Frame]:
    split = [place.rpartition(":") for place in places]
    return [Frame(path if path == "train.py" else SITE + path, 7, function) for path, _, function in split]


@pytest.mark.parametrize(
    ("places", "name", "detail"),
    [
        (("bitsandbytes/nn/modules.py:to", "torch/nn/modules/module.py:convert"), "to_device", ""),
        (("torch/nn/modules/module.py:convert", "bitsandbytes/nn/modules.py:to"), "load", ""),
        (
            (
                *TRAINING,
                "transformers/trainer.py:training_step",
                "transformers/trainer.py:compute_loss",
                CALL,
                "transformers/models/llama/modeling_llama.py:forward",
            ),
            "forward",
            "",
        ),
        (
            (
                *TRAINING,
                "transformers/trainer.py:compute_loss",
                CALL,
                "transformers/models/llama/modeling_llama.py:forward",
                "transformers/loss/loss_utils.py:ForCausalLMLoss",
            ),
            "forward",
            "the loss",
        ),
        (
            (
                *TRAINING,
                "accelerate/accelerator.py:backward",
                "torch/_tensor.py:backward",
                "torch/autograd/graph.py:_engine_run_backward",
            ),
            "backward",
            "",
        ),
        (
            (
                *TRAINING,
                "accelerate/accelerator.py:backward",
                "torch/autograd/graph.py:_engine_run_backward",
                "torch/utils/checkpoint.py:unpack_hook",
                "torch/utils/checkpoint.py:recompute_fn",
                CALL,
                "transformers/models/llama/modeling_llama.py:forward",
            ),
            "backward",
            "recomputing a checkpointed layer",
        ),
        (
            (
                *TRAINING,
                "accelerate/accelerator.py:backward",
                "accelerate/utils/deepspeed.py:backward",
                "deepspeed/runtime/engine.py:step",
                "deepspeed/runtime/zero/stage_1_and_2.py:step",
                "torch/optim/adamw.py:_init_group",
            ),
            "optimizer_step",
            "creating the optimizer state",
        ),
        (
            (
                *TRAINING,
                "accelerate/optimizer.py:step",
                "torch/optim/adamw.py:step",
                "torch/optim/adamw.py:adamw",
                "torch/optim/adamw.py:_multi_tensor_adamw",
            ),
            "optimizer_step",
            "temporaries of the foreach implementation",
        ),
        (
            (
                *TRAINING,
                "transformers/trainer.py:_maybe_log_save_evaluate",
                "transformers/trainer.py:evaluate",
                "transformers/trainer.py:evaluation_loop",
                "transformers/trainer_pt_utils.py:nested_concat",
            ),
            "evaluation",
            "gathering its logits",
        ),
        (
            (
                *TRAINING,
                "transformers/trainer.py:_maybe_log_save_evaluate",
                "transformers/trainer.py:_save_checkpoint",
                "transformers/trainer.py:save_model",
                "accelerate/accelerator.py:get_state_dict",
                "deepspeed/runtime/engine.py:_zero3_consolidated_16bit_state_dict",
            ),
            "save",
            "",
        ),
        ((*TRAINING, "transformers/trainer.py:_load_best_model", "torch/serialization.py:load"), "load_best", ""),
        (("train.py:main", "peft/tuners/lora/model.py:merge_and_unload"), "merge", ""),
        (
            (
                "train.py:main",
                "transformers/modeling_utils.py:from_pretrained",
                "transformers/core_model_loading.py:_materialize_copy",
            ),
            "load",
            "",
        ),
        (("train.py:main", "torch/nn/modules/module.py:to", "torch/nn/modules/module.py:_apply"), "to_device", ""),
        (
            (
                *TRAINING,
                "accelerate/accelerator.py:prepare",
                "accelerate/accelerator.py:_prepare_deepspeed",
                "deepspeed/__init__.py:initialize",
                "deepspeed/runtime/engine.py:_configure_zero_optimizer",
            ),
            "prepare",
            "",
        ),
        (
            (
                "train.py:main",
                "trl/trainer/grpo_trainer.py:_generate_and_score_completions",
                "transformers/generation/utils.py:generate",
                CALL,
            ),
            "generation",
            "",
        ),
        (("train.py:main",), "unknown", ""),
        (
            (
                *TRAINING,
                "torch/distributed/fsdp/_flat_param.py:unshard",
                "torch/distributed/fsdp/_flat_param.py:_alloc_storage",
            ),
            "forward or backward",
            "gathering sharded parameters",
        ),
        ((*TRAINING, CALL, "torch/distributed/fsdp/_flat_param.py:unshard"), "forward", "gathering sharded parameters"),
        (
            (
                *TRAINING,
                "torch/_tensor.py:backward",
                "deepspeed/runtime/zero/partition_parameters.py:_allgather_params_coalesced",
            ),
            "backward",
            "gathering sharded parameters",
        ),
        (("train.py:main", "torch/_inductor/output_code.py:__call__"), "forward or backward", "a compiled graph"),
        (
            ("train.py:main", "torch/_dynamo/eval_frame.py:compile_wrapper", "torch/_inductor/output_code.py:__call__"),
            "forward",
            "a compiled graph",
        ),
        (
            ("train.py:main", "transformers/integrations/sdpa_attention.py:sdpa_attention_forward"),
            "forward",
            "attention",
        ),
        (
            (
                "train.py:main",
                "transformers/models/siglip/modeling_siglip.py:forward",
                "transformers/integrations/sdpa_attention.py:sdpa_attention_forward",
            ),
            "forward",
            "the vision tower",
        ),
        (
            (
                "train.py:main",
                "megatron/core/pipeline_parallel/schedules.py:forward_step",
                "megatron/core/tensor_parallel/cross_entropy.py:forward",
            ),
            "forward",
            "",
        ),
        (("train.py:main", "megatron/core/optimizer/distrib_optimizer.py:_build_model_gbuf_range_map"), "prepare", ""),
        (("train.py:main", "vllm/worker/worker.py:execute_model"), "generation", "vLLM"),
        (("train.py:main", "vllm/model_executor/model_loader/loader.py:load_model"), "load", ""),
        (("train.py:main", "safetensors/torch.py:load_file"), "load", ""),
    ],
)
def test_phases(places: tuple[str, ...], name: str, detail: str) -> None:
    found = phase_of(frames(*places))
    assert (found.name, found.detail) == (name, detail)
    assert "/home/joe" not in str(found)


def test_a_source_line_tells_what_no_function_name_does() -> None:
    told = [Frame("/job/x.py", 3, "setup", "a, b = accelerator.prepare(model, optimizer)")]
    assert phase_of(told).name == "prepare"
    assert phase_of([Frame("/job/x.py", 3, "setup", "a = model(b)")]) == UNKNOWN
    tower = [Frame("/job/x.py", 3, "forward", "embeds = self.visual(pixels)"), Frame("/job/y.py", 4, "forward")]
    assert phase_of(tower).detail == "the vision tower"
    assert host_copy([Frame("/job/x.py", 3, "move", "x = x.to('cpu')")]) == "copying to the host"
    assert host_copy([Frame("/job/x.py", 3, "move", "x = x.to('cuda')")]) == ""
    assert phase_of([Frame("/home/vision/train.py", 3, "forward")]).detail == ""


def test_no_frames_tell_nothing() -> None:
    assert phase_of([]) == UNKNOWN


def test_a_frame_is_shown_without_folders_and_control_characters() -> None:
    assert shown(Frame(SITE + "torch/_tensor.py", 3, "backward")) == "torch/_tensor.py:3 in backward"
    assert shown(Frame(r"C:\Users\joe\secret\train.py", 3, "main")) == "train.py:3 in main"
    assert shown(Frame("/secret/x.py", 3, "f\x1b]0;title\x07")) == "x.py:3 in f]0;title"


def test_every_row_of_advice_is_of_a_phase_and_a_detail_that_rules_name() -> None:
    phases = {rule.name for rules in (AROUND, STEP, FORWARD, OTHERS) for rule in rules} | {"unknown"}
    details = {rule.name for rules in DETAILS.values() for rule in rules} | {
        "logits",
        "embedding or head",
        "load",
        "outside",
    }
    beside = {"larger than the GPU", "bug", "host", "pinned memory", "driver", "MPS"}
    for key, changes in ADVICE.items():
        phase, _, detail = key.partition(": ")
        assert phase in phases | beside, key
        assert not detail or detail in details, key
        assert 0 < len(changes) <= MAX_CHANGES, key
        assert len(set(changes)) == len(changes), key
    assert set(DETAILS) <= phases
    assert phases - set(ADVICE) == {"forward or backward"}  # that of forward or of backward
    assert {f"{phase}: {rule.name}" for phase in ("generation", "prepare") for rule in DETAILS[phase]} <= {
        *ADVICE,
        "prepare: creating the optimizer state",
    }
