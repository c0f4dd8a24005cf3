"""Every published row beside its run on an emulated GPU, or the reason why there is none.

In: published.csv's rows and the journal. Out: one table row for each published one (CSV), and a page.
"""

import re
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.frameworks.stacks import pins
from benchmarks.journal import Entry
from benchmarks.tables import as_csv, as_markdown, filled, read_csv
from benchmarks.truth.published_rows import PublishedRow, list_published
from benchmarks.truth.reproduction import device
from benchmarks.truth.reproduction.rows import NotRun, Recipe, num_params_of, recipe_of
from vramprobe.units import GIB, KIB, MIB

PAGE = Path(__file__).resolve().parents[1] / "reproduce.md"
MISS_PERCENT = 0.5
COLUMNS = (
    "line", "source", "url_or_path", "model", "method", "framework_config", "dtype", "batch_size", "seq_len",
    "num_gpus", "metric", "measured_bytes", "outcome", "stack", "emulated_bytes", "difference_bytes",
    "difference_percent", "settled_measured_bytes", "settled_emulated_bytes", "reserved_emulated_bytes",
    "nvidia_smi_bytes", "cause", "num_steering_reads", "emulator_version", "not_run",
)  # fmt: skip
#: (model, ranks) → what a layer's shard lacks to a whole number of the 2 MiB that CUDA is asked for.
_REMAINDERS = {("powerlm-3b", 2): 1_013_760}
Row = dict[str, Any]


def rows(entries: dict[int, Entry]) -> list[Row]:
    """One for each published row, in file order. ``entries``: by line, of recipes as they are now."""
    devices = device_bytes()
    found = [_row(row, entries.get(row.line), devices) for row in list_published()]
    for row in found:
        if row.get("emulated_bytes"):
            row["reserved_emulated_bytes"] = _reserved_bytes(entries.get(row["line"]), row["num_gpus"])
    return found


def device_bytes() -> dict[str, int | None]:
    """Return what nvidia-smi saw of the published runs that have such a figure, by the place of its row."""
    return {row.url_or_path: row.memory_bytes for row in list_published() if row.metric == "nvidia-smi"}


def _row(row: PublishedRow, entry: Entry | None, devices: dict[str, int | None]) -> Row:
    told: Row = {
        "line": row.line,
        "source": row.source,
        "url_or_path": row.url_or_path,
        "model": row.model,
        "method": row.method,
        "framework_config": row.framework_config,
        "dtype": row.dtype,
        "batch_size": row.batch_size,
        "seq_len": row.seq_len_text,
        "num_gpus": row.num_gpus,
        "metric": row.metric,
        "measured_bytes": row.memory_bytes,
    }
    recipe = recipe_of(row)
    if isinstance(recipe, NotRun):
        return told | {"not_run": recipe.reason}
    if entry is None:
        return told | {"stack": recipe.stack, "not_run": "not yet run"}
    told |= {"stack": recipe.stack, "outcome": entry["outcome"], "emulator_version": entry.get("emulator_version")}
    if entry["outcome"] != "ok":
        return told | {"not_run": f"the run ended with {entry['outcome']}: {_last_error(entry)}"}
    assert row.memory_bytes is not None
    peak, measured = entry["peak_bytes"], row.memory_bytes
    return told | {
        "emulated_bytes": peak,
        "difference_bytes": peak - measured,
        "difference_percent": _percent(peak, measured),
        "settled_measured_bytes": row.settled_bytes,
        "settled_emulated_bytes": entry["settled_bytes"],
        "nvidia_smi_bytes": devices.get(row.url_or_path),
        "cause": cause_of(row, recipe, peak / measured - 1),
        "num_steering_reads": entry["num_steering_reads"],
    }


def _reserved_bytes(entry: Entry | None, num_gpus: int) -> int | None:
    """Mean over the cards, of all processes, after a step where blocks had to be given back; None of runs that did not
    say whether, and of those of several cards by an emulator whose cards were done at once."""
    if entry is None or "rank_num_retries" not in entry or (num_gpus > 1 and not entry.get("is_busy")):
        return None
    if any(entry["rank_num_retries"]) and "rank_stepped_reserved_bytes" not in entry:
        return None
    return round(sum(entry.get("rank_stepped_reserved_bytes", entry["rank_reserved_bytes"])) / num_gpus)


def cause_of(row: PublishedRow, recipe: Recipe, error: float) -> str:
    """Say why a figure is off, where that is known; one off by more than MISS_PERCENT may be ``unexplained``."""
    less = round(error * (row.memory_bytes or 0))
    remainder = _REMAINDERS.get((recipe.model, recipe.num_ranks))
    if remainder and less and less % remainder == 0 and row.method != "qlora":
        return f"{abs(less) // remainder} blocks' remainders of {remainder:,} B"
    return "unexplained" if 100 * abs(error) > MISS_PERCENT else ""


def _percent(figure: int, measured: int) -> str:
    return f"{100 * (figure / measured - 1):.4f}"


def _last_error(entry: Entry) -> str:
    found = re.findall(r"^\S*(?:Error|Exception): .*$", entry.get("said", ""), re.M)
    return found[0][:200] if found else "no words of its own"


def write(found: list[Row], path: Path) -> None:
    """The CSV and its page beside it."""
    path.write_text(as_csv(found, COLUMNS))
    path.with_suffix(".md").write_text(page(read_csv(path)))


def page(found: list[Row]) -> str:
    """The table as a page: the error, every row that was run, and how many were not and why."""
    done = [row for row in found if row["emulated_bytes"]]
    reasons = Counter(row["not_run"] for row in found if row["not_run"])
    return filled(
        PAGE,
        summary=_summary(done),
        by_model=_by_model(done),
        device=device.table(done),
        runs=[_line(row) for row in done],
        reasons=[f"| {reason} | {number} |" for reason, number in reasons.most_common()],
        done=len(done),
        rows=len(found),
        stacks=[_stack(name) for name in dict.fromkeys(row["stack"] for row in done)],
    )


def _line(row: Row) -> str:
    """One row that was run."""
    run = f"{row['model'].split('/')[-1]} {row['method']}, {row['framework_config']}"
    device, reserved = row["nvidia_smi_bytes"], row["reserved_emulated_bytes"]
    cells = [
        row["line"],
        f"{run}, {row['batch_size']} × {row['seq_len']}",
        row["stack"],
        row["num_gpus"],
        f"{int(row['measured_bytes']):,}",
        _less(row["emulated_bytes"], row["measured_bytes"]),
        f"{float(row['difference_percent']):+.4f}",
        _less(row["settled_emulated_bytes"], row["settled_measured_bytes"]),
        f"{(int(device) - int(reserved)) / MIB:,.0f}" if device and reserved else "",
        row["cause"],
    ]
    return f"| {' | '.join(map(str, cells))} |"


def _stack(name: str) -> str:
    told = pins(name)
    shown = ("torch", "transformers", "peft", "trl", "accelerate", "bitsandbytes", "fms-hf-tuning")
    plugins = [package for package in told if package.startswith("fms-acceleration")]
    return f"- {name}: {', '.join(f'{package} {told[package]}' for package in (*shown, *plugins))}"


def _less(ours: str, theirs: str) -> str:
    return f"{int(ours) - int(theirs):+,}" if ours and theirs else ""


def _summary(done: list[Row]) -> list[str]:
    """The error of the emulated peak against the published one, of all runs and by kind."""
    kinds = {
        "all": done,
        "one GPU": [row for row in done if row["num_gpus"] == "1"],
        "two or four GPUs, FSDP": [row for row in done if row["num_gpus"] != "1"],
        "dense": [row for row in done if "Mixtral" not in row["model"]],
        "Mixtral 8x7B": [row for row in done if "Mixtral" in row["model"]],
    } | {name: [row for row in done if row["method"] == name] for name in ("full", "lora", "qlora")}
    lines = []
    for name, some in kinds.items():
        if some:
            errors = [abs(float(row["difference_percent"])) for row in some]
            exact = sum(abs(int(row["difference_bytes"])) <= KIB for row in some)
            lines.append([name, len(some), f"{statistics.mean(errors):.3f}", f"{max(errors):.3f}", exact])
    head = ["runs", "number", "mean error, %", "worst error, %", "byte-exact within 1 KiB"]
    return as_markdown(head, "lrrrr", lines)


def _by_model(done: list[Row]) -> list[str]:
    """The worst error of each model and method, the smallest model first."""
    kinds: dict[tuple[str, str], list[Row]] = {}
    for row in sorted(done, key=lambda row: int(row["measured_bytes"])):
        kinds.setdefault((row["model"], row["method"]), []).append(row)
    lines = []
    for (model, method), some in sorted(kinds.items(), key=lambda kind: (num_params_of(kind[0][0]), kind[0])):
        cards = ", ".join(sorted({row["num_gpus"] for row in some}))
        peaks = [int(row["measured_bytes"]) / GIB for row in (some[0], some[-1])]
        span = f"{peaks[0]:.1f} to {peaks[1]:.1f}" if len(some) > 1 else f"{peaks[0]:.1f}"
        equal = sum(int(row["difference_bytes"]) == 0 for row in some)
        worst = max((float(row["difference_percent"]) for row in some), key=abs)
        lines.append([model.split("/")[-1], method, len(some), cards, span, equal, f"{worst:+.4f}"])
    head = ["model", "method", "runs", "A100s", "published peaks, GiB", "byte-exact", "worst error, %"]
    return as_markdown(head, "llrllrr", lines)
