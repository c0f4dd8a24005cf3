"""Published training steps, counted on an emulated GPU: one small record per configuration.

In: a row of published_speed.csv. Out: a Recipe of the source's own command (fms-acceleration, in the libraries of its
day), then what its second step launched. The records (counted_steps.jsonl) hold no time of ours: rates are fitted to
them without any further emulated run. The journals also have records of torchtune's own commands, of cells in today's
libraries (two shallow versions, extrapolated) and of a prototype, whose scripts are gone (commit 587d4fd7).
"""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.speed.published_steps import SpeedRow
from benchmarks.truth.published_rows import PublishedRow, list_published
from benchmarks.truth.reproduction import rows, run
from vramprobe.profile.run_files import read_run
from vramprobe.speed.counted import Count, CountRow
from vramprobe.speed.raw_count import count_of

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


def count_command(recipe: rows.Recipe, *, uv: str) -> Count:
    """What the second step of the source's own command launches. Raises RuntimeError where it fails."""
    with tempfile.TemporaryDirectory(prefix="vramprobe-row-") as folder:
        raw = Path(folder, "raw")
        *_, said = run.profiled(recipe, "--steps", "2", "--folder", str(raw), uv=uv, say=lambda line: None)
        counts = [one.count for one in read_run(raw).ranks if one.count is not None] if raw.is_dir() else []
    if not counts:
        raise RuntimeError(said)
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
