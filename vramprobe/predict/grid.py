"""Grid: one setup at many batch sizes and lengths, or many different cells -> their predictions as arrays, at once.

In: a spec (or many) and a MemoryModel or none. Out: frozen CellArrays, to the byte what predict says of each cell.
Every size is a polynomial in batch and length, so a walk is made once and evaluated in NumPy (grid_moments.py). Never
raises for a cell far outside the fitted range: it marks it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple

from vramprobe.architecture import Architecture
from vramprobe.errors import VramprobeError
from vramprobe.kernels.chip import chip_like
from vramprobe.model.memory_model import (
    LARGEST_HALF_WIDTH,
    MemoryModel,
    constant_name,
    noise_share,
    unsure_share,
    workspaces_bytes,
)
from vramprobe.predict.grid_moments import MomentMatrices
from vramprobe.predict.prediction import HasKernels, HasMemory
from vramprobe.predict.uncertainty import ARITHMETIC_SPREAD, FAR, LIMIT_NAMES, bounds, unseen_choices, widening_of
from vramprobe.predict.verdict import TIGHT_SHARE, usable_bytes
from vramprobe.spec import CellSpec
from vramprobe.terms import CAUSES, Course, course_of
from vramprobe.terms.cell.setup import MAX_UNSORTED_TOKENS, TOKENS
from vramprobe.terms.tape.graph import Place
from vramprobe.trainers import TRAINERS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    Ints = NDArray[np.int64]

#: Cells that are counted together: their arrays stay in a core's cache.
_CHUNK = 16_384


class GridIntervals(NamedTuple):
    """Bytes, one of each per cell: the best value, and where the truth should lie."""

    value: Ints
    low: Ints
    high: Ints


@dataclass(frozen=True, kw_only=True, eq=False)
class CellArrays:
    """Predictions of cells; every array has the same shape, an element per cell. The words are Prediction's."""

    batch_size: Ints
    seq_len: Ints
    peak_allocated_bytes: GridIntervals
    places: tuple[Place, ...]  # (phase, label) of a moment, as ``peak_place`` counts them
    peak_place: Ints
    terms: dict[str, Ints]  # bytes at the peak moment, by cause
    constant_bytes: Ints  # of the cell's method
    reserved_bytes: GridIntervals | None  # null where the fit has not seen the caching allocator
    device_bytes: GridIntervals | None  # null where the fit has not seen NVML
    is_far: NDArray[np.bool_]  # so far outside the fitted range that predict refuses

    @property
    def peak_phase(self) -> NDArray[np.str_]:
        """The phase of each cell's peak."""
        import numpy as np

        return np.array([phase for phase, _ in self.places])[self.peak_place]


def predict_grid(
    spec: CellSpec,
    batch_sizes: ArrayLike,
    seq_lens: ArrayLike,
    model: MemoryModel | None = None,
    *,
    gpu: HasKernels | None = None,
) -> CellArrays:
    """Predictions of ``spec`` at these batch sizes and lengths, broadcast against each other: a column of batch sizes
    and a row of lengths make a table. With attention's kernels of ``gpu``, as predict has them.

    A length beyond a model's learned positions is the caller's to leave out. Raises VramprobeError for sizes below 1
    and for cells beyond 8 PiB, UnsupportedArchitecture for what the formula engine has no arithmetic for.
    """
    import numpy as np

    batch, length = np.broadcast_arrays(_counts("batch_sizes", batch_sizes), _counts("seq_lens", seq_lens))
    image_tokens = spec.row_tokens - spec.seq_len
    length = length + image_tokens
    shape, batch, length = batch.shape, batch.ravel(), length.ravel()
    # One row or one token takes another course than several (terms/tape/sizes.py).
    groups = [np.flatnonzero(((batch == 1) == b) & ((length == 1) == s)) for b in (True, False) for s in (True, False)]
    parts = []
    for where in groups:
        while where.size:
            longest = length[where].argmax()
            sizes = {"batch_size": int(batch[where[longest]]), "seq_len": int(length[where[longest]]) - image_tokens}
            course = course_of(spec.model_copy(update=sizes), chip_like(gpu))
            alike = _branches_like(longest, spec, course.arch, batch[where], length[where])
            these, where = where[alike], where[~alike]
            parts.append((these, _predict_course(spec, course, batch[these], length[these], model, gpu)))
    found = _joined(parts, batch.size, shape)
    return found if not image_tokens else replace(found, seq_len=found.seq_len - image_tokens)


def predict_cells(
    specs: Sequence[CellSpec], model: MemoryModel | None = None, *, gpu: HasKernels | None = None
) -> CellArrays:
    """Predictions of many different cells, in their order; those that share a walk are counted together.

    Raises as predict_grid does.
    """
    import numpy as np

    groups: dict[str, list[int]] = {}
    for index, spec in enumerate(specs):
        groups.setdefault(spec.model_dump_json(exclude={"batch_size", "seq_len", "seed"}), []).append(index)
    parts = []
    for indices in groups.values():
        batch, length = ([getattr(specs[i], name) for i in indices] for name in ("batch_size", "seq_len"))
        parts.append((np.array(indices), predict_grid(specs[indices[0]], batch, length, model, gpu=gpu)))
    return _joined(parts, len(specs), (len(specs),))


def verdicts(cells: CellArrays, gpu: HasMemory) -> NDArray[np.str_]:
    """``fits``, ``tight`` or ``does not fit`` for each cell, as predict.verdict says it."""
    import numpy as np

    needed = cells.device_bytes or cells.reserved_bytes or cells.peak_allocated_bytes
    usable = usable_bytes(gpu, device_is_known=cells.device_bytes is not None)
    fits = needed.high <= TIGHT_SHARE * usable
    return np.where(needed.value > usable, "does not fit", np.where(fits, "fits", "tight"))


def _branches_like(one: int, spec: CellSpec, arch: Architecture, batch: Ints, length: Ints) -> NDArray[np.bool_]:
    """Return which cells take the branch of this one: ``terms.cell.setup.branch_of``, for all at once."""
    import numpy as np

    beyond_window = length >= (arch.sliding_window or 0)
    alike = beyond_window == beyond_window[one]
    num_rows = batch * TRAINERS[spec.trainer].rows
    num_tokens = num_rows * length
    if spec.device == "cuda" and spec.method == "full":  # what an embedding's gradient sorts
        steps = (num_tokens > MAX_UNSORTED_TOKENS).astype(np.int64) + (
            num_tokens > max(arch.vocab_size, MAX_UNSORTED_TOKENS)
        )
        alike &= steps == steps[one]
    if spec.fuses_head:
        is_tiled = num_tokens - num_rows > TOKENS
        alike &= is_tiled == is_tiled[one]
    if spec.fused_linear_cross_entropy:
        share = -(-num_tokens // -(-arch.vocab_size // arch.head_width))
        _, exponent = np.frexp(share - 1)  # the number of bits, as long as floats are exact
        chunk = np.left_shift(1, exponent)
        chunk[chunk >= num_tokens] = 0
        alike &= chunk == chunk[one]
    return alike


def _counts(name: str, given: ArrayLike) -> Ints:
    import numpy as np

    counts = np.asarray(given)
    if counts.size and (counts.dtype.kind not in "iu" or counts.min() < 1):
        raise VramprobeError(f"{name}: must be whole numbers of 1 or more, of at most 64 bits")
    return counts.astype(np.int64)


def _predict_course(
    spec: CellSpec, course: Course, batch: Ints, length: Ints, model: MemoryModel | None, gpu: HasKernels | None
) -> CellArrays:
    """Flat arrays for cells of one walk."""
    import numpy as np

    moments = MomentMatrices(course, model.coefficients if model else {})
    moments.require_exact(int(batch.max()), int(length.max()))
    total, place = np.empty(batch.size), np.empty(batch.size, np.int64)
    terms = np.zeros((len(moments.causes), batch.size))
    for start in range(0, batch.size, _CHUNK):
        chunk = slice(start, start + _CHUNK)
        moments.highest(batch[chunk], length[chunk], total[chunk], place[chunk], terms[:, chunk])
    constant = model.constant_of(spec.method) if model else 0
    # As predict has them: with their coefficient, in whole bytes.
    workspaces = round((model.coefficients if model else {}).get("workspaces", 1.0) * workspaces_bytes(spec, gpu))
    value = total + (constant + workspaces)
    scaled = dict(zip(moments.causes, terms, strict=True))
    if workspaces:
        scaled["workspaces"] = np.full(batch.size, workspaces, float)
    doublings, widening, is_far = _outside(spec, course, batch, length, model)
    half = None
    if model:
        half = np.empty(batch.size)
        for start in range(0, batch.size, _CHUNK):
            chunk = slice(start, start + _CHUNK)
            half[chunk] = _half_width(
                model,
                value[chunk],
                {cause: row[chunk] for cause, row in scaled.items()},
                spec.method,
                doublings[chunk],
            )
    low, high = bounds(spec.device, half, widening, np.maximum)
    allocated = GridIntervals(*map(_whole, (value, value * np.maximum(low, 0.0), value * high)))
    reserved, device = _other_tiers(model, allocated)
    return CellArrays(
        batch_size=batch,
        seq_len=length,
        peak_allocated_bytes=allocated,
        places=moments.places,
        peak_place=place,
        terms={cause: _whole(row) for cause, row in scaled.items()},
        constant_bytes=np.full(batch.size, constant, np.int64),
        reserved_bytes=reserved,
        device_bytes=device,
        is_far=is_far,
    )


def _outside(
    spec: CellSpec, course: Course, batch: Ints, length: Ints, model: MemoryModel | None
) -> tuple[NDArray, float, NDArray[np.bool_]]:
    """(doublings outside the range, widening, whether predict would refuse) of each cell; predict says it in words."""
    import numpy as np

    doublings, is_far = np.zeros(batch.size), np.zeros(batch.size, bool)
    if model is None:
        return doublings, 0.0, is_far
    numbers = {
        "num_params": np.full(1, course.arch.num_params),
        "num_tokens": batch * TRAINERS[spec.trainer].rows * length,
        "seq_len": length,
        "batch_size": batch,
    }
    for name, values in numbers.items():
        low, high = getattr(model.ranges, name)
        factor = np.maximum(low / values, values / high)
        beyond = factor > 1
        if name in LIMIT_NAMES:
            is_far |= factor > FAR
        added = np.zeros(factor.size)
        # math.log2, as predict takes it: NumPy's may differ in the last bit, and so in a byte.
        outside = factor[beyond]
        added[beyond] = np.fromiter(map(math.log2, outside.tolist()), float, outside.size)
        doublings += added
    unseen, refused = unseen_choices(spec, model)
    widening = 0.0
    for name in unseen:
        widening += widening_of(name, model)
    if spec.device != model.device:
        widening += ARITHMETIC_SPREAD[spec.device][1] - 1
    return doublings, widening, is_far | refused


def _half_width(
    model: MemoryModel, value: NDArray, terms: dict[str, NDArray], method: str, doublings: NDArray
) -> NDArray:
    """memory_model.half_width of each cell."""
    import numpy as np

    width = model.interval
    shares = {cause: sizes / value for cause, sizes in terms.items()} | {
        constant_name(method): width.from_bytes / value
    }
    # Python's power, as predict takes it: NumPy's may differ in the last bit, and so in a byte.
    sizes = (value / width.from_bytes).tolist()
    noise = np.fromiter(map(noise_share, sizes, repeat(width.power)), float, value.size)
    times = np.sqrt(noise * noise + np.maximum(unsure_share(width, shares), 0.0))
    grown = times * (1 + width.growth_per_doubling * doublings)
    return np.minimum(width.half_width_of(method) * grown, LARGEST_HALF_WIDTH)


def _other_tiers(
    model: MemoryModel | None, allocated: GridIntervals
) -> tuple[GridIntervals | None, GridIntervals | None]:
    if model is None or model.reserved_over_allocated is None:
        return None, None
    ratio, gap = model.reserved_over_allocated, model.device_over_reserved_bytes
    names = ("value", "low", "high")
    reserved = GridIntervals(*[_whole(getattr(allocated, name) * getattr(ratio, name)) for name in names])
    if gap is None:
        return reserved, None
    return reserved, GridIntervals(*[getattr(reserved, name) + round(getattr(gap, name)) for name in names])


def _whole(sizes: NDArray) -> Ints:
    import numpy as np

    if sizes.size and not sizes.max() < 2**62:
        raise VramprobeError("an interval leaves the range of 64-bit numbers; the fit is too wide to use, or damaged")
    return np.rint(sizes).astype(np.int64)


def _joined(parts: Sequence[tuple[Ints, CellArrays]], num_cells: int, shape: tuple[int, ...]) -> CellArrays:
    """One CellArrays of this shape from flat ones and where their cells belong."""
    import numpy as np

    if not parts:
        raise VramprobeError("no cells were given; give at least one batch size and one length")
    places = tuple(dict.fromkeys(place for _, cells in parts for place in cells.places))
    renumbered = [
        (where, replace(cells, peak_place=np.array([places.index(one) for one in cells.places])[cells.peak_place]))
        for where, cells in parts
    ]

    def gathered(name: str) -> NDArray:
        return _scattered([(where, getattr(cells, name)) for where, cells in renumbered], num_cells).reshape(shape)

    def intervals(name: str) -> GridIntervals | None:
        tiers = [(where, getattr(cells, name)) for where, cells in renumbered]
        if tiers[0][1] is None:
            return None
        return GridIntervals(
            *[
                _scattered([(where, tier[index]) for where, tier in tiers], num_cells).reshape(shape)
                for index in range(3)
            ]
        )

    causes = [cause for cause in CAUSES if any(cause in cells.terms for _, cells in renumbered)]
    terms = {
        cause: _scattered(
            [(where, cells.terms[cause]) for where, cells in renumbered if cause in cells.terms], num_cells
        ).reshape(shape)
        for cause in causes
    }
    return CellArrays(
        batch_size=gathered("batch_size"),
        seq_len=gathered("seq_len"),
        peak_allocated_bytes=intervals("peak_allocated_bytes"),
        places=places,
        peak_place=gathered("peak_place"),
        terms=terms,
        constant_bytes=gathered("constant_bytes"),
        reserved_bytes=intervals("reserved_bytes"),
        device_bytes=intervals("device_bytes"),
        is_far=gathered("is_far"),
    )


def _scattered(parts: Sequence[tuple[Ints, NDArray]], num_cells: int) -> NDArray:
    import numpy as np

    if len(parts) == 1 and parts[0][0].size == num_cells and (parts[0][0] == np.arange(num_cells)).all():
        return parts[0][1].ravel()
    whole = np.zeros(num_cells, parts[0][1].dtype)
    for where, values in parts:
        whole[where] = values.ravel()
    return whole
