"""Shares of one GPU's recorded step beside emulated ranks: ``python benchmarks/truth/shares.py`` writes shares.md.

In: the ranks of tests/oracles and predict/shares.py; steps of one GPU that are not at hand are recorded, about 140 of
two seconds each. ``--check`` says whether the page is what they give, ``--ratios``
prints the intervals that shares.py has: within them lie 90 % of the ranks that each was taken from.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.tables import filled, write_or_check
from benchmarks.truth.recipes import Compared, compared, furthest, is_a_rank, of_run, table
from tests.oracles import oracles
from tests.oracles.oracles import Oracle
from vramprobe.catalog import find_gpu
from vramprobe.predict import at_hand
from vramprobe.predict.prediction import Prediction
from vramprobe.predict.shares import near
from vramprobe.rules.sharding import rules_of
from vramprobe.spec import CellSpec
from vramprobe.units import GIB

PAGE = Path(__file__).with_suffix(".md")
#: Ranks with less are left out of reserved memory: they round up by more.
_LEAST_BYTES = 4 * GIB


def _near(spec: CellSpec, gpu: str) -> Prediction:
    """A rank by a step that ships, else by one that is recorded: the same whatever this machine recorded before."""
    with at_hand.shipped_alone():
        return near(spec, find_gpu(gpu), records=True)


def composed(oracle: Oracle) -> tuple[int | None, int | None]:
    """Bytes allocated and reserved of a rank, near."""
    found = _near(oracle.spec, oracle.gpu or "")
    assert found.reserved_bytes is not None
    return found.peak_allocated_bytes.value, found.reserved_bytes.value


def cells() -> list[Oracle]:
    """The emulated ranks."""
    return [one for one in oracles.cells() if is_a_rank(one) and one.kind in ("ranks", "fewest GPUs")]


def ranks(some: Sequence[Oracle] | None = None) -> list[Compared]:
    """Every emulated rank, or some, that has an answer, beside it."""
    found = compared(cells() if some is None else some, composed, of_run)
    return [one for one in found if one.answered[0] is not None]


def ratios(found: Sequence[Compared], tier: int) -> tuple[float, float, float]:
    """Return what runs took by what is allocated here: the ends between which 90 % lie, and the median between them."""
    own = sorted(
        taken / one.answered[0]
        for one in found
        if one.answered[0] and (taken := one.reference[tier]) and (tier == 0 or (one.reference[0] or 0) >= _LEAST_BYTES)
    )
    below = len(own) // 20
    above = len(own) // 10 - below
    low, middle, high = own[below], own[len(own) // 2], own[-1 - above]
    return round(low, 3), round(middle, 3), round(high, 3)


def by_module(found: Sequence[Compared]) -> dict[str, list[Compared]]:
    """The ranks of each module of a sharding."""
    groups: dict[str, list[Compared]] = {}
    for one in found:
        groups.setdefault(rules_of(one.oracle.spec.sharding).module, []).append(one)
    return dict(sorted(groups.items()))


def page() -> str:
    """shares.md."""
    found = ranks()
    within = [one for one in found if _is_within(one)]
    return filled(PAGE, within=len(within), ranks=len(found), table=table(found), furthest=furthest(found, 0))


def _is_within(one: Compared) -> bool:
    interval = _near(one.oracle.spec, one.oracle.gpu or "").peak_allocated_bytes
    return interval.low <= (one.reference[0] or 0) <= interval.high


def main() -> None:
    if "--ratios" in sys.argv:
        for module, several in by_module(ranks()).items():
            print(f'"{module}": {ratios(several, 0)}, {ratios(several, 1)}, of {len(several)}')
        return
    write_or_check({PAGE: page()}, "truth/shares.py", check="--check" in sys.argv)


if __name__ == "__main__":
    main()
