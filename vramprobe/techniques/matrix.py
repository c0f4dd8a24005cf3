"""Combine techniques: for each pair of parts, the pairs of techniques that ran together and those that cannot.

In: the registry, and the table of emulated runs that ships. Out: why two cannot be combined, the pairs that ran, and
the matrix of parts. What neither ran nor is refused is not known to work.
"""

from dataclasses import dataclass
from functools import cache
from itertools import combinations, product

from vramprobe.techniques.registry import Technique, bases, exclusions, techniques
from vramprobe.techniques.savings import runs


@dataclass(frozen=True, kw_only=True)
class PairOfParts:
    """Number of pairs of techniques of two parts, and how many of them ran or are refused."""

    part: str
    other: str
    num_pairs: int
    num_ran: int
    num_refused: int

    @property
    def short(self) -> str:
        """Pairs that ran; "no" where all are refused, "·" where none ran."""
        return "no" if self.num_refused == self.num_pairs else str(self.num_ran or "·")


def refusal(one: Technique, other: Technique) -> str | None:
    """Return why these cannot be combined, or None."""
    if one.part == other.part:
        return f"{one.part}: one at a time"
    for rule in exclusions():
        for first, second in ((one, other), (other, one)):
            if first.id in rule.techniques and (second.id in rule.others or second.part in rule.others):
                return rule.why
    return None


@cache
def ran_together() -> frozenset[frozenset[str]]:
    """Pairs of ids that were in one emulated run which ended well, those of its base included."""
    found: set[frozenset[str]] = set()
    for run in runs():
        if run.outcome != "ok":
            continue
        names = run.technique.split(" + ")
        parts = {techniques()[name].part for name in names}
        names += [name for name in bases()[run.base].has if techniques()[name].part not in parts]
        found |= {frozenset(pair) for pair in combinations(names, 2)}
    return frozenset(found)


def parts() -> list[str]:
    """Every part, in the registry's order."""
    return list(dict.fromkeys(one.part for one in techniques().values()))


def matrix() -> list[PairOfParts]:
    """Every two parts, each pair once."""
    by_part = {part: [one for one in techniques().values() if one.part == part] for part in parts()}
    return [
        _counted(one, other, list(product(by_part[one], by_part[other]))) for one, other in combinations(by_part, 2)
    ]


def _counted(part: str, other: str, pairs: list[tuple[Technique, Technique]]) -> PairOfParts:
    return PairOfParts(
        part=part,
        other=other,
        num_pairs=len(pairs),
        num_ran=sum(frozenset((one.id, two.id)) in ran_together() for one, two in pairs),
        num_refused=sum(refusal(one, two) is not None for one, two in pairs),
    )
