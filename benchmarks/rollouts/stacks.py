"""The commands of GRPO by verl, by ms-swift, by Unsloth, and by TRL beside a server, row by row, as their examples have
them but for what stacks.md names.

In: a row. Out: the command's words, and what a table calls it. grpo.py runs them.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_OPTIONS = tomllib.loads((HERE / "stacks.toml").read_text(encoding="utf-8"))
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
    """Return the name of a row in the tables."""
    model, stack = row["model"].partition("/")[2], {"trl-server": "TRL and its server"}.get(row["stack"], row["stack"])
    sleep = {1: ", sleep", 0: ", no sleep"}[row["sleep"]] if row["stack"] == "ms-swift" else ""
    where = f" on an {row['gpu']}" if "gpu" in row else ""
    return f"{stack}, {model}{where}, utilization {row['utilization']}{sleep}"


def words(row: dict[str, Any]) -> list[str]:
    """Return the words of the command, as it is typed in its environment."""
    return {"verl": _verl, "ms-swift": _swift, "trl-server": _server, "unsloth": _unsloth}[row["stack"]](row)


def _server(row: dict[str, Any]) -> list[str]:
    """The script of grpo.md, which starts `trl vllm-serve` on the second GPU."""
    return ["python", str((HERE / "grpo_train.py").relative_to(HERE.parents[1])), json.dumps(row)]


def _unsloth(row: dict[str, Any]) -> list[str]:
    """The script that has Unsloth's notebook."""
    script = (HERE / "unsloth_grpo.py").relative_to(HERE.parents[1])
    return ["python", str(script), row["model"], str(row["utilization"]), str(row["completion"])]


def _swift(row: dict[str, Any]) -> list[str]:
    return ["swift", "rlhf", *(part for key, value in _options(row) for part in (f"--{key}", value))]


def _verl(row: dict[str, Any]) -> list[str]:
    return ["python", "-m", "verl.trainer.main_ppo", *(f"{key}={value}" for key, value in _options(row))]


def _options(row: dict[str, Any]) -> list[tuple[str, str]]:
    """Those of stacks.toml, with the numbers of a row."""
    return [(key, value.format(**row, folder=FOLDER)) for key, value in _OPTIONS[row["stack"]].items()]
