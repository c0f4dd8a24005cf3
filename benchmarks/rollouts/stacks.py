"""The commands of verl's GRPO, row by row, as its example has them but for what stacks.md names.

In: a row. Out: the command's words, and what a table calls it. grpo.py runs them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

FOLDER = Path("out") / "stacks"  # from the folder that the command is run in
VERL = {
    "model": "Qwen/Qwen2.5-7B-Instruct",
    "gpus": 2,
    "prompts": 16,
    "prompt": 512,
    "completion": 256,
    "micro_batch": 8,
}
ROWS: tuple[dict[str, Any], ...] = ({**VERL, "utilization": 0.6}, {**VERL, "utilization": 0.3})


def write_rows() -> None:
    """Prompts of a few words with an answer, as verl reads them."""
    import pyarrow
    from pyarrow import parquet

    rows = []
    for number in range(64):
        question = f"What is {number} plus {number}? Let's think step by step and output the final answer after ####."
        rows.append(
            {
                "data_source": "openai/gsm8k",
                "prompt": [{"role": "user", "content": question}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(2 * number)},
                "extra_info": {"split": "train", "index": number},
            }
        )
    FOLDER.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), FOLDER / "rows.parquet")


def name(row: dict[str, Any]) -> str:
    """What the tables call it."""
    return f"{row['model'].partition('/')[2]}, utilization {row['utilization']}"


def words(row: dict[str, Any]) -> list[str]:
    """Of the command, behind the interpreter: examples/tuning/7b/qwen2-7b_grpo_2_h800_fsdp_vllm.sh of verl,
    but for the numbers of a row; the last ten settings are not in it."""
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
    return ["-m", "verl.trainer.main_ppo", *(f"{key}={value}" for key, value in settings.items())]
