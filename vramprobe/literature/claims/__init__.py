"""Claims: each published figure of data/claims.csv → a verdict with our figure, its conditions and its commands.

In: the claims asked for, and records where there are some. Out: one Judgement each, in file order. A comparable CUDA
record goes before the formula engine. Stays this side of the torch line; stores no verdict.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import get_args

from vramprobe import catalog
from vramprobe.catalog import Claim
from vramprobe.errors import UnknownName
from vramprobe.literature.claims.cells import Cells
from vramprobe.literature.claims.judge import Judgement, Verdict, judge
from vramprobe.literature.claims.rules import reading_of
from vramprobe.records.record import RunRecord

__all__ = ["VERDICTS", "Judgement", "Verdict", "judge_claims", "reading_of"]

VERDICTS = get_args(Verdict)


def judge_claims(
    ids: Sequence[str] = (),
    *,
    topics: Sequence[str] = (),
    gpu: str | None = None,
    records: Iterable[RunRecord] = (),
) -> list[Judgement]:
    """The claims with these ids, of these topics, on this GPU (all by default), judged.

    Raises UnknownName for an id, a topic or a GPU that there is not.
    """
    claims = catalog.list_claims()
    chosen = _chosen(claims, ids, topics, gpu)
    cells = Cells(records)
    return [judge(claim, reading_of(claim, claims, cells)) for claim in chosen]


def _chosen(claims: Sequence[Claim], ids: Sequence[str], topics: Sequence[str], gpu: str | None) -> list[Claim]:
    known, all_topics = {claim.id.lower(): claim for claim in claims}, {claim.topic for claim in claims}
    for given in ids:
        if given.lower() not in known:
            raise UnknownName("claim", given, [claim.id for claim in claims], "`vramprobe claims` lists all of them.")
    for given in topics:
        if given not in all_topics:
            raise UnknownName("topic", given, all_topics, f"There are {', '.join(sorted(all_topics))}.")
    wanted, card = {given.lower() for given in ids}, catalog.find_gpu(gpu) if gpu else None
    return [
        claim
        for claim in claims
        if (not wanted or claim.id.lower() in wanted)
        and (not topics or claim.topic in topics)
        and (card is None or card in claim.gpus)
    ]
