"""verl's and ms-swift's commands for GRPO as their examples have them, on prompts of a few words.

In: a row of grpo.py as JSON. Out: none; this process becomes the command. Both are unmodified; grpo.md names what
differs from their examples.
"""

import json
import os
import sys
from pathlib import Path

FOLDER = Path("out") / "stacks"


def rows():
    """Prompts with an answer, as both stacks read them: (JSON lines, messages)."""
    for number in range(64):
        question = f"What is {number} plus {number}? Let's think step by step and output the final answer after ####."
        yield number, [{"role": "user", "content": question}]


def verl(told):
    """examples/tuning/7b/qwen2-7b_grpo_2_h800_fsdp_vllm.sh of verl 0.4 to 0.6."""
    import pandas

    data = [
        {
            "data_source": "openai/gsm8k",
            "prompt": messages,
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(2 * number)},
            "extra_info": {"split": "train", "index": number},
        }
        for number, messages in rows()
    ]
    pandas.DataFrame(data).to_parquet(FOLDER / "rows.parquet")
    files = str((FOLDER / "rows.parquet").absolute())
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    offload, micro = str(told["offload"]), told["micro_batch"]
    return "-m", [
        "verl.trainer.main_ppo",
        "algorithm.adv_estimator=grpo",
        f"data.train_files={files}",
        f"data.val_files={files}",
        f"data.train_batch_size={told['prompts']}",
        f"data.max_prompt_length={told['prompt']}",
        f"data.max_response_length={told['completion']}",
        "data.filter_overlong_prompts=True",
        "data.truncation=error",
        f"actor_rollout_ref.model.path={told['model']}",
        f"{actor}.optim.lr=1e-6",
        f"{actor}.ppo_mini_batch_size={told['prompts']}",
        f"{actor}.ppo_micro_batch_size_per_gpu={micro}",
        f"{actor}.use_kl_loss=True",
        f"{actor}.kl_loss_coef=0.001",
        f"{actor}.kl_loss_type=low_var_kl",
        f"{actor}.entropy_coeff=0",
        "actor_rollout_ref.model.enable_gradient_checkpointing=True",
        f"{actor}.fsdp_config.param_offload={offload}",
        f"{actor}.fsdp_config.optimizer_offload={offload}",
        f"{rollout}.log_prob_micro_batch_size_per_gpu={micro}",
        f"{rollout}.tensor_model_parallel_size={told['gpus']}",
        f"{rollout}.name=vllm",
        f"{rollout}.gpu_memory_utilization={told['utilization']}",
        f"{rollout}.n=5",
        f"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu={micro}",
        "actor_rollout_ref.ref.fsdp_config.param_offload=True",
        "algorithm.use_kl_in_reward=False",
        "trainer.critic_warmup=0",
        "trainer.logger=[console]",
        f"trainer.n_gpus_per_node={told['gpus']}",
        "trainer.nnodes=1",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        # not of the example: no flash-attn, two steps, a host of two cores, vLLM's eager mode
        "actor_rollout_ref.model.use_remove_padding=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "trainer.val_before_train=False",
        "trainer.total_epochs=1",
        "trainer.total_training_steps=2",
        f"{rollout}.agent.num_workers=1",
        "reward.num_workers=1",
        "data.dataloader_num_workers=0",
        f"{rollout}.enforce_eager=True",
        "ray_kwargs.ray_init.num_cpus=16",
    ]


def swift(told):
    """The GRPO command of ms-swift's docs, vLLM in the trainer's process."""
    with (FOLDER / "rows.jsonl").open("w") as file:
        for number, messages in rows():
            print(json.dumps({"messages": messages, "solution": str(2 * number)}), file=file)
    options = {
        "rlhf_type": "grpo",
        "model": told["model"],
        "use_hf": "true",
        "model_type": told["model_type"],
        "tuner_type": "lora",
        "dataset": str(FOLDER / "rows.jsonl"),
        "reward_funcs": "format",
        "use_vllm": "true",
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": told["utilization"],
        "vllm_max_model_len": told["completion"] + 512,
        "vllm_enforce_eager": "true",
        "sleep_level": 1,
        "torch_dtype": "bfloat16",
        "max_completion_length": told["completion"],
        "per_device_train_batch_size": 8,
        "num_generations": 8,
        "max_steps": 3,
        "save_strategy": "no",
        "report_to": "none",
        "output_dir": str(FOLDER / "swift"),
    }
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    return str(Path(sys.executable).with_name("swift")), ["rlhf", *words]


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    FOLDER.mkdir(parents=True, exist_ok=True)
    script, words = {"verl": verl, "swift": swift}[told["stack"]](told)
    os.execv(sys.executable, [sys.executable, script, *words])
