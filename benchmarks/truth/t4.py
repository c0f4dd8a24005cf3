"""Published runs on a Tesla T4, emulated and predicted: ``python benchmarks/truth/t4.py`` (t4.csv and t4.md).

t4_published.csv has what others measured. ``--run`` repeats each cell by t4_train.py on an emulated T4, under the
libraries that its row names (``--python``: an interpreter that has them, ``uv pip sync t4_libraries.txt``), into
t4.jsonl, smallest first; run it again to go on. ``--check`` says whether the page is what the journal gives.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import journal
from benchmarks.tables import as_csv, as_markdown, filled, read_csv, write_or_check
from vramprobe.catalog import find_gpu
from vramprobe.catalog.contexts import context_of
from vramprobe.predict.prediction import Prediction
from vramprobe.predict.questions import predicted
from vramprobe.predict.verdict import verdict
from vramprobe.recommend.recorded import estimated, find_step, one_gpu, record_step
from vramprobe.resolve import resolve
from vramprobe.spec import CellSpec
from vramprobe.units import MIB

HERE = Path(__file__).resolve().parent
PUBLISHED, JOURNAL, CSV, PAGE = (HERE / name for name in ("t4_published.csv", "t4.jsonl", "t4.csv", "t4.md"))
#: The loop that the rows describe, of those of ``--loop``.
LOOP = "step-function"
_CELL = ("model", "attn", "quant", "lora_r", "batch", "seq")
NOT_IN_CATALOG = ("deepseek-ai/deepseek-coder-1.3b-instruct",)
_LIBRARIES = ("torch", "transformers", "peft")


def cell_of(row: dict[str, str]) -> str:
    """The words of t4_train.py for a row."""
    return " ".join(row[name] for name in _CELL)


def run(python: Path, seconds: float, only: str | None) -> None:
    """Repeat what the journal lacks under the libraries of ``python``, for at most so long."""
    libraries = _libraries_of(python)
    wanted = {cell_of(row): row for row in read_csv(PUBLISHED)}
    known = journal.latest(journal.read(JOURNAL), "line", "fingerprint")
    started = time.monotonic()
    for cell in sorted(wanted, key=lambda cell: _size(wanted[cell])):
        if (cell, libraries) in known or (only and only not in cell):
            continue
        if time.monotonic() - started > seconds:
            break
        entry = _repeated(python, cell)
        journal.append(JOURNAL, {"line": cell, "fingerprint": libraries} | entry)
        print(cell, entry, flush=True)


def _repeated(python: Path, cell: str) -> dict[str, Any]:
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found, script = Path(folder) / "found.json", HERE / "t4_train.py"
        words = [sys.executable, "-m", "vramprobe", "profile", "--emulate", "T4", "--empty-weights", "--whole"]
        words += ["--no-speed", "--no-probe", "--trace", "none", "--", str(python), str(script), *cell.split()]
        ended = subprocess.run([*words, str(found)], cwd=folder, capture_output=True, text=True)
        outcome = {"outcome": "ok"} | json.loads(found.read_text()) if found.exists() else {"outcome": "error"}
    if outcome["outcome"] == "error":
        said = f"{ended.stdout}\n{ended.stderr}"
        outcome = {"outcome": "oom" if "out of memory" in said.lower() else "error", "said": said[-400:]}
    return outcome | {"wall_seconds": round(time.monotonic() - started)}


def _libraries_of(python: Path) -> str:
    code = f"import importlib.metadata as m; print(*(f'{{n}} {{m.version(n)}}' for n in {_LIBRARIES!r}), sep=', ')"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def _size(row: dict[str, str]) -> tuple[float, int]:
    return float(row["allocated_mib"] or 1e9), int(row["seq"])


def rows() -> list[dict[str, Any]]:
    """A row for each published run that completed: measured, emulated and predicted bytes, and step times."""
    entries = journal.latest(journal.read(JOURNAL), "line", "fingerprint")
    found = []
    for row in read_csv(PUBLISHED):
        if not row["allocated_mib"]:
            continue
        libraries = f"torch {row['torch'].split('+')[0]}, transformers {row['transformers']}, peft {row['peft']}"
        emulated = entries.get((cell_of(row), libraries), {})
        measured = {name: round(float(row[f"{name}_mib"]) * MIB) for name in ("allocated", "reserved")}
        measured["device"] = round(float(row["process_mib"]) * MIB)
        one: dict[str, Any] = {"id": row["id"], "cell": cell_of(row), "rounded": row["rounded"], "libraries": libraries}
        one |= {"outcome": emulated.get("outcome", "not run")}
        one |= {f"measured_{name}_bytes": size for name, size in measured.items()}
        one |= {f"emulated_{name}_bytes": _emulated(emulated, name) for name in measured}
        one |= _predicted(row)
        one["measured_seconds"] = round(float(row["step_seconds"]), 4) if row["step_seconds"] else None
        found.append(one | {"emulated_cause": emulated_cause(one), "predicted_cause": predicted_cause(one)})
    return found


def error(one: dict[str, Any], name: str, tier: str) -> float | None:
    """Relative error of ``name`` (emulated, predicted) against the measured bytes of a tier."""
    ours = one[f"{name}_bytes"] if tier in name else one[f"{name}_{tier}_bytes"]
    return None if ours is None else ours / one[f"measured_{tier}_bytes"] - 1


def is_off(one: dict[str, Any], name: str) -> bool:
    """Return True above 0.1 % of allocated or 3 % of reserved memory."""
    allocated, reserved = error(one, name, "allocated"), error(one, name, "reserved")
    return (allocated is not None and abs(allocated) > 1e-3) or (reserved is not None and abs(reserved) > 0.03)


def emulated_cause(one: dict[str, Any]) -> str:
    """Say why the emulation differs; empty where it does not by much."""
    if one["outcome"] == "not run" or not is_off(one, "emulated"):
        return ""
    if " nf4 " in one["cell"]:
        return "4-bit load: threads race the quantizer"
    return "unexplained"


def predicted_cause(one: dict[str, Any]) -> str:
    """Say why the prediction differs; empty where it does not by much."""
    if one["predicted_allocated_bytes"] is None or not is_off(one, "predicted"):
        return ""
    if " sdpa " in one["cell"] and one["has_grouped_heads"]:
        return "the loop repeats keys; transformers' own call does not"
    causes = [] if abs(error(one, "predicted", "allocated") or 0) <= 1e-3 else ["unexplained"]
    if abs(error(one, "predicted", "reserved") or 0) > 0.03:
        causes.append("reserved: " + ("the 4-bit load's order" if " nf4 " in one["cell"] else "unexplained"))
    return "; ".join(causes)


def _emulated(entry: dict[str, Any], tier: str) -> int | None:
    """The device tier is what was reserved and the context that the catalog has today."""
    if entry.get("outcome") != "ok":
        return None
    context = context_of(find_gpu("T4").name)
    assert context is not None
    return entry["reserved"] + context.value_bytes if tier == "device" else entry[tier]


def spec_of(row: dict[str, str], loop: str) -> CellSpec:
    """The row's cell under a loop of ``--loop``."""
    four_bit = row["quant"] == "nf4"
    return resolve(
        device="cuda",
        model=row["model"],
        method="qlora" if four_bit else "lora",
        quant="nf4-single" if four_bit else "none",
        lora_r=int(row["lora_r"]),
        lora_targets="q_proj,k_proj,v_proj,o_proj",
        batch_size=int(row["batch"]),
        seq_len=int(row["seq"]),
        dtype="fp16",
        autocast="none",
        attn=row["attn"],
        gradient_checkpointing=True,
        optim="adamw_torch",
        loop=loop,
    )


def _prediction(spec: CellSpec) -> tuple[Prediction, str]:
    """Return what ``predict`` says of a cell on a T4, by a recording, and its verdict."""
    card = find_gpu("T4")
    found = predicted(spec, gpu=card)
    return found, verdict(found, card).verdict


def _predicted(row: dict[str, str]) -> dict[str, Any]:
    """Predict the row's cell under a Trainer's loop and under its own, and by the speed model the time of a step;
    empty for a model that the catalog does not have."""
    if row["model"] in NOT_IN_CATALOG:
        return dict.fromkeys(_PREDICTED)
    card, context = find_gpu("T4"), context_of("T4")
    assert context is not None
    values: list[Any] = []
    for loop in ("trainer", LOOP):
        found, judged = _prediction(spec_of(row, loop))
        assert found.reserved_bytes is not None
        reserved = found.reserved_bytes.value
        values += [found.peak_allocated_bytes.value, reserved, reserved + context.value_bytes, judged]
    spec = spec_of(row, LOOP)
    step = find_step(one_gpu(spec), card, near=False) or record_step(one_gpu(spec), card, print, over_rows=False)
    rate, text = estimated(spec, step, card).tokens_per_second, spec.architecture
    values += [round(spec.num_tokens / one, 4) for one in (rate.value, rate.high, rate.low)]
    heads = text["num_attention_heads"]
    return dict(zip(_PREDICTED, [*values, text.get("num_key_value_heads", heads) < heads], strict=True))


_TIERS = ("allocated", "reserved", "device")
_PREDICTED = (
    *(f"trainer_{tier}_bytes" for tier in _TIERS),
    "trainer_verdict",
    *(f"predicted_{tier}_bytes" for tier in _TIERS),
    "predicted_verdict",
    "predicted_seconds",
    "low_seconds",
    "high_seconds",
    "has_grouped_heads",
)


def _summary(found: list[dict[str, Any]]) -> list[str]:
    lines = []
    known = [one for one in found if one["predicted_allocated_bytes"] is not None]
    groups = [
        ("emulated", "emulated", found),
        ("trainer", "predicted, `--loop trainer`, same attention", _loops(known)),
        ("predicted", f"predicted, `--loop {LOOP}`, same attention", _loops(known)),
        ("trainer", "predicted, `--loop trainer`, all", known),
        ("predicted", f"predicted, `--loop {LOOP}`, all", known),
    ]
    for name, words, some in groups:
        for tier in _TIERS:
            errors = [error(one, name, tier) for one in some]
            lines.append([words, tier, *_spread([value for value in errors if value is not None])])
    times = [one for one in found if one["measured_seconds"] and one["predicted_seconds"]]
    lines.append(
        ["predicted", "step time", *_spread([o["predicted_seconds"] / o["measured_seconds"] - 1 for o in times])]
    )
    return as_markdown(["", "tier", "runs", "median, %", "90 %, %", "worst, %"], "llrrrr", lines)


def _verdicts() -> list[str]:
    """The runs near the limit: what became of each, and what ``predict`` says of it under either loop."""
    table = []
    for row in read_csv(PUBLISHED):
        if not row["role"].startswith("ceiling") or row["model"] in NOT_IN_CATALOG:
            continue
        ended = "ran" if row["allocated_mib"] else "out of memory"
        table.append([cell_of(row), ended, *(_prediction(spec_of(row, loop))[1] for loop in ("trainer", LOOP))])
    return as_markdown(["cell", "measured", "`--loop trainer`", f"`--loop {LOOP}`"], "llll", table)


def _loops(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows whose attention is the one that predict assumes."""
    known = [one for one in found if one["predicted_allocated_bytes"] is not None]
    return [one for one in known if " eager " in one["cell"] or not one["has_grouped_heads"]]


def _spread(errors: list[float]) -> list[str]:
    if not errors:
        return ["0", "", "", ""]
    sizes = sorted(map(abs, errors))
    worst = max(errors, key=abs)
    ninety = sizes[math.ceil(0.9 * len(sizes)) - 1]
    return [str(len(sizes)), f"{100 * statistics.median(sizes):.2f}", f"{100 * ninety:.2f}", f"{100 * worst:+.2f}"]


def page(found: list[dict[str, Any]]) -> str:
    """The whole page."""
    table = []
    names = ("emulated", "trainer", "predicted")
    for one in found:
        shown = [one["id"], one["cell"]]
        for tier in _TIERS:
            shown += [f"{one[f'measured_{tier}_bytes'] / MIB:,.{1 if tier == 'allocated' else 0}f}"]
            shown += [_percent(error(one, name, tier)) for name in names]
        table.append([*shown, one["emulated_cause"], one["predicted_cause"]])
    head = ["run", "cell"]
    for tier in _TIERS:
        head += [f"{tier}, MiB", "emulated", "trainer", LOOP]
    return filled(
        PAGE,
        summary=_summary(found),
        verdicts=_verdicts(),
        times=_times(found),
        table=as_markdown([*head, "emulated: cause", "predicted: cause"], "ll" + "r" * 12 + "ll", table),
    )


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:+.2f}"


def _times(found: list[dict[str, Any]]) -> list[str]:
    timed = {one["cell"]: one for one in found if one["measured_seconds"] and one["predicted_seconds"]}
    inside = sum(one["low_seconds"] <= one["measured_seconds"] <= one["high_seconds"] for one in timed.values())
    table = [
        [
            one["cell"],
            *(f"{one[f'{name}_seconds']:.2f}" for name in ("measured", "predicted")),
            f"{one['low_seconds']:.2f} to {one['high_seconds']:.2f}",
        ]
        for one in timed.values()
    ]
    said = f"{inside} of {len(table)} cells are inside the interval."
    return [said, "", *as_markdown(["cell", "measured, s", "predicted, s", "interval, s"], "lrrr", table)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="repeat what the journal lacks")
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="the interpreter with the libraries")
    parser.add_argument("--seconds", type=float, default=3600, help="start no run after so many")
    parser.add_argument("--only", help="cells whose words contain this")
    parser.add_argument("--check", action="store_true", help="write nothing, fail if csv or page is stale")
    given = parser.parse_args()
    if given.run:
        run(given.python, given.seconds, given.only)
    found = rows()
    write_or_check({CSV: as_csv(found), PAGE: page(found)}, "truth/t4.py", check=given.check)


if __name__ == "__main__":
    main()
