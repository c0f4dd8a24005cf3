"""Build a report's files from results, and write them or hold those that are there against them.

In: a results file or folder, and a CardFit. Out: file name → content.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vramprobe.errors import StaleReport, StoreError
from vramprobe.records import store, table
from vramprobe.records.profile import read_profiles
from vramprobe.records.whole import read_whole
from vramprobe.units import word_for

if TYPE_CHECKING:
    from vramprobe.model.card_fit import CardFit
    from vramprobe.records.record import RunRecord
    from vramprobe.report.cells import Cell
    from vramprobe.report.definition import Document


@dataclass(frozen=True, kw_only=True)
class Material:
    """Records, cells and fit from which every part of a report is made; ``cells`` are in reading order, small models
    first.
    """

    cells: Sequence[Cell]
    records: Sequence[RunRecord]  # measured ones, every attempt
    model: CardFit | None
    origin: Sequence[str]
    command: str


def build(
    results_path: str | Path,
    out_dir: str | Path,
    *,
    model: CardFit | None = None,
    fit_path: str | Path | None = None,
    claims_path: str | Path | None = None,
) -> dict[str, bytes]:
    """File name → content, predictions beside the measurements, corrected by a ``model``; writes nothing.

    ``out_dir`` and ``fit_path`` (where ``model`` came from) are for the command at the foot of each page; the
    claims.csv at ``claims_path`` is shown on index.html. Raises StoreError where nothing was measured,
    IncomparableRecords for results of several devices or instruments.
    """
    from vramprobe.report import plots
    from vramprobe.report.formats import files_of
    from vramprobe.report.page.gather import read_claims
    from vramprobe.report.profiles import profiles_document

    profiles = read_profiles(results_path)
    contents = read_whole(results_path, allow_empty=bool(profiles))
    if profiles and not contents.records:
        return files_of(profiles_document(profiles, command_of(results_path, out_dir)))
    rows = read_claims(Path(claims_path)) if claims_path is not None else []
    command = command_of(results_path, out_dir, model, fit_path, claims_path)
    if several := _of_several_cards(contents, command, rows):
        return several
    material = gather(contents, results_path, command, model)
    drawn, made, word = drawings(material), documents(material), word_for(material.records[0].instrument)
    made += [profiles_document(profiles, material.command)] if profiles else []
    files: dict[str, bytes] = {"index.html": _page(made, drawn, rows, material.origin, material.command, word)}
    for document in made:
        pictures = [plots.PICTURES[name].about(word) for name in drawn if plots.ON_PAGE[name] == document.name]
        files |= files_of(document.with_pictures(*pictures))
    for images in drawn.values():
        files |= images
    return files


def _of_several_cards(
    contents: store.StoreContents, command: str, claim_rows: Sequence[Mapping[str, str]]
) -> dict[str, bytes]:
    """The pages of emulated records of several cards, which no table or plot of one card can show; else none."""
    from vramprobe.report.cards import are_of_several_cards, card_documents
    from vramprobe.report.columns import provenance
    from vramprobe.report.formats import files_of

    records = [one for one in contents.records if not one.spec.is_sharded]
    if not are_of_several_cards(records):
        return {}
    table.require_comparable(records, across_cards=True)
    origin = provenance(records)
    made = card_documents(records, origin, command)
    files = {name: content for document in made for name, content in files_of(document).items()}
    return files | {"index.html": _page(made, {}, claim_rows, origin, command, word_for("emulated"))}


def command_of(
    results_path: str | Path,
    out_dir: str | Path,
    model: CardFit | None = None,
    fit_path: str | Path | None = None,
    claims_path: str | Path | None = None,
) -> str:
    """The command that makes the report."""
    words = ["vramprobe", "report", str(results_path), "-o", str(out_dir)]
    words += ["--fit", str(fit_path or "FIT.json")] if model is not None else []
    words += ["--claims", str(claims_path)] if claims_path is not None else []
    return shlex.join(words)


def _page(made: Sequence[Document], drawn: Mapping[str, Mapping[str, bytes]], *about: Any) -> bytes:
    """The page with the calculator, all tables and plots; ``about``: the rest of its content (page/gather.py)."""
    from vramprobe.report.page import gather, page

    return page(gather.content_of(made, drawn, *about)).encode()


def gather(contents: store.StoreContents, results_path: str | Path, command: str, model: CardFit | None) -> Material:
    """Collect the records, cells and fit of a report; raises as :func:`build` does."""
    from vramprobe.report.cells import cells_of
    from vramprobe.report.columns import provenance

    measured = [record for record in contents.records if not record.spec.is_sharded]
    ranks = [record for record in contents.records if record.spec.is_sharded]
    if ranks and not measured:
        raise StoreError(
            f"the {len(ranks)} records in {results_path} are of several GPUs, and a report's tables are of one: name a "
            "folder that has some of one, too; each rank stands in the records themselves"
        )
    table.require_comparable(measured)
    origin = provenance(measured)
    origin += [f"left out: {len(ranks)} records of several GPUs"] if ranks else []
    origin += [contents.torn_tail] if contents.torn_tail else []
    cells = cells_of(contents.records, model)
    return Material(cells=cells, records=measured, model=model, origin=origin, command=command)


def documents(material: Material) -> list[Document]:
    """Every page of tables, in the order of reading; claims where there are CUDA records to judge them by."""
    from vramprobe.errors import FitError
    from vramprobe.literature.calibrate import calibrate
    from vramprobe.literature.claims import judge_claims
    from vramprobe.report.by_size import by_size
    from vramprobe.report.by_term import by_term
    from vramprobe.report.calibration import calibration_document
    from vramprobe.report.claims import claims_document
    from vramprobe.report.measured import measured
    from vramprobe.report.speed import speed

    cells, where = material.cells, (material.origin, material.command)
    found = [by_size(cells, material.model, *where), measured(cells, *where), by_term(cells, *where)]
    timed = speed(cells, *where)
    found += [timed] if timed else []
    with contextlib.suppress(FitError):  # no cell has all that a formula is scored on; the other pages say why
        found.append(calibration_document(calibrate(material.records, material.model), *where))
    instrument = material.records[0].instrument
    found = [document.of(instrument) for document in found]
    if instrument in ("cuda", "emulated"):
        latest = store.latest_by_fingerprint(material.records).values()
        found.append(claims_document(judge_claims(records=latest), material.command))
    return found


def drawings(material: Material) -> dict[str, dict[str, bytes]]:
    """Name of a plot → its files; only those that have something to show."""
    from vramprobe.report.plots import errors, length, predicted, terms

    drawn = {"peak_by_term": terms.plot(material.cells)}
    if any(cell.error_percent is not None for cell in material.cells):
        drawn["predicted_vs_measured"] = predicted.plot(material.cells)
        drawn["error_by_size"] = errors.plot(material.cells)
        drawn["peak_by_length"] = length.plot(material.cells, material.model)
    return {name: images for name, images in drawn.items() if images}


def publish(folder: Path, files: Mapping[str, bytes], *, check: bool = False) -> list[Path]:
    """Write file name → content into ``folder``, made where it is missing; the paths, in order.

    With ``check`` nothing is written: raises StaleReport, naming each file that is missing or says something else; of
    pictures what they show counts (plots/drawn.py). Raises StoreError where the folder cannot be written.
    """
    paths = [folder / name for name in files]
    if check:
        from vramprobe.report.plots.drawn import what_is_wrong

        stale = {path: what_is_wrong(path, content) for path, content in zip(paths, files.values(), strict=True)}
        if found := [f"{path} {wrong}" for path, wrong in stale.items() if wrong]:
            raise StaleReport("\n  ".join([f"{len(found)} of {len(files)} files are stale:", *found]))
        return paths
    path = folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in zip(paths, files.values(), strict=True):
            path.write_bytes(content)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}; choose another folder") from error
    return paths
