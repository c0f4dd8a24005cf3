"""Recorded runs of the repository as cells: what each journal and table has of a run, and where it stands.

In: results/ and benchmarks/. Out: Ran, one for each run of a cell that resolves today. Runs nothing and predicts
nothing; it takes the cells of a table from the script that wrote it. Used by freeze.py alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.ranks import one_rank
from benchmarks.tables import read_csv
from benchmarks.techniques import predicted as techniques
from benchmarks.truth import catalog as architectures
from benchmarks.truth import emulated, emulated_edges, emulated_fit, llama4, losses, vision
from benchmarks.versions import predicted as releases
from benchmarks.versions import runs as commands
from vramprobe.catalog import find_gpu
from vramprobe.records import store
from vramprobe.records.record import RunRecord
from vramprobe.spec import CellSpec, resolve
from vramprobe.sweep.definition import load_sweep

ROOT = Path(__file__).parents[2]
RANKS, RESULTS = ROOT / "benchmarks" / "ranks", ROOT / "results"
Row = Mapping[str, str]


class Ran(NamedTuple):
    """One run: its kind, the GPU, the cell, and the figures with their origin as the oracle keeps them."""

    kind: str
    gpu: str | None  # null on the CPU
    spec: CellSpec
    run: dict[str, Any]


def recorded() -> Iterator[Ran]:
    """Every run that is kept, kind by kind."""
    for source in (
        of_records,
        of_options,
        of_catalog,
        of_losses,
        of_vision,
        of_llama4,
        of_edges,
        of_ranks,
        of_fewest,
        of_device_map,
        of_techniques,
        of_releases,
    ):
        for one in source():
            yield one._replace(gpu=one.gpu and find_gpu(one.gpu).short_name)


def _run(path: Path, where: Mapping[str, str], figures: Mapping[str, Any], instrument: str = "emulated") -> dict:
    """The figures that are known; a text is a table's."""
    known = {
        name: int(one) if name.endswith(("_bytes", "retries")) else one
        for name, one in figures.items()
        if one not in (None, "")
    }
    origin = {"file": str(path.relative_to(ROOT)), "where": dict(where)}
    return {"instrument": instrument, "outcome": "ok", **known, "origin": origin}


def of_records() -> Iterator[Ran]:
    """Whole records: the cells that the shipped fit has seen or not, those of claims, those of the CPU."""
    for record in emulated_fit.read_records():
        kind = "fitted" if emulated_fit.is_fitted(record) else "held out"
        yield _of_record(kind, emulated_fit.card_of(record), record, emulated_fit.RECORDS)
    for path in sorted((RESULTS / "emulated" / "claims").glob("*.jsonl")):
        for record in store.read(path).records:
            yield _of_record("claims", emulated_fit.card_of(record), record, path)
    for name in ("quickstart", "sizes"):
        path = RESULTS / "cpu" / name / "records.jsonl"
        for record in store.latest_by_fingerprint(store.read(path).records).values():
            if record.peak is not None and record.outcome.kind == "ok":
                yield _of_record("cpu", None, record, path)


def _of_record(kind: str, gpu: str | None, record: RunRecord, path: Path) -> Ran:
    figures: dict[str, Any] = {"outcome": record.outcome.kind, "retries": record.num_alloc_retries}
    if record.peak is not None and record.outcome.kind == "ok":
        figures |= {
            "allocated_bytes": record.peak.allocated_bytes,
            "reserved_bytes": record.peak.reserved_bytes,
            "load_bytes": record.peak.load_allocated_bytes,
            "phase": record.peak.phase,
        }
    instrument = "cpu" if gpu is None else "emulated"
    return Ran(kind, gpu, record.spec, _run(path, {"attempt_id": record.attempt_id}, figures, instrument))


def of_options() -> Iterator[Ran]:
    """Each family with each method, optimizer and option."""
    cells = {
        (card, spec.fingerprint): spec
        for card in emulated.CARDS
        for words in emulated.possible(card)
        for spec in [resolve(device="cuda", **words)]
    }
    yield from _of_table("options", emulated.TABLE, cells, ("gpu", "fingerprint"))


def of_losses() -> Iterator[Ran]:
    """TRL's and Cut Cross-Entropy's losses."""
    specs = [resolve(device="cuda", **words) for words in losses.CELLS]
    cells = {(losses.CARD, spec.fingerprint): spec for spec in specs}
    yield from _of_table("losses", losses.TABLE, cells, ("gpu", "fingerprint"))


def _of_table(kind: str, path: Path, cells: Mapping[tuple, CellSpec], keys: tuple[str, ...]) -> Iterator[Ran]:
    """Of a table with a row for each cell; without a column for the GPU, ``cells`` are of one."""
    names = ("outcome", "phase", "allocated_bytes", "reserved_bytes")
    for row in read_csv(path):
        where = {name: row[name] for name in keys}
        sizes = {
            "allocated_bytes": row.get("emulated_allocated_bytes") or row.get("emulated_bytes"),
            "reserved_bytes": row.get("emulated_reserved_bytes"),
        }
        if sizes["allocated_bytes"]:
            figures = {name: (row | sizes).get(name) for name in names}
            yield Ran(kind, where.get("gpu") or where["card"], cells[tuple(where.values())], _run(path, where, figures))


def of_catalog() -> Iterator[Ran]:
    """Every architecture once."""
    cells = architectures.cells()
    for row in read_csv(architectures.TABLE):
        if row["outcome"] == "ok":
            run = _run(architectures.TABLE, {"model": row["model"]}, {"allocated_bytes": row["emulated_bytes"]})
            yield Ran("catalog", architectures.CARD, cells[row["model"]], run)


def of_vision() -> Iterator[Ran]:
    """Cells with images."""
    for spec, row in zip(vision.cells(), read_csv(vision.TABLE), strict=True):
        yield Ran("vision", vision.CARD, spec, _run(vision.TABLE, {"cell": row["cell"]}, _emulated(row)))


def of_llama4() -> Iterator[Ran]:
    """Llama 4, with images and without."""
    cells = {
        (card, spec.cell_id): spec
        for card, blocks in llama4.CELLS.items()
        for words in blocks
        for spec in [resolve(device="cuda", timing_steps=0, **words)]
    }
    for row in read_csv(llama4.TABLE):
        where = {name: row[name] for name in ("card", "cell")}
        spec = cells[row["card"], row["cell"]]
        kind = "vision" if spec.images else "options"
        yield Ran(kind, row["card"], spec, _run(llama4.TABLE, where, _emulated(row)))


def _emulated(row: Row) -> dict[str, str]:
    return {"allocated_bytes": row["emulated_bytes"], "reserved_bytes": row["emulated_reserved_bytes"]}


def of_edges() -> Iterator[Ran]:
    """Cells at a GPU's limit; what they allocated is not kept."""
    path, outcomes = emulated_edges.TABLE, {"fits": "ok", "out of memory": "oom"}
    for gpu, rows in groupby(read_csv(path), lambda row: row["gpu"]):
        cells = _cells(emulated_edges.SWEEPS / f"emulated-edges-{gpu.lower()}.yaml")
        for row in rows:
            figures = {name: row[name] for name in ("reserved_bytes", "retries")}
            where = {"gpu": gpu, "cell": row["cell"]}
            run = _run(path, where, {"outcome": outcomes[row["emulated"]], **figures})
            yield Ran("boundary", gpu, cells[row["cell"]], run)


def _cells(path: Path) -> dict[str, CellSpec]:
    return {spec.cell_id: spec for spec in load_sweep(path, device="cuda").cells}


def of_ranks() -> Iterator[Ran]:
    """Rank 0, or another, of each kind of sharding: the whole run where its reserved memory is kept, else the steady
    step."""
    cells, phases, replayed = _cells(RANKS / "ranks.yaml"), RANKS / "ranks.csv", RANKS / "ranks_replayed.csv"
    whole = {row["cell"]: row for row in read_csv(replayed)}
    for cell, rows in groupby(read_csv(phases), lambda row: row["cell"]):
        top = max((row for row in rows if row["phase"] != "host"), key=lambda row: int(row["allocated_bytes"]))
        figures, path = {"allocated_bytes": top["allocated_bytes"], "phase": top["phase"]}, phases
        if cell in whole:
            path = replayed
            figures |= {f"{tier}_bytes": whole[cell][f"{tier}_emulated_bytes"] for tier in ("allocated", "reserved")}
        yield Ran("ranks", "H100-SXM", cells[cell], _run(path, {"cell": cell}, figures))


def of_fewest() -> Iterator[Ran]:
    """Ranks and single GPUs of which it was asked how few hold a model, some out of memory."""
    names = ("outcome", "phase", "allocated_bytes", "reserved_bytes", "load_bytes", "retries")
    for path in (RANKS / "fewest_cards_runs.csv", RANKS / "ranks_405b.csv"):
        for row in one_rank.read(path):
            if row["outcome"] in ("ok", "oom"):
                more = {"lora_r": 64} if "-r64-" in row["cell"] else {}
                spec = one_rank.cell_of(
                    row["model"], row["recipe"], row["sharding"] or None, int(row["num_gpus"]), **more
                )
                assert spec.cell_id == row["cell"]
                where = {"card": row["card"], "cell": row["cell"]}
                yield Ran("fewest GPUs", row["card"], spec, _run(path, where, {name: row[name] for name in names}))


def of_device_map() -> Iterator[Ran]:
    """One process over several GPUs: the fullest, and each."""
    path, cells = RANKS / "device_map.csv", _cells(RANKS / "device_map.yaml")
    for (gpu, cell), group in groupby(read_csv(path), lambda row: (row["gpu"], row["cell"])):
        cards = list(group)
        outcome = cards[0]["outcome"]
        figures: dict[str, Any] = {"outcome": outcome}
        if outcome == "ok":
            full = max(cards, key=lambda card: int(card["allocated_bytes"]))
            sizes = ("allocated_bytes", "reserved_bytes", "load_bytes")
            figures |= {name: full[name] for name in sizes} | {"phase": full["phase"]}
            figures["cards"] = [{name: int(card[name]) for name in ("card", "num_layers", *sizes)} for card in cards]
        yield Ran("device map", gpu, cells[cell], _run(path, {"gpu": gpu, "cell": cell}, figures))


def of_techniques() -> Iterator[Ran]:
    """Commands with a technique that a cell has an option for."""
    path = ROOT / "benchmarks" / "techniques" / "techniques.jsonl"
    prints = {(entry["base"], tuple(entry["techniques"])): key for key, entry in techniques.entries().items()}
    for base, names, words, peak in techniques.known():
        figures = {name: peak[name] for name in ("allocated_bytes", "reserved_bytes", "phase")}
        spec, gpu = resolve(**{"device": "cuda"} | words), techniques.bases()[base].gpu
        yield Ran("techniques", gpu, spec, _run(path, {"fingerprint": prints[base, tuple(names)]}, figures))


def of_releases() -> Iterator[Ran]:
    """Commands under other releases of the libraries, those that ``predict --stack`` answers for."""
    path = ROOT / "benchmarks" / "versions" / "versions.csv"
    by_name = {one.name: one for one in commands.runs()}
    for row in read_csv(path):
        if row["predicted_bytes"]:
            spec = releases.spec_of(by_name[row["run"]], row)
            where, figures = {name: row[name] for name in ("run", "stack")}, {"allocated_bytes": row["step_bytes"]}
            yield Ran("releases", commands.CARD, spec, _run(path, where, figures))
