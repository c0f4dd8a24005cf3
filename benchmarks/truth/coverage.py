"""Share of real runs that printed intervals hold: ``python benchmarks/truth/coverage.py`` writes coverage.md.

In: runs that others published, of five sources, to which nothing was fitted; each is predicted with all that its source
says (*told*), and with neither its loop nor its releases (*open*). Out: the share that the 90 % intervals hold, by
kind, and the shares by which predict/unknowns.py widens them: of versions, from benchmarks/versions/versions.csv; of
fragmentation, from the half of the runs whose name has an even SHA-256, which is then not counted. ``--check`` fails
where the page is stale, or where unknowns.py has other shares. ``--record`` makes coverage_recorded.csv anew: the runs
under transformers 4, each recorded with its own libraries (benchmarks/frameworks/stacks.py; needs uv).
"""

import hashlib
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.tables import as_csv, as_markdown, filled, read_csv, write_or_check
from benchmarks.truth import t4
from benchmarks.truth.kept_predictions import predicted_on
from benchmarks.truth.published_rows import PublishedRow, cell_of, list_published
from benchmarks.versions.recorded import python_of
from vramprobe.catalog import find_gpu, text_config
from vramprobe.catalog.gpus import Gpu
from vramprobe.model.fit import conformal_quantile
from vramprobe.predict import recorded
from vramprobe.predict import unknowns as open_words
from vramprobe.predict.prediction import Interval, Prediction
from vramprobe.recipe.recorder import Surroundings
from vramprobe.resolve import resolve
from vramprobe.spec import CellSpec
from vramprobe.units import MIB

PAGE = Path(__file__).with_suffix(".md")
VERSIONS = Path(__file__).resolve().parents[1] / "versions" / "versions.csv"
_FLASH = Path(__file__).with_name("reproduction")
#: Packages that a row names.
_NAMED = ("torch", "transformers", "peft", "bitsandbytes")
TIERS = {"allocated": "peak_allocated_bytes", "reserved": "reserved_bytes"}
_FMS, _LORA, _DEEPSPEED = "fms-acceleration benchmark refs", "PEFT method_comparison", "stas00/ml-engineering"
_FSDP_QLORA = "AnswerDotAI/fsdp_qlora"
RECORDED = Path(__file__).with_name("coverage_recorded.csv")
#: Lines of published.csv that ran under transformers 4, each with the stack that has its releases.
_STACKS = dict.fromkeys((10, 22, 40), "fms-2025-02") | dict.fromkeys((78, 90, 108, 120), "fms-2024-12")
_STACKS |= dict.fromkeys((515, 516), "hf-2025-10")


@dataclass(frozen=True, kw_only=True)
class RealRun:
    """A published run: its cell as a Trainer's, what it took by tier, and what its source says beside the cell."""

    source: str
    name: str
    spec: CellSpec
    card: Gpu
    measured: dict[str, int]
    loop: str  # of --loop; empty where the source does not say
    is_fourth: bool  # before transformers 5
    stack: str = ""  # whose libraries the run had, where they are not the pinned ones
    knows_versions: bool = False  # the source says them, and they are the pinned ones or those of ``stack``

    @property
    def sets_widths(self) -> bool:
        """Return True for the half that fragmentation's share is from."""
        return hashlib.sha256(f"{self.source} {self.name}".encode()).digest()[0] % 2 == 0


def real_runs() -> Iterator[RealRun]:
    """Every run that is a cell of transformers' own model, by source."""
    for row in read_csv(t4.PUBLISHED):
        if row["model"] not in t4.NOT_IN_CATALOG and row["allocated_mib"]:
            taken = {tier: round(float(row[f"{tier}_mib"]) * MIB) for tier in TIERS}
            words = {"knows_versions": True, "loop": t4.LOOP, "is_fourth": False, "measured": taken}
            name, spec = f"{t4.cell_of(row)} {row['id']}", t4.spec_of(row, "trainer")
            if _repeats_keys(spec):
                continue
            yield RealRun(source="fitcheck-llm", name=name, spec=spec, card=find_gpu("T4"), **words)
    for row in list_published():
        found = _published(row)
        if found is not None:
            yield found


def _repeats_keys(spec: CellSpec) -> bool:
    """Return True for a T4's run whose loop repeats keys of grouped heads: another kernel than the cell's (t4.md)."""
    text = text_config(spec.architecture)
    grouped = text.get("num_key_value_heads") not in (None, text["num_attention_heads"])
    return spec.attn == "sdpa" and grouped


def _published(row: PublishedRow) -> RealRun | None:
    tier = {"max_allocated": "allocated", "max_reserved": "reserved"}.get(row.metric)
    if tier is None or row.memory_bytes is None:
        return None
    version = row.versions.get("transformers", ())
    known = {"name": f"line {row.line}", "measured": {tier: row.memory_bytes}, "is_fourth": version < (5,)}
    stack = _STACKS.get(row.line, "")
    told = {"stack": stack, "knows_versions": bool(stack) or (row.num_gpus == 1 and version >= (5,))}
    if row.source == _FMS:
        spec = cell_of(replace(row, num_gpus=1, sharding="none"))
        if spec is None:
            return None
        spec = spec if row.num_gpus == 1 else on_ranks(spec, "fsdp1", row.num_gpus)
        return RealRun(
            source="fms-acceleration", spec=spec, card=find_gpu("A100-80GB-SXM"), loop="trainer", **told, **known
        )
    if row.source.startswith(_LORA) and row.method == "lora" and row.optimizer == "AdamW":
        # batches grow to the cap; its training loop is PEFT's own, which keeps the outputs
        spec = cell("llama-3.2-3b", row, seq_len=768, lora_targets=",".join(row.lora_targets))
        words = {"card": find_gpu("L40S"), "loop": "keeps-outputs", **told}
        return RealRun(source="PEFT's method comparison", spec=spec, **words, **known)
    if row.source.startswith(_FSDP_QLORA) and row.model == "Llama-2-7B" and row.sharding == "FSDP":
        quantized = {"quant": "nf4-single", "kbit_prep": "none"} if row.method == "qlora" else {}
        spec = on_ranks(cell("llama-2-7b", row, **quantized, lora_targets="all-linear"), "fsdp1", 2)
        card = find_gpu("RTX-3090" if "3090" in (row.gpu or "") else "RTX-4090")
        return RealRun(source="fsdp_qlora", spec=spec, card=card, loop="", **known)
    if row.source.startswith(_DEEPSPEED) and "without Liger" in row.notes:
        spec = on_ranks(cell("llama-3.1-8b", row, attn="flash_attention_2"), "zero2", 8)
        card = find_gpu("H200")
        return RealRun(source="stas00/ml-engineering", spec=spec, card=card, loop="", **known)
    return None


def cell(model: str, row: PublishedRow, **words: object) -> CellSpec:
    """A row's cell, in bf16 with AdamW, with ``words`` beside what its columns say."""
    own = {"batch_size": row.batch_size, "seq_len": row.seq_len, "optim": "adamw_torch", "dtype": "bf16"}
    own |= {"gradient_checkpointing": bool(row.gradient_checkpointing)}
    own |= {"lora_r": row.lora_r} if row.method != "full" else {}
    return resolve(device="cuda", model=model, method=row.method, **own | words)


def on_ranks(spec: CellSpec, sharding: str, num_gpus: int | None) -> CellSpec:
    return spec.model_copy(update={"sharding": sharding, "num_gpus": num_gpus})


def answer(run: RealRun, *, is_told: bool, without: Sequence[str] = ()) -> Prediction:
    """Return what ``predict`` prints of a run: with all that its source says, or without loop and releases."""
    spec, given = run.spec, []
    if is_told and run.loop:
        given.append("loop")
        spec = in_its_loop(run)
    if is_told and run.knows_versions:
        given.append("versions")
    found = predicted_on(spec, run.card)
    if is_told and run.stack:
        found = found.model_copy(update=recorded_tiers()[run.name])
    by = open_words.unknowns(spec, found, given)
    return open_words.with_unknowns(found, [one for one in by if one.name not in without])


def in_its_loop(run: RealRun) -> CellSpec:
    """Return the run's cell under its own loop, where that is said and known of one GPU."""
    if run.spec.num_gpus > 1 or not run.loop:
        return run.spec
    return run.spec.model_copy(update={"loop": run.loop})


@cache
def recorded_tiers() -> dict[str, dict[str, Interval]]:
    """Each run of ``coverage_recorded.csv`` → its intervals by field of a Prediction."""
    ends = ("value", "low", "high")
    return {
        row["run"]: {
            field: Interval(**{end: int(row[f"{tier}_{end}_bytes"]) for end in ends}) for tier, field in TIERS.items()
        }
        for row in read_csv(RECORDED)
    }


def record(runs: Iterable[RealRun]) -> list[dict[str, Any]]:
    """Record each run that has a stack with its libraries; flash-attn is the empty one of reproduction/."""
    found = []
    for run in runs:
        if run.stack:
            python = python_of(run.stack)
            (next(python.parents[1].glob("lib/*/site-packages")) / "flash_attn.pth").write_text(f"{_FLASH}\n")
            where = Surroundings(python=python)
            said = recorded.predict(in_its_loop(run), gpu=run.card, where=where)
            row = {"run": run.name, "stack": run.stack, **{name: said.libraries[name] for name in _NAMED}}
            for tier, field in TIERS.items():
                row |= {f"{tier}_{end}_bytes": size for end, size in getattr(said, field).model_dump().items()}
            found.append(row)
    return found


@dataclass(frozen=True, kw_only=True)
class Held:
    """One figure of a run beside the printed interval."""

    run: RealRun
    tier: str
    is_told: bool
    interval: Interval

    @property
    def measured(self) -> int:
        return self.run.measured[self.tier]

    @property
    def is_inside(self) -> bool:
        return self.interval.low <= self.measured <= self.interval.high

    @property
    def beyond(self) -> float:
        """Distance outside of the interval, as a share of the prediction; negative inside."""
        return max(self.interval.low - self.measured, self.measured - self.interval.high) / self.interval.value


def held(runs: Iterable[RealRun], *, is_told: bool, without: Sequence[str] = ()) -> list[Held]:
    """Each figure beside its interval; those of which nothing is predicted are left out."""
    found = []
    for run in runs:
        said = answer(run, is_told=is_told, without=without)
        intervals = {tier: getattr(said, TIERS[tier]) for tier in run.measured}
        found += [
            Held(run=run, tier=tier, is_told=is_told, interval=one)
            for tier, one in intervals.items()
            if one is not None
        ]
    return found


def versions_share() -> tuple[float, float]:
    """(below, above): 5 % of the older runs are further below today's peak, 5 % further above; by conformal ranks."""
    rows = [row for row in read_csv(VERSIONS) if row["outcome"] == "ok" and row["trainer"] == "trainer"]
    rows = [row for row in rows if "mixtral" not in row["run"]]
    newest = max(row["day"] for row in rows)
    peak = {(row["run"], row["day"]): int(row["step_bytes"] or row["peak_bytes"]) for row in rows}
    ratios = sorted(size / peak[run, newest] - 1 for (run, day), size in peak.items() if day != newest)
    place = len(ratios) - math.ceil((len(ratios) + 1) * 0.95)  # as many are left out at either end
    return max(-ratios[place], 0.0), max(ratios[-1 - place], 0.0)


def fragmentation_share(runs: Sequence[RealRun]) -> float:
    """By how much of itself reserved memory's interval must grow at both ends to hold 90 % of the half set apart."""
    apart = [run for run in runs if run.sets_widths and run.spec.num_gpus == 1]
    rows = [one for one in held(apart, is_told=True, without=("fragmentation",)) if one.tier == "reserved"]
    return max(conformal_quantile(one.beyond for one in rows), 0.0)


KINDS: dict[str, Callable[[Held], str]] = {
    "tier": lambda one: one.tier,
    "source": lambda one: one.run.source,
    "loop": lambda one: "not said" if not one.run.loop else one.run.loop,
    "card": lambda one: one.run.card.short_name,
    "quantization": lambda one: one.run.spec.quant,
    "sharding": lambda one: one.run.spec.sharding or "one GPU",
    "stack": lambda one: "transformers 4" if one.run.is_fourth else "transformers 5",
}


def page(runs: Sequence[RealRun]) -> str:
    """Markdown: the shares, coverage by kind, and every figure outside of its interval."""
    told, bare = ([one for one in held(runs, is_told=yes) if _counts(one)] for yes in (True, False))
    lines = []
    for kind, value_of in {"all": lambda one: "", **KINDS}.items():
        for value in dict.fromkeys(value_of(one) for one in told):
            groups = [[one for one in rows if value_of(one) == value] for rows in (told, bare)]
            lines.append([kind, value, len(groups[0]), *(cell for group in groups for cell in _of_group(group))])
    head = ["kind", "", "figures", "told: held", "median half-width", "open: held", "median half-width"]
    outside = [
        [one.run.source, f"{one.run.spec.cell_id}", one.tier, f"{100 * (one.interval.value / one.measured - 1):+.1f}"]
        + [f"{100 * (end / one.measured - 1):+.1f}" for end in (one.interval.low, one.interval.high)]
        for one in told
        if not one.is_inside
    ]
    below, above = open_words.VERSIONS
    by_ranks = [
        _of_group([one for one in rows if (one.run.spec.num_gpus > 1) is yes])[0]
        for yes in (False, True)
        for rows in (told, bare)
    ]
    ranks = [one for one in told if one.run.spec.num_gpus > 1]
    recorded_ranks, composed = ([one for one in ranks if bool(one.run.stack) is yes] for yes in (True, False))
    furthest = max(abs(one.interval.value / one.measured - 1) for one in recorded_ranks)
    return filled(
        PAGE,
        recorded=_of_group(recorded_ranks)[0],
        furthest=f"{100 * furthest:.4f}",
        composed=_of_group(composed)[0],
        **dict(zip(("one", "open", "many", "many_open"), by_ranks, strict=True)),
        runs=len(runs),
        sources=len({run.source for run in runs}),
        figures=len(told),
        apart=sum(run.sets_widths and run.spec.num_gpus == 1 and "reserved" in run.measured for run in runs),
        below=f"{100 * below:.1f}",
        above=f"{100 * above:.1f}",
        fragmentation=f"{100 * open_words.FRAGMENTATION:.1f}",
        table=as_markdown(head, "llrrrrr", lines),
        outside=as_markdown(["source", "run", "tier", "predicted, %", "low, %", "high, %"], "lllrrr", outside),
    )


def _counts(one: Held) -> bool:
    """Return True for a figure that no width is from."""
    return not (one.run.sets_widths and one.tier == "reserved" and one.run.spec.num_gpus == 1)


def _of_group(group: Sequence[Held]) -> list[str]:
    inside = sum(one.is_inside for one in group)
    width = statistics.median((one.interval.high - one.interval.low) / 2 / one.interval.value for one in group)
    return [f"{inside} of {len(group)} ({100 * inside / len(group):.0f} %)", f"{100 * width:.1f} %"]


def main() -> None:
    runs = list(real_runs())
    if "--record" in sys.argv[1:]:
        RECORDED.write_text(as_csv(record(runs)))
    derived = (*(round(one, 3) for one in versions_share()), round(fragmentation_share(runs), 3))
    shipped = (*open_words.VERSIONS, open_words.FRAGMENTATION)
    if derived != shipped:
        sys.exit(f"vramprobe/predict/unknowns.py has the shares {shipped}, and these runs give {derived}")
    write_or_check({PAGE: page(runs)}, "truth/coverage.py", check="--check" in sys.argv[1:])


if __name__ == "__main__":
    main()
