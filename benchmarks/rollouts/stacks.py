"""The commands of GRPO by verl, by ms-swift, by Unsloth, and by TRL beside a server, row by row, as their examples have
them but for what stacks.md names.

In: a row. Out: the command's words, and what a table calls it. grpo.py runs them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FOLDER = Path("out") / "stacks"  # from the folder that the command is run in
VERL = {
    "stack": "verl",
    "model": "Qwen/Qwen2.5-7B-Instruct",
    "gpus": 2,
    "prompts": 16,
    "prompt": 512,
    "completion": 256,
    "micro_batch": 8,
}
SWIFT = {"stack": "ms-swift", "model": "Qwen/Qwen2.5-3B-Instruct", "gpus": 1, "completion": 256, "utilization": 0.4}
SERVER = {
    "stack": "trl-server",
    "model": "Qwen/Qwen2.5-1.5B-Instruct",
    "gpus": 2,
    "completion": 1024,
    "lora": False,
    "utilization": 0.3,
    "sleep": False,
    "mode": "server",
}
ROWS: tuple[dict[str, Any], ...] = (
    {**VERL, "utilization": 0.6},
    {**VERL, "utilization": 0.3},
    {**SWIFT, "sleep": 1},
    {**SWIFT, "sleep": 0},
    SERVER,
    {
        "stack": "unsloth",
        "model": "unsloth/Qwen3-4B",
        "gpu": "RTX-4090",
        "gpus": 1,
        "prompt": 256,
        "completion": 1024,
        "utilization": 0.7,
    },
)


def write_rows() -> None:
    """Prompts of a few words with an answer, as verl and as ms-swift read them."""
    import pyarrow
    from pyarrow import parquet

    rows, chats = [], []
    for number in range(64):
        question = f"What is {number} plus {number}? Let's think step by step and output the final answer after ####."
        prompt = [{"role": "user", "content": question}]
        rows.append(
            {
                "data_source": "openai/gsm8k",
                "prompt": prompt,
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(2 * number)},
                "extra_info": {"split": "train", "index": number},
            }
        )
        chats.append(json.dumps({"messages": prompt, "solution": str(2 * number)}))
    FOLDER.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), FOLDER / "rows.parquet")
    (FOLDER / "rows.jsonl").write_text("\n".join(chats) + "\n", encoding="utf-8")


def name(row: dict[str, Any]) -> str:
    """What the tables call it."""
    model, stack = row["model"].partition("/")[2], {"trl-server": "TRL and its server"}.get(row["stack"], row["stack"])
    sleep = {1: ", sleep", 0: ", no sleep"}[row["sleep"]] if row["stack"] == "ms-swift" else ""
    where = f" on an {row['gpu']}" if "gpu" in row else ""
    return f"{stack}, {model}{where}, utilization {row['utilization']}{sleep}"


def words(row: dict[str, Any]) -> list[str]:
    """Of the command, as it is typed in its environment."""
    return {"verl": _verl, "ms-swift": _swift, "trl-server": _server, "unsloth": _unsloth}[row["stack"]](row)


def _server(row: dict[str, Any]) -> list[str]:
    """The script of grpo.md, which starts `trl vllm-serve` on the second GPU."""
    return ["python", str((HERE / "grpo_train.py").relative_to(HERE.parents[1])), json.dumps(row)]


def _unsloth(row: dict[str, Any]) -> list[str]:
    """The script that has Unsloth's notebook."""
    script = (HERE / "unsloth_grpo.py").relative_to(HERE.parents[1])
    return ["python", str(script), row["model"], str(row["utilization"]), str(row["completion"])]


def _swift(row: dict[str, Any]) -> list[str]:
    """examples/train/grpo/internal/qlora.sh of ms-swift, but for what stacks.md names and the numbers of a row; the
    last four are not in it, or otherwise."""
    options = {
        "rlhf_type": "grpo",
        "model": row["model"],
        "reward_funcs": "accuracy",
        "use_vllm": "true",
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": row["utilization"],
        "vllm_tensor_parallel_size": 1,
        "vllm_max_model_len": 10240,
        "vllm_enable_lora": "true",
        "sleep_level": row["sleep"],
        "tuner_type": "lora",
        "torch_dtype": "bfloat16",
        "dataset": FOLDER / "rows.jsonl",
        "max_length": 2048,
        "max_completion_length": row["completion"],
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "learning_rate": "1e-5",
        "lr_scheduler_type": "cosine",
        "logging_steps": 1,
        "num_generations": 8,
        "temperature": 1.0,
        "use_hf": "true",
        "max_steps": 2,
        "dataloader_num_workers": 0,
        "output_dir": FOLDER / "ms-swift",
    }
    return ["swift", "rlhf", *(str(part) for key, value in options.items() for part in (f"--{key}", value))]


def _verl(row: dict[str, Any]) -> list[str]:
    """examples/tuning/7b/qwen2-7b_grpo_2_h800_fsdp_vllm.sh of verl, but for the numbers of a row; the last ten settings
    are not in it."""
    actor, rollout = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout"))
    settings = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": FOLDER / "rows.parquet",
        "data.val_files": FOLDER / "rows.parquet",
        "data.train_batch_size": row["prompts"],
        "data.max_prompt_length": row["prompt"],
        "data.max_response_length": row["completion"],
        "data.filter_overlong_prompts": True,
        "data.truncation": "error",
        "actor_rollout_ref.model.path": row["model"],
        f"{actor}.optim.lr": "1e-6",
        f"{actor}.ppo_mini_batch_size": row["prompts"],
        f"{actor}.ppo_micro_batch_size_per_gpu": row["micro_batch"],
        f"{actor}.use_kl_loss": False,
        f"{actor}.entropy_coeff": 0,
        "actor_rollout_ref.model.enable_gradient_checkpointing": True,
        f"{actor}.fsdp_config.param_offload": False,
        f"{actor}.fsdp_config.optimizer_offload": False,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": row["micro_batch"],
        f"{rollout}.tensor_model_parallel_size": row["gpus"],
        f"{rollout}.name": "vllm",
        f"{rollout}.gpu_memory_utilization": row["utilization"],
        f"{rollout}.n": 5,
        "algorithm.use_kl_in_reward": False,
        "trainer.critic_warmup": 0,
        "trainer.logger": "[console]",
        "trainer.n_gpus_per_node": row["gpus"],
        "trainer.nnodes": 1,
        "trainer.save_freq": -1,
        "trainer.test_freq": -1,
        "actor_rollout_ref.model.use_remove_padding": False,
        "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
        f"{rollout}.enforce_eager": True,
        "trainer.val_before_train": False,
        "trainer.total_epochs": 1,
        "trainer.total_training_steps": 2,
        f"{rollout}.agent.num_workers": 1,
        "reward.num_workers": 1,
        "data.dataloader_num_workers": 0,
        "ray_kwargs.ray_init.num_cpus": 16,
    }
    return ["python", "-m", "verl.trainer.main_ppo", *(f"{key}={value}" for key, value in settings.items())]
