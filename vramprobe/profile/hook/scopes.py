"""Phases of a run outside its steps (evaluation, save, an engine's start), and those of a rollout within them.

In: modules of libraries as they are imported (the tables below). Out: each function's work is one phase of this
process, whatever forwards run in it; nothing where the process has no watch.
"""

import contextlib
import functools
import inspect
import sys

from vramprobe_values.imports import when_imported

#: (module, class or None, function, phase). A subclass that overrides a method calls it, or a function of this table.
_NAMED = (
    ("transformers.trainer", "Trainer", "evaluate", "evaluation"),
    ("transformers.trainer", "Trainer", "predict", "evaluation"),
    ("transformers.trainer", "Trainer", "_save_checkpoint", "save"),
    ("transformers.trainer", "Trainer", "save_model", "save"),
    ("transformers.trainer", "Trainer", "_load_best_model", "load_best"),
    ("transformers.trainer", "Trainer", "_load_from_checkpoint", "resume"),
    ("transformers.trainer", "Trainer", "_load_optimizer_and_scheduler", "resume"),
    ("transformers.modeling_utils", "PreTrainedModel", "save_pretrained", "save"),
    ("peft.peft_model", "PeftModel", "save_pretrained", "save"),
    ("accelerate.accelerator", "Accelerator", "save_state", "save"),
    ("accelerate.accelerator", "Accelerator", "save_model", "save"),
    ("accelerate.accelerator", "Accelerator", "get_state_dict", "save"),
    ("accelerate.accelerator", "Accelerator", "load_state", "resume"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine", "save_checkpoint", "save"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine", "save_16bit_model", "save"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine", "load_checkpoint", "resume"),
    ("torch.distributed.checkpoint.state_dict", None, "get_state_dict", "save"),
    ("torch.distributed.checkpoint.state_dict", None, "get_model_state_dict", "save"),
    ("torch.distributed.checkpoint.state_dict", None, "get_optimizer_state_dict", "save"),
    ("torch.distributed.checkpoint.state_dict_saver", None, "save", "save"),
    ("torch.distributed.checkpoint.state_dict_loader", None, "load", "resume"),
    ("peft.tuners.tuners_utils", "BaseTuner", "merge_and_unload", "merge"),
    ("axolotl.cli.utils.lora_merge", None, "merge_lora_sharded_efficient", "merge"),
    ("torchtune.modules.peft._utils", None, "get_merged_lora_ckpt", "merge"),
    ("torchtune.training._distributed", None, "gather_cpu_state_dict", "save"),
    ("torchtune.training._distributed", None, "get_full_optimizer_state_dict", "save"),
    ("torchtune.training._distributed", None, "load_from_full_optimizer_state_dict", "resume"),
    ("torchtune.training.checkpointing._checkpoint_client", "CheckpointClient", "save_checkpoint", "save"),
    ("torchtune.training.checkpointing._checkpointer", "FullModelHFCheckpointer", "save_checkpoint", "save"),
    ("transformers.generation.utils", "GenerationMixin", "generate", "generation"),
    ("safetensors.torch", None, "save_file", "save"),
    ("torch", None, "save", "save"),
    ("vllm.v1.worker.gpu_worker", "Worker", "load_model", "engine_load"),
    ("vllm.v1.worker.gpu_worker", "Worker", "determine_available_memory", "engine_profiling"),
    ("vllm.v1.worker.gpu_worker", "Worker", "initialize_from_config", "engine_kv_cache"),
    ("vllm.v1.worker.gpu_worker", "Worker", "compile_or_warm_up_model", "engine_warmup"),
)
#: The same of a step of reinforcement learning: it belongs to the step whose rollout it makes.
_OF_A_ROLLOUT = (
    ("vllm.entrypoints.llm", "LLM", "generate", "generation"),
    ("vllm.entrypoints.llm", "LLM", "chat", "generation"),
    ("vllm.entrypoints.llm", "LLM", "sleep", "sleep"),
    ("vllm.entrypoints.llm", "LLM", "wake_up", "wake_up"),
    ("vllm.v1.worker.gpu_worker", "Worker", "sleep", "sleep"),
    ("vllm.v1.worker.gpu_worker", "Worker", "wake_up", "wake_up"),
    ("trl.generation.vllm_generation", "VLLMGeneration", "sync_weights", "weight_sync"),
    ("trl.trainer.grpo_trainer", "GRPOTrainer", "_move_model_to_vllm", "weight_sync"),
    ("trl.trainer.grpo_trainer", "GRPOTrainer", "_get_per_token_logps", "log_probs"),
    ("trl.trainer.grpo_trainer", "GRPOTrainer", "_get_per_token_logps_and_entropies", "log_probs"),
    ("trl.trainer.rloo_trainer", "RLOOTrainer", "_get_per_token_logps_and_entropies", "log_probs"),
    ("trl.experimental.online_dpo.online_dpo_trainer", "OnlineDPOTrainer", "_move_model_to_vllm", "weight_sync"),
    ("trl.experimental.online_dpo.online_dpo_trainer", "OnlineDPOTrainer", "_forward", "log_probs"),
    ("trl.scripts.vllm_serve", "WeightSyncWorkerExtension", "update_named_param", "weight_sync"),
    ("swift.rlhf_trainers.rollout_mixin", "RolloutTrainerMixin", "_move_model_to_vllm", "weight_sync"),
    ("swift.rlhf_trainers.grpo_trainer", "GRPOTrainer", "_get_per_token_logps_and_entropies", "log_probs"),
    ("verl.workers.engine_workers", "ActorRolloutRefWorker", "compute_log_prob", "log_probs"),
    ("verl.workers.engine_workers", "ActorRolloutRefWorker", "compute_ref_log_prob", "ref_log_probs"),
    ("verl.workers.engine_workers", "ActorRolloutRefWorker", "update_weights", "weight_sync"),
    (
        "verl.workers.rollout.vllm_rollout.utils",
        "vLLMColocateWorkerExtension",
        "update_weights_from_ipc",
        "weight_sync",
    ),
)
_WITHIN_A_LOSS = ("trl.", "swift.")  # log-probabilities, which their losses compute by the same function
_ONLY_WITH_AN_ARGUMENT = ("_load_optimizer_and_scheduler",)  # called with None where nothing is resumed


def install(watches):
    """``watches``: the list of this process's own, which may be empty still."""
    for module in dict.fromkeys(row[0] for row in (*_NAMED, *_OF_A_ROLLOUT)):
        when_imported(module, functools.partial(_name, watches))


def _name(watches, module):
    for row in (*_NAMED, *_OF_A_ROLLOUT):
        of, kind, function, phase = row
        owner = module if kind is None else getattr(module, kind, None)
        run = getattr(owner, function, None) if of == module.__name__ else None
        if run is not None:
            setattr(owner, function, _within(watches, phase, run, is_of_step=row in _OF_A_ROLLOUT))


def _within(watches, phase, run, is_of_step):
    def scope(args, kwargs):
        phases = watches[-1].phases if watches else None
        if run.__name__ in _ONLY_WITH_AN_ARGUMENT and all(one is None for one in (*args[1:], *kwargs.values())):
            phases = None
        if phase == "generation" and not is_of_step and phases is not None and not phases.is_outside:
            phases = None  # of a step, as GRPO's: its forwards say so
        if (
            phase == "log_probs"
            and run.__module__.startswith(_WITHIN_A_LOSS)
            and sys.modules["torch"].is_grad_enabled()
        ):
            phases = None  # they are a forward
        return contextlib.nullcontext() if phases is None else phases.scope(phase, is_of_step=is_of_step)

    @functools.wraps(run)
    def within(*args, **kwargs):
        with scope(args, kwargs):
            return run(*args, **kwargs)

    @functools.wraps(run)
    async def awaited(*args, **kwargs):
        with scope(args, kwargs):
            return await run(*args, **kwargs)

    return awaited if inspect.iscoroutinefunction(run) else within
