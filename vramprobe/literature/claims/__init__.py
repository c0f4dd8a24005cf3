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
from vramprobe.literature.claims import memory, rates, states
from vramprobe.literature.claims.figures import Cells
from vramprobe.literature.claims.judge import Judgement, Reading, Verdict, judge
from vramprobe.records.record import RunRecord

__all__ = ["VERDICTS", "Judgement", "Verdict", "judge_claims", "reading_of"]

VERDICTS = get_args(Verdict)

#: What a statement says in words about the recipe, and no column does: the claim → a key of STATED_RECIPES. A guide's
#: own formula counts where the row is its example.
STATED = {
    "L1-01": "16-bit weights",
    "L1-02": "fp32 moments",
    "L1-03": "master weights",
    "L1-05": "master weights",
    "L1-07": "16-bit weights",
    "L3-02": "master weights",
    "G4-02": "16-bit weights",  # the guide multiplies "the 16-bit weights" (G4-01)
}


def judge_claims(
    ids: Sequence[str] = (),
    *,
    topics: Sequence[str] = (),
    gpu: str | None = None,
    records: Iterable[RunRecord] = (),
) -> list[Judgement]:
    """The claims with these ids, of these topics, on this GPU (all unless told), judged.

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


def reading_of(claim: Claim, claims: Sequence[Claim], cells: Cells) -> Reading:
    """What the claim is taken to mean, by its quantity."""
    stated = STATED.get(claim.id)
    adapted = claim.method == "qlora" and claim.params_b is not None
    match claim.quantity:
        case "peak" | "min VRAM":
            return memory.peak_reading(claim, cells)
        case "fits":
            return memory.fits_reading(claim, cells)
        case "min GPUs":
            return memory.min_gpus_reading(claim, cells)
        case "weights" if claim.quant and claim.unit == "B/param":
            return states.nf4_reading(claim)
        case "weights" if adapted:
            return states.quantised_weights_reading(claim, cells)
        case "adapter weights":
            return states.adapters_reading(claim, cells, (4, 2))
        case "gradients" if adapted:
            return states.adapters_reading(claim, cells, (4, 2))
        case "optimizer" if adapted:
            return states.adapters_reading(claim, cells, (8, 4))
        case "weights" | "gradients" | "optimizer" | "multiple":
            part = "moments" if claim.unit == "B/param" and "moments per" in claim.statement else claim.quantity
            return states.full_states_reading(claim, cells, part, stated)
        case "optimizer moments":
            return states.full_states_reading(claim, cells, "moments", stated)
        case "master weights":
            return states.full_states_reading(claim, cells, "master", stated)
        case "model states":
            return states.full_states_reading(claim, cells, "states", stated)
        case "activations":
            return states.activations_reading(claim, cells)
        case "reduction":
            return states.kernels_reading(claim, cells)
        case "reduction of peak" | "reduction of activations" | "reduction of model states":
            return states.reduction_reading(claim, cells)
        case "exponent of attention activations in seq":
            return states.attention_reading(claim, cells)
        case "ratio" if claim.topic == "scaling":
            return states.attention_reading(claim, cells)
        case "ratio":
            return states.optimizer_ratio_reading(claim, cells)
        case "adapter file":
            return states.adapter_file_reading(claim, cells)
        case "checkpoint":
            return states.checkpoint_file_reading(claim, cells)
        case "throughput":
            return rates.throughput_reading(claim, cells)
        case "time" | "cost":
            return rates.time_reading(claim, claims)
        case "throughput ratio":
            return rates.speed_ratio_reading(claim, cells)
        case "cost ratio":
            return rates.cost_ratio_reading(claim)
        case "extra time" | "speedup":
            return rates.extra_time_reading(claim, cells)
        case "host RAM ratio":
            return rates.host_reading(claim)
        case "per-rank model states":
            return rates.zero_stages_reading(claim)
        case "peak ratio fp8/fp16":
            return rates.fp8_reading(claim)
        case "utilisation" | "share of step":
            return rates.link_reading(claim, cells)
    raise AssertionError(f"no reading of {claim.id}: {claim.quantity}")
