"""``--lengths`` of ``vramprobe predict``: the batches of a data set, the worst of them, and reserved memory over a run.

In: the option's text and a cell. Out: what :mod:`vramprobe.lengths` says, as text or JSON.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from vramprobe.cli.display_fragmentation import course_lines
from vramprobe.units import format_bytes, short_count

if TYPE_CHECKING:
    from vramprobe.lengths.answer import LengthsAnswer, Limit
    from vramprobe.lengths.course import Course

_MAX_ROWS = 4  # indices that a line names


@dataclass(frozen=True)
class Varied:
    """Answer about the lengths of a data set for a cell; ``courses``: one for each allocator setting."""

    answer: LengthsAnswer
    courses: list[Course]
    gpu: str | None

    @property
    def worst_batch(self) -> dict[str, int]:
        """The words of the cell with the highest peak."""
        from vramprobe.lengths.answer import words_of

        return words_of(self.answer.worst_shape)

    def as_json(self) -> dict[str, Any]:
        """Plain values; bytes are whole numbers."""
        found = {name: value for name, value in vars(self.answer).items() if name not in ("worst", "worst_shape")}
        found |= {"peaks": [asdict(one) for one in self.answer.peaks]}
        for name in ("max_length", "max_batch_size"):
            found[name] = None if found[name] is None else asdict(found[name])
        return {"lengths": found, "replay": [asdict(one) for one in self.courses]}


def of_data(
    text: str, order: dict[str, Any], num_steps: int, cell: dict[str, Any], *, gpu: str | None, engine: str
) -> Varied:
    """Raises what reading and predicting raise."""
    from vramprobe.cli.emulate import say
    from vramprobe.lengths.answer import answer
    from vramprobe.lengths.reading import read_lengths

    words = {name: value for name, value in cell.items() if value is not None}
    found, batches = answer(read_lengths(text), gpu=gpu, engine=engine, say=say, **order, **words)
    courses: list[Course] = []
    if num_steps:
        from vramprobe.lengths.fragmentation import reserved_over_steps

        own = {name: value for name, value in words.items() if name != "fit"}
        shapes = [batch.shape for batch in batches]
        courses, notes = reserved_over_steps(shapes, num_steps, gpu=gpu, say=say, **own)
        found = replace(found, notes=[*found.notes, *notes])
    return Varied(found, courses, gpu)


def print_lengths(varied: Varied) -> None:
    """The data, its batches, what fits, and the replay; the prediction of the worst batch comes after."""
    found = varied.answer
    truncated = f", {found.num_truncated:,} truncated" if found.num_truncated else ""
    longest = f"longest {found.longest:,} (row {found.longest_row:,})"
    print(f"data: {found.num_rows:,} rows, {short_count(found.num_tokens)} tokens, {longest}{truncated}")
    order = "" if found.sampler == "sequential" else f", seed {found.seed}"
    print(f"{found.num_batches:,} batches ({found.sampler}{order}), {100 * found.padding_share:.1f} % padding")
    print(f"\n{'batch':<8}{'number':>9}{'rows':>6}{'length':>8}{'allocated':>13}{'reserved':>13}")
    for peak in found.peaks:
        reserved = "" if peak.reserved_bytes is None else format_bytes(peak.reserved_bytes)
        sizes = f"{peak.num_rows:>6}{peak.seq_len:>8,}{format_bytes(peak.allocated_bytes):>13}{reserved:>13}"
        print(f"{peak.name:<8}{peak.batch:>9,}{sizes}")
    rows = found.peaks[-1].rows
    more = f" and {len(rows) - _MAX_ROWS} more" if len(rows) > _MAX_ROWS else ""
    print(f"the worst batch has the rows {', '.join(map(str, rows[:_MAX_ROWS]))}{more}, the longest first")
    if varied.gpu is not None:
        _print_limits(varied)
    for note in found.notes:
        print(f"note: {note}")
    if varied.courses:
        longest = max(one.num_steps for one in varied.courses)
        print(f"\nreserved memory by the allocator's replay, {longest:,} steps of these batches:")
        for line in course_lines(varied.courses, "step 1"):
            print(f"  {line}")
    print("\nthe worst batch:")


def _print_limits(varied: Varied) -> None:
    found = varied.answer
    for what, limit in (("max length", found.max_length), ("batch size", found.max_batch_size)):
        if limit is not None:
            print(f"{varied.gpu}: {_limit(what, limit)}")


def _limit(what: str, limit: Limit) -> str:
    if limit.value is None:
        return f"no {what} fits: {limit.why}"
    if what == "batch size":
        return f"batch size {limit.value:,} fits at the worst batch's length"
    if not limit.rows_cut_share:
        return f"max length {limit.value:,} fits: no row is longer"
    cut = f"{100 * limit.rows_cut_share:.2g} % of the rows and {100 * limit.tokens_cut_share:.2g} % of the tokens"
    return f"max length {limit.value:,} fits: truncating there cuts {cut}"
