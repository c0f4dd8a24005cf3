"""The gate of recipes: any answer against the oracles: ``python benchmarks/truth/recipes.py`` rebuilds recipes.md.

An answer is a function of one cell, ``answer(oracle) -> (allocated, reserved)`` in bytes, null where it has none;
``tests/oracles/oracles.py`` says what an oracle holds. recipes.md has today's arithmetic as the baseline, from the
frozen rows (seconds), and what recipes say of the cells that ``--record N`` recorded: N of each kind, of ranks of each
sharding, and all that arithmetic does not know (1 to 60 seconds each; recipes.csv keeps them). ``--answer
MODULE:FUNCTION`` prints the same tables for another answer, ``--differing`` also each cell that it has otherwise;
``--kind`` takes these lines of the tables alone (``--kind "ranks, zero3"``, or ``--kind ranks`` for all of them).
``--check`` says whether recipes.md is what the rows give. ``--again N`` runs N of the kept emulated runs again, drawn
by seed, each whole on the emulated GPU that it is kept for (ranks of ZeRO need DeepSpeed in the emulated environment);
the exit code is 1 where one takes other bytes.
"""

import argparse
import importlib
import math
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.journal import run_cell
from benchmarks.tables import append_csv, as_markdown, filled, read_csv, write_or_check
from tests.oracles import oracles
from tests.oracles.oracles import Oracle
from vramprobe.errors import VramprobeError

PAGE, CSV = (Path(__file__).with_suffix(end) for end in (".md", ".csv"))
Sizes = tuple[int | None, int | None]
Answer = Callable[[Oracle], Sizes]
#: Of the cells with the largest differences so many are named.
_WORST = 12


class Compared(NamedTuple):
    """One cell's answer beside its reference: bytes, of each tier that both have."""

    oracle: Oracle
    answered: Sizes
    reference: Sizes

    def percent(self, tier: int) -> float | None:
        """Return how far the answer is off, in percent; None where one of both is not known."""
        answered, reference = self.answered[tier], self.reference[tier]
        return None if answered is None or not reference else 100 * (answered / reference - 1)

    def is_equal(self, tier: int) -> bool:
        return self.answered[tier] == self.reference[tier]


def arithmetic(oracle: Oracle) -> Sizes:
    """Return what predict said by arithmetic, frozen."""
    today = oracle.today
    return (today.allocated_bytes, today.reserved_bytes) if today.engine == "formula" else (None, None)


def recipe(oracle: Oracle) -> Sizes:
    """Return what the recipe engine said of a cell that ``--record`` recorded."""
    row = _recorded().get((oracle.gpu or "", oracle.spec.fingerprint))
    return (int(row["allocated_bytes"]), int(row["reserved_bytes"])) if row and row["allocated_bytes"] else (None, None)


@cache
def _recorded() -> dict[tuple[str, str], dict[str, str]]:
    return {(row["gpu"], row["fingerprint"]): row for row in read_csv(CSV)}


def record(cells: Sequence[Oracle], number: int) -> None:
    """Record ``number`` cells of each kind, seeded, and all that arithmetic does not know; each once."""
    from vramprobe import catalog
    from vramprobe.predict import recorded
    from vramprobe.recipe.recorder import close_recorders

    known = [one for one in cells if is_emulated(one)]
    groups = sorted(set(map(group_of, known)))
    drawn = [one for one in known if one.today.engine != "formula"]
    for group in groups:
        own = [one for one in known if group_of(one) == group and one.today.engine == "formula"]
        drawn += random.Random(0).sample(own, min(number, len(own)))
    last = None
    for oracle in sorted(drawn, key=lambda one: one.gpu or ""):
        if (oracle.gpu, oracle.spec.fingerprint) in _recorded():
            continue
        if oracle.gpu != last:  # a process with the libraries for each GPU, and one GPU after the other
            close_recorders()
            last = oracle.gpu
        began, found, refusal = time.monotonic(), None, ""
        try:
            found = recorded.predict(oracle.spec, gpu=catalog.find_gpu(oracle.gpu))
        except VramprobeError as error:
            refusal = str(error)[:200]
        row = {
            "kind": oracle.kind,
            "gpu": oracle.gpu,
            "fingerprint": oracle.spec.fingerprint,
            "cell": oracle.spec.cell_id,
            "allocated_bytes": found and found.peak_allocated_bytes.value,
            "reserved_bytes": found and found.reserved_bytes.value,
            "how": refusal or next(one for one in found.warnings if one.startswith("recorded")),
            "seconds": f"{time.monotonic() - began:.1f}",
        }
        append_csv(CSV, row)
        print(oracle.gpu, oracle.spec.cell_id, row["seconds"], refusal, flush=True)


def again(oracle: Oracle) -> Sizes:
    """Return what its run takes now."""
    return run_cell(oracle.gpu or "", oracle.cell)[1]


def is_emulated(oracle: Oracle) -> bool:
    """Tell whether a whole emulated run of the cell is kept, with its bytes."""
    return (is_of_one_gpu(oracle) or is_a_rank(oracle)) and of_run(oracle) != (None, None)


def of_run(oracle: Oracle) -> Sizes:
    """Return what a run took; its reserved memory where no limit of the GPU held it down."""
    run = oracle.run
    if run is None or run.outcome != "ok":
        return None, None
    return run.allocated_bytes, None if run.retries else run.reserved_bytes


def compared(cells: Iterable[Oracle], answer: Answer, reference: Answer) -> list[Compared]:
    """The cells that have a reference, each with its answer."""
    found = []
    for oracle in cells:
        sizes = reference(oracle)
        if sizes != (None, None):
            found.append(Compared(oracle, _asked(answer, oracle), sizes))
    return found


def _asked(answer: Answer, oracle: Oracle) -> Sizes:
    try:
        return answer(oracle)
    except VramprobeError:
        return None, None


def group_of(oracle: Oracle) -> str:
    """A line of the table: the kind, of ranks the sharding."""
    return f"ranks, {oracle.spec.sharding}" if oracle.kind == "ranks" else oracle.kind


def is_of_one_gpu(oracle: Oracle) -> bool:
    """Tell whether the gate counts it as a cell on a single emulated GPU."""
    run = oracle.run
    return run is not None and run.instrument == "emulated" and oracle.spec.num_gpus == 1 and not oracle.is_a_command


def is_a_rank(oracle: Oracle) -> bool:
    """Tell whether it is one of several emulated ranks."""
    return oracle.run is not None and oracle.spec.only_rank is not None


def table(found: Sequence[Compared]) -> list[str]:
    """A line for each kind, then the gate's own."""
    by_group: dict[str, list[Compared]] = {}
    for one in found:
        by_group.setdefault(group_of(one.oracle), []).append(one)
    lines = [[name, *_line(several)] for name, several in sorted(by_group.items())]
    gate = {
        "**one GPU**": [one for one in found if is_of_one_gpu(one.oracle)],
        "**several GPUs**": [one for one in found if one.oracle.spec.num_gpus > 1],
    }
    lines += [[name, *_line(several)] for name, several in gate.items() if several]
    tiers = [f"{tier}: {what}" for tier in ("allocated", "reserved") for what in ("equal", "median, 90 %, worst")]
    return as_markdown(["kind", "cells", "answered", *tiers], "lrrrrrr", lines)


def _line(several: Sequence[Compared]) -> list[str]:
    answered = sum(one.answered != (None, None) for one in several)
    cells = [str(len(several)), str(answered)]
    for tier in (0, 1):
        own = [one for one in several if one.percent(tier) is not None]
        off = sorted(abs(one.percent(tier) or 0) for one in own)
        equal = sum(one.is_equal(tier) for one in own)
        cells.append(f"{equal} of {len(own)}" if own else "–")
        spread = (statistics.median(off), off[math.ceil(0.9 * len(off)) - 1], off[-1]) if off else ()
        cells.append(", ".join(f"{one:.3f} %" for one in spread) or "–")
    return cells


def furthest(found: Sequence[Compared], tier: int) -> list[str]:
    """The cells with the largest differences."""
    own = [one for one in found if one.percent(tier)]
    own.sort(key=lambda one: -abs(one.percent(tier) or 0))
    lines = [_named(one, tier) for one in own[:_WORST]]
    return as_markdown(["cell", "kind", "GPU", "run, bytes", "answer, %"], "lllrr", lines)


def furthest_of_both(found: Sequence[Compared]) -> list[str]:
    """The cells with the largest differences in allocated memory, then in reserved."""
    lines = []
    for tier, name in enumerate(("allocated", "reserved")):
        lines += ["", f"Furthest off in {name} memory:", "", *furthest(found, tier)]
    return lines


def _named(one: Compared, tier: int) -> list[str]:
    oracle = one.oracle
    off = f"{one.percent(tier):+.4f}"
    return [oracle.spec.cell_id, group_of(oracle), oracle.gpu or "CPU", f"{one.reference[tier]:,}", off]


def limits(cells: Iterable[Oracle], answer: Answer) -> list[str]:
    """At a GPU's limit: whether the answer's reserved memory lies within what a verdict is held against, and how the
    run ended."""
    counts: dict[tuple[str, str], dict[tuple[bool, str], int]] = {}
    for oracle in cells:
        run, usable = oracle.run, oracle.today.usable_bytes
        if run is None or usable is None or (oracle.kind != "boundary" and run.outcome != "oom"):
            continue
        allocated, reserved = _asked(answer, oracle)
        needed = allocated if reserved is None else reserved
        if needed is not None:
            own = counts.setdefault((oracle.kind, oracle.gpu or "CPU"), {})
            key = (needed <= usable, run.outcome)
            own[key] = own.get(key, 0) + 1
    ends = [(within, outcome) for within in (True, False) for outcome in ("ok", "oom")]
    lines = [[*names, *(own.get(end, 0) for end in ends)] for names, own in sorted(counts.items())]
    head = [f"{place}, {end}" for place in ("within", "beyond") for end in ("ran", "ran out")]
    return as_markdown(["kind", "GPU", *head], "llrrrr", lines)


def verdicts(cells: Iterable[Oracle]) -> list[str]:
    """A line for each GPU: what predict said of runs near its limit, and how they ended."""
    counts: dict[str, Counter[tuple[str | None, str]]] = {}
    for oracle in cells:
        if oracle.kind == "boundary" and oracle.run is not None:
            for name in (oracle.gpu or "CPU", "all"):
                counts.setdefault(name, Counter())[oracle.today.verdict, oracle.run.outcome] += 1
    ends = [(said, outcome) for said in ("fits", "tight", "does not fit") for outcome in ("ok", "oom")]
    lines = [[name, own.total(), *(own[end] for end in ends)] for name, own in counts.items()]
    lines.sort(key=lambda line: line[0] == "all")
    head = [f"{said}, {'ran' if outcome == 'ok' else 'ran out'}" for said, outcome in ends]
    return as_markdown(["GPU", "cells", *head], "lrrrrrrr", lines)


def tables(cells: Sequence[Oracle], answer: Answer, *, baseline: bool = False) -> list[str]:
    """All tables of one answer; ``baseline``: it is the arithmetic that the last one compares with."""
    found = compared(cells, answer, of_run)
    lines = [
        "Against runs: bytes that the run took are right. *Equal*: to the byte, of the cells with both figures.",
        "",
        *table(found),
        *furthest_of_both(found),
        "",
        "At a GPU's limit: reserved memory within or beyond what a verdict leaves it beside the CUDA context, and",
        "how the run ended. A run beyond it can end well, as the emulated context is smaller and as the allocator",
        "gives cached blocks back; a run within it may not run out.",
        "",
        *limits(cells, answer),
    ]
    if not baseline:
        rest = [one for one in cells if of_run(one) == (None, None)]
        lines += ["", "Against arithmetic, where no run was kept:", "", *table(compared(rest, answer, arithmetic))]
    return lines


def page(cells: Sequence[Oracle]) -> str:
    """recipes.md."""
    return filled(
        PAGE,
        cells=f"{len(cells):,}",
        ran=f"{sum(of_run(one) != (None, None) for one in cells):,}",
        arithmetic=tables(cells, arithmetic, baseline=True),
        verdicts=verdicts(cells),
        recipes=_of_recipes(cells),
    )


def _of_recipes(cells: Sequence[Oracle]) -> list[str]:
    own = [one for one in cells if recipe(one) != (None, None)]
    refused = [row for row in _recorded().values() if not row["allocated_bytes"]]
    if not own:
        return []
    found = compared(own, recipe, of_run)
    how = {key: row["how"] for key, row in _recorded().items()}
    extended = [one for one in own if how[one.gpu or "", one.spec.fingerprint].startswith("recorded on")]
    return [
        "",
        "## Recipes",
        "",
        f"{len(own)} of these cells by `predict --engine recipe` (`--record N`): {len(extended)} recorded at three",
        "depths, extended and checked on a fourth, the others, most of 2 to 4 layers, recorded whole.",
        f"{len(refused)} more were drawn and not answered" + (":" if refused else "."),
        *(f"{row['cell']} ({row['how']});" for row in refused),
        "",
        *table(found),
        "",
        "Those that were extended:",
        "",
        *table(compared(extended, recipe, of_run)),
        "",
        "Arithmetic of the same cells:",
        "",
        *table(compared(own, arithmetic, of_run)),
        *furthest_of_both(found),
    ]


def differing(found: Iterable[Compared]) -> list[str]:
    """A line for each cell whose answer is not its reference, or that has none."""
    lines = []
    for one in found:
        sizes = [f"{mine} for {theirs}" for mine, theirs in zip(one.answered, one.reference, strict=True) if theirs]
        if any(theirs and mine != theirs for mine, theirs in zip(one.answered, one.reference, strict=True)):
            lines.append(f"{group_of(one.oracle)}, {one.oracle.gpu}, {one.oracle.spec.cell_id}: {', '.join(sizes)}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answer", metavar="MODULE:FUNCTION")
    parser.add_argument("--kind", action="append", default=[])
    parser.add_argument("--differing", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--record", type=int, metavar="N")
    parser.add_argument("--again", type=int, metavar="N")
    words = parser.parse_args()
    cells = [one for one in oracles.cells() if not words.kind or {one.kind, group_of(one)} & {*words.kind}]
    if words.record is not None:
        record(cells, words.record)
        return
    if words.again is not None:
        kept = [one for one in cells if is_emulated(one)]
        found = compared(random.Random(0).sample(kept, min(words.again, len(kept))), again, of_run)
        print("\n".join([*table(found), "", *differing(found)]))
        sys.exit(bool(differing(found)))
    if words.answer or words.kind or words.differing:
        module, _, name = (words.answer or f"{__name__}:arithmetic").partition(":")
        answer = getattr(importlib.import_module(module), name)
        print("\n".join(tables(cells, answer)))
        if words.differing:
            print("\n".join(["", *differing(compared(cells, answer, of_run))]))
        return
    write_or_check({PAGE: page(cells)}, "truth/recipes.py", check=words.check)


if __name__ == "__main__":
    main()
