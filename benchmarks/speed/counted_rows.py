"""Published training steps, counted on an emulated GPU: one small record per configuration.

In: a row of published_speed.csv. Out: a Recipe of the source's own command (fms-acceleration, in the libraries of its
day), or its cell by today's transformers and peft, of which two shallow versions are counted and extrapolated to its
depth; then what the step launched. The records (counted_steps.jsonl) hold no time of ours: rates are fitted to them
without any further emulated run.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.frameworks.stacks import python_of
from benchmarks.speed import torchtune_rows
from benchmarks.speed.published_steps import SpeedCase, SpeedRow
from benchmarks.truth.published_rows import PublishedRow, list_published
from benchmarks.truth.reproduction import rows, run
from vramprobe.emulate.enter import entrance_for_command
from vramprobe.emulate.environment import find_environment
from vramprobe.profile.run_files import read_run
from vramprobe.speed.counted import Count, CountRow
from vramprobe.speed.raw_count import count_of

ROOT = Path(__file__).resolve().parents[2]
#: The fields of a row as a record keeps them, in this order; of a copy on its own stream True comes after them.
FIELDS = ("phase", "what", "name", "shapes", "dtype", "calls", "flops", "read", "written", "launches", "width")
_SUMS = ("calls", "flops", "read", "written", "launches")
#: The day of a benchmark → the commit that published it, and so its libraries.
_COMMITS = {"2025-02-07": "24bdadb", "2024-12-02": "733992a", "2024-10-18": "fc78b55", "2024-10-14": "97fc3c1"}
_DTYPES = {
    "bfloat16": "bfloat16 (no AMP)",
    "bfloat16+amp-bf16": "bfloat16 (bf16 AMP)",
    "float16+amp-fp16": "float16 (fp16 AMP)",
}
_MODELS = {"Mistral-7B": "mistral-7b-v0.1", "Llama-3-8B": "llama-3-8b", "Llama-2-70B": "llama-2-70b"}
_MODELS |= {"PowerLM-3b": "powerlm-3b", "santacoder": "santacoder", "Mixtral-8x7B": "mixtral-8x7b"}
#: LoRA of Qwen's finetune.py ran under --bf16; fms-acceleration's peft of 2024-05 kept adapters in 16 bit.
_AUTOCAST = ("qwen-readme", "fms-acceleration")
#: What llm-foundry's MPT does otherwise than the GPT-2 that has its shapes.
_MPT = {"activation_function": "gelu", "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
#: Layers of the two versions of a cell that are counted: a layer more is the half of their difference.
DEPTHS = (2, 4)


def recipe_of(row: SpeedRow) -> rows.Recipe | None:
    """The source's own command; None where the row has none, or its libraries have no environment."""
    day = re.search(r"bench date (\S+?);", row.notes)
    config = re.search(r"framework_config=([\w-]+)", row.notes)
    if row.family != "fms-acceleration" or not day or not config or row.n_gpus is None or row.seq_len is None:
        return None
    commit, dtype, model = _COMMITS.get(day[1]), _DTYPES.get(row.dtype or ""), _MODELS.get(row.model)
    if commit is None or dtype is None or model is None:
        return None
    is_gptq = "autogptq" in config[1]
    template = next((one for one in list_published() if _is_like(one, row, model, is_gptq)), None)
    if template is None:
        return None
    found = rows.recipe_of(
        dataclasses.replace(
            template,
            batch_size=row.batch_size,
            seq_len=row.seq_len,
            dtype=dtype,
            num_gpus=row.n_gpus,
            url_or_path=re.sub(r"@\w+:", f"@{commit}:", template.url_or_path),
            notes=re.sub(r"framework_config=[\w-]+", f"framework_config={config[1]}", template.notes),
        )
    )
    return found if isinstance(found, rows.Recipe) else None


def _is_like(one: PublishedRow, row: SpeedRow, model: str, is_gptq: bool) -> bool:
    """Of the same model, method and adapter, so that one's configuration is the other's but for what a row says."""
    same = one.source == rows._FMS and one.metric != "nvidia-smi" and one.seq_len and one.method == row.method
    is_same_model = same and rows._MODELS[one.model][0] == model
    return bool(is_same_model and ("autogptq" in (one.framework_config or "")) == is_gptq)


def count_command(recipe: rows.Recipe, *, uv: str, limit_seconds: float) -> Count:
    """What the second step of the source's own command launches. Raises RuntimeError where it fails."""
    python = python_of(recipe.stack, uv=uv)
    way = entrance_for_command(python, recipe.cards, say=lambda line: None)  # its machine only makes the files
    try:
        with tempfile.TemporaryDirectory(prefix="vramprobe-row-") as work:
            command = [str(python), *run.command_of(recipe, way, Path(work))]
            given = run.environment_of(way, Path(work))
            added = {key: given[key] for key in given.keys() - way.environment.keys()}
            added["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(run.HERE)])
            return _profiled(command, recipe.cards, {**os.environ, **added}, Path(work), limit_seconds)
    finally:
        shutil.rmtree(way.machine, ignore_errors=True)


def count_torchtune(command: list[str], *, uv: str, limit_seconds: float) -> Count:
    """What the second step of torchtune's own command launches. Raises RuntimeError where it fails."""
    with tempfile.TemporaryDirectory(prefix="vramprobe-row-") as work:
        plain = torchtune_rows.prepare(Path(work), uv=uv)
        inside = plain | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        return _profiled(command, torchtune_rows.CARD, inside, Path(work), limit_seconds)


def count_cell(row: SpeedRow, case: SpeedCase, *, limit_seconds: float) -> Count:
    """What the cell's step launches in today's libraries, extrapolated from :data:`DEPTHS`."""
    environment = find_environment()
    if environment is None:
        raise RuntimeError("no emulated environment: vramprobe emulate setup")
    python, counts = environment, []
    ranks = ["--only-rank", "0", "--world-size", str(case.num_gpus)] if case.num_gpus > 1 else []
    for depth in DEPTHS:
        with tempfile.TemporaryDirectory(prefix="vramprobe-row-") as work:
            told = Path(work) / "cell.json"
            told.write_text(json.dumps(_shallow(row, case, depth)))
            command = [str(python), str(Path(__file__).with_name("counted_cell.py")), str(told)]
            inside = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
            counts.append(_profiled(command, case.gpu.short_name, inside, Path(work), limit_seconds, ranks))
    whole = deeper(*counts, DEPTHS, _num_layers(case))
    return accumulated(whole, case.spec.grad_accum) if _reduces_each_time(case) else whole


def _shallow(row: SpeedRow, case: SpeedCase, depth: int) -> dict[str, Any]:
    """The cell with so many layers, and adapters multiplied in 16 bit where the source's Trainer or peft did so."""
    spec = case.spec.model_dump(mode="json")
    config = spec["architecture"]
    names = [name for name in ("num_hidden_layers", "n_layer") if name in config]
    adapters = {"autocast": "bf16"} if row.family in _AUTOCAST and case.spec.method == "lora" else {}
    compiled = {"torch_compile": True} if "compile" in (row.fused_kernels or "") else {}
    shared: dict[str, Any] = {}
    if case.num_gpus > 1:
        is_fsdp1 = case.sharding == "fsdp" and "FSDP2" not in (row.sharding or "")
        shared = {"num_gpus": case.num_gpus, "sharding": "fsdp1" if is_fsdp1 else case.sharding}
        shared |= {"grad_accum": 1} if _reduces_each_time(case) else {}
    if row.family == "llm-foundry":
        config = config | _MPT
    if config.get("sliding_window") == case.spec.seq_len:  # transformers of 2024 made no mask of it, today's does
        config = config | {"sliding_window": None}
    return spec | {"architecture": config | dict.fromkeys(names, depth)} | adapters | compiled | shared


def _reduces_each_time(case: SpeedCase) -> bool:
    """Composer's FSDP is taken to reduce gradients in every micro-step; accelerate's does in the last one."""
    return case.num_gpus > 1 and case.sharding == "fsdp" and case.spec.grad_accum > 1


def accumulated(count: Count, num_micro_steps: int) -> Count:
    """The count of a step of one micro-step with so many."""

    def times(row: CountRow) -> CountRow:
        again = 1 if row.phase == "optimizer" else num_micro_steps
        return dataclasses.replace(row, **{name: again * getattr(row, name) for name in _SUMS})

    return dataclasses.replace(
        count,
        num_launches=count.num_launches * num_micro_steps,
        num_claimed=count.num_claimed * num_micro_steps,
        rows=tuple(map(times, count.rows)),
        link_bytes=tuple((kind, size * num_micro_steps, ranks) for kind, size, ranks in count.link_bytes),
    )


def _num_layers(case: SpeedCase) -> int:
    config = case.spec.architecture
    return int(config.get("num_hidden_layers") or config["n_layer"])


def deeper(few: Count, more: Count, depths: tuple[int, int], num_layers: int) -> Count:
    """The count of a model of ``num_layers`` by those of two shallow ones: each row grows by the layer."""
    by_key: dict[tuple[str | bool, ...], list[CountRow]] = {}
    for number, count in enumerate((few, more)):
        for row in small(count.rows):
            pair = by_key.setdefault(key_of(row), [dataclasses.replace(row, **dict.fromkeys(_SUMS, 0))] * 2)
            pair[number] = row
    step = (num_layers - depths[0]) / (depths[1] - depths[0])

    def at(one: int, other: int) -> int:
        return max(0, round(one + step * (other - one)))

    found = [
        dataclasses.replace(one, **{name: at(getattr(one, name), getattr(other, name)) for name in _SUMS})
        for one, other in by_key.values()
    ]
    return dataclasses.replace(
        more,
        num_launches=at(few.num_launches, more.num_launches),
        num_claimed=at(few.num_claimed, more.num_claimed),
        rows=tuple(row for row in found if row.calls),
        **_deeper_links(few, more, step),
    )


def _deeper_links(few: Count, more: Count, step: float) -> dict[str, Any]:
    """``link_bytes`` and ``message_bytes`` of the deeper model; of each kind the calls grow by the layer, too."""
    found, messages = [], []
    known = {(kind, ranks): (size, size / mean) for (kind, size, ranks), mean in _links(few)}
    for (kind, size, ranks), mean in _links(more):
        was, calls_were = known.get((kind, ranks), (size, size / mean))
        now, calls = was + step * (size - was), calls_were + step * (size / mean - calls_were)
        found.append((kind, round(now), ranks))
        messages.append(now / calls if calls else 0.0)
    return {"link_bytes": tuple(found), "message_bytes": tuple(messages)}


def _links(count: Count) -> Iterable[tuple[tuple[str, int, int], float]]:
    return [pair for pair in zip(count.link_bytes, count.message_bytes, strict=True) if pair[0][1] and pair[1]]


def _profiled(
    command: list[str], card: str, inside: dict[str, str], work: Path, limit_seconds: float, ranks: Sequence[str] = ()
) -> Count:
    raw = work / "raw"
    words = ["profile", "--emulate", card, "--trace", "none", "--steps", "2", "--steps-only", "--folder", str(raw)]
    words += ranks
    done = subprocess.run(
        [sys.executable, "-m", "vramprobe", *words, "--json", "--", *command],
        env=inside,
        capture_output=True,
        text=True,
        cwd=work,
        timeout=limit_seconds,
        check=False,
    )
    counts = [one.count for one in read_run(raw).ranks if one.count is not None] if raw.is_dir() else []
    if not counts:
        raise RuntimeError("\n".join(run.errors_in(done.stdout + done.stderr)) or done.stderr[-1500:])
    return count_of(counts[0])


def key_of(row: CountRow) -> tuple[str | bool, ...]:
    return row.phase, row.what, row.name, row.shapes, row.dtype, row.is_beside


def small(given: Iterable[CountRow]) -> tuple[CountRow, ...]:
    """Rows without lines of Python; those that are neither product nor attention without shapes, but for embeddings,
    by which tokens are known."""
    sums: dict[tuple[str | bool, ...], CountRow] = {}
    for row in given:
        keeps_shapes = row.what in ("product", "attention") or row.name == "aten::embedding"
        row = dataclasses.replace(row, line=None, shapes=row.shapes if keeps_shapes else "")
        known = sums.get(key_of(row))
        added = {} if known is None else {name: getattr(row, name) + getattr(known, name) for name in _SUMS}
        sums[key_of(row)] = dataclasses.replace(row, **added)
    return tuple(sums.values())


def as_record(count: Count) -> dict[str, Any]:
    """A count as JSON, small."""
    rows_ = [[getattr(row, name) for name in FIELDS] + [True] * row.is_beside for row in small(count.rows)]
    return {
        "num_launches": count.num_launches,
        "num_claimed": count.num_claimed,
        "unclaimed": [list(pair) for pair in count.unclaimed],
        "link_bytes": [list(one) for one in count.link_bytes],
        "message_bytes": [round(one) for one in count.message_bytes],
        "rows": rows_,
    }


def from_record(told: dict[str, Any]) -> Count:
    return Count(
        step=2,
        num_launches=told["num_launches"],
        num_claimed=told["num_claimed"],
        unclaimed=tuple((where, number) for where, number in told["unclaimed"]),
        link_bytes=tuple((kind, size, ranks) for kind, size, ranks in told["link_bytes"]),
        message_bytes=tuple(told.get("message_bytes", ())),
        rows=tuple(CountRow(**dict(zip((*FIELDS, "is_beside"), one, strict=False))) for one in told["rows"]),
    )
