"""Run vLLM 0.19.0 on an emulated H100 for rows of published_vllm.csv, and hold its own account against theirs; beside
it two older releases on other GPUs.

Needs `vramprobe emulate` (a C compiler) and an interpreter with vLLM 0.19.0 and no package of NVIDIA's
(emulated.md tells how, 4.4 GB); two to four minutes a row on two cores:

    python benchmarks/rollouts/emulated.py --python PATH    # the rows that emulated.jsonl lacks, then the table
    python benchmarks/rollouts/emulated.py --row 98 --python PATH    # one row of an older release
    python benchmarks/rollouts/emulated.py                  # the table alone
    python benchmarks/rollouts/emulated.py --check          # fails if it is stale
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

from vramprobe.records.profile import ProfileRecord, read_profiles

HERE = Path(__file__).parent
JOURNAL, PAGE = HERE / "emulated.jsonl", HERE / "emulated.md"
#: Of vllm serve on an H100, as the published logs have them.
SETTINGS = {"max_num_seqs": 1024, "max_num_batched_tokens": 8192, "gpu_memory_utilization": 0.95,
            "enable_prefix_caching": False, "max_model_len": 8192}  # fmt: skip
#: Row → the model, and what differs.
ROWS: dict[int, tuple[str, dict]] = {
    7: ("google/gemma-2-2b-it", {}),
    8: ("google/gemma-2-9b-it", {}),
    12: ("google/gemma-7b", {}),
    13: ("ibm-granite/granite-3.3-2b-instruct", {}),
    14: ("ibm-granite/granite-3.3-8b-instruct", {}),
    17: ("meta-llama/Llama-3.1-8B-Instruct", {"kv_cache_dtype": "fp8"}),
    19: ("meta-llama/Llama-3.1-8B-Instruct", {"quantization": "fp8"}),
    21: ("meta-llama/Llama-3.1-8B-Instruct", {"dtype": "float32"}),
    24: ("meta-llama/Llama-3.1-8B-Instruct", {}),
    44: ("Qwen/Qwen2.5-7B-Instruct", {"hf_overrides": {"max_position_embeddings": 32768}}),
    53: ("Qwen/Qwen3-8B", {}),
}
#: Row of an older release → the GPU and the settings that its log tells.
OLDER: dict[int, tuple[str, dict]] = {
    98: (
        "A100-80GB-SXM",
        {
            "model": "Qwen/Qwen2.5-7B-Instruct",
            "hf_overrides": {"max_position_embeddings": 32768},
            "max_model_len": 16384,
            "max_num_batched_tokens": 2048,
            "gpu_memory_utilization": 0.25,
            "max_num_seqs": 256,
        },
    ),
    120: (
        "RTX-4090",
        {
            "model": "Qwen/Qwen2.5-7B-Instruct",
            "max_model_len": 32768,
            "gpu_memory_utilization": 0.95,
            "max_num_seqs": 42,
            "enforce_eager": True,
        },
    ),
}
_BLOCK_TOKENS = 16
FIELDS = (
    ("weights", "weights_gib"),
    ("activation peak", "activation_peak_gib"),
    ("non-torch", "non_torch_gib"),
    ("graphs", "graph_gib"),
    ("KV cache", "kv_cache_gib"),
)
_PUBLISHED = {"kv_cache_gib": "kv_gib"}


def settings(row: int) -> dict:
    """The arguments of LLM() for a row."""
    if row in OLDER:
        return OLDER[row][1]
    model, others = ROWS[row]
    return {"model": model, **SETTINGS, **others}


def journal() -> dict[int, ProfileRecord]:
    """The last profile of each row that came to a cache, in order, by its command's last word."""
    rows = {json.dumps(settings(row)): row for row in (*ROWS, *OLDER)}
    found = read_profiles(JOURNAL) if JOURNAL.exists() else ()
    known = {row: record for record in found if (row := rows.get(json.dumps(json.loads(record.command[-1]))))}
    return {
        row: record
        for row, record in sorted(known.items())
        if record.engine and (record.engine.kv_cache_tokens or record.engine.kv_cache_blocks)
    }


def run(python: str, row: int) -> None:
    """Profile one row."""
    gpu = OLDER[row][0] if row in OLDER else "H100-SXM"
    words = ["--whole", "--trace", "none", "--emulate", gpu, "--empty-weights", "--save", str(JOURNAL)]
    script = [python, str(HERE / "llm.py"), json.dumps(settings(row))]
    subprocess.run(
        [sys.executable, "-m", "vramprobe", "profile", *words, "--", *script], env=os.environ | {"HF_HUB_OFFLINE": "1"}
    )


def older(published: dict[int, dict[str, str]]) -> str:
    """The table of older releases: published / emulated."""
    head = ["row", "vLLM", "model", "GPU", "weights", "KV tokens", "error"]
    lines = [head, ["---"] * len(head)]
    for row, record in journal().items():
        if row not in OLDER:
            continue
        told, found = published[row], record.engine
        assert found is not None
        tokens = int(told["kv_tokens"] or _BLOCK_TOKENS * int(told["gpu_blocks"]))
        emulated = found.kv_cache_tokens or _BLOCK_TOKENS * (found.kv_cache_blocks or 0)
        lines.append([
            str(row), str(found.version), told["model"].partition("/")[2], OLDER[row][0],
            f"{float(told['load_gib']):.2f} / {found.weights_gib:.2f}", f"{tokens:,} / {emulated:,}",
            f"{100 * (emulated / tokens - 1):+.2f} %",
        ])  # fmt: skip
    return as_table(lines)


def as_table(lines: list[list[str]]) -> str:
    """Markdown of a head, its rule and rows."""
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def page() -> str:
    """emulated.md: published / emulated."""
    with open(HERE / "published_vllm.csv", encoding="utf-8", newline="") as file:
        published = {int(row["row"]): row for row in csv.DictReader(file)}
    head = ["row", "model", "differs by", *(name for name, _ in FIELDS), "KV tokens", "error", "less non-torch"]
    lines = [head, ["---"] * len(head)]
    for row, record in journal().items():
        if row not in ROWS:
            continue
        told, found = published[row], record.engine
        assert found is not None
        assert found.kv_cache_tokens is not None
        assert found.kv_cache_gib is not None
        tokens = int(told["kv_tokens"])
        rest = found.kv_cache_tokens * (1 - float(told["non_torch_gib"]) / found.kv_cache_gib)
        values = [f"{float(told[_PUBLISHED.get(name, name)]):.2f} / {getattr(found, name):.2f}" for _, name in FIELDS]
        model, others = ROWS[row]
        differs = ", ".join(
            f"`{name}` {value if isinstance(value, str) else json.dumps(value)}" for name, value in others.items()
        )
        lines.append([
            str(row), model.partition("/")[2], differs, *values, f"{tokens:,} / {found.kv_cache_tokens:,}",
            f"{100 * (found.kv_cache_tokens / tokens - 1):+.2f} %", f"{100 * (rest / tokens - 1):+.2f} %",
        ])  # fmt: skip
    text = (HERE / "emulated.in.md").read_text(encoding="utf-8")
    return text.replace("{table}", as_table(lines)).replace("{older}", older(published))


def main() -> int:
    """Run what is missing if an interpreter is given; write the page, or say that it is stale."""
    if "--python" in sys.argv:
        python = sys.argv[sys.argv.index("--python") + 1]
        asked = [int(sys.argv[sys.argv.index("--row") + 1])] if "--row" in sys.argv else ROWS.keys() - journal().keys()
        for row in asked:
            run(python, row)
    if "--check" in sys.argv:
        if PAGE.read_text(encoding="utf-8") != page():
            print("emulated.md is stale: python benchmarks/rollouts/emulated.py")
            return 1
        return 0
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
