"""One GPU's steady step from its recipe, part by part of the model: what shares of it are made of (shares.py).

In: a CellSpec with its ranks, a GPU. Out: a Step: the highest moments of each phase in the loss, the layers and the
embedding, without the states that a rank has by its own account; None where no recipe is at hand.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from vramprobe import catalog
from vramprobe.choices import PhaseName
from vramprobe.log.log import ALL_CAUSES, Log, PhaseMark
from vramprobe.predict.at_hand import is_shipped_alone, recorded_card, replay_at_hand
from vramprobe.predict.recipe_replay import Replay
from vramprobe.predict.recorded import replay_of
from vramprobe.recipe.book import MOST_MICRO_STEPS, repeats_micro_steps
from vramprobe.recipe.recorder import Say
from vramprobe.rules.sharding import rules_of
from vramprobe.spec import CellSpec

#: Causes of one GPU's step that a rank has by its own account, or not at all.
_LEFT_OUT = ("weights", "optimizer_state", "batch", "workspaces")
_GRADIENTS, _LOGITS = ALL_CAUSES.index("gradients"), ALL_CAUSES.index("logits")


class Moment(NamedTuple):
    """Bytes by cause at one moment of a step; ``label``: where in the model."""

    phase: PhaseName
    label: str
    terms: dict[str, int]

    @property
    def total_bytes(self) -> int:
        """All of them."""
        return sum(self.terms.values())


class Step(NamedTuple):
    """The steady step of one GPU: its highest moments without states, and what is rounded up beside. ``is_wider``: some
    activations are of fp32 where a rank's are of 16 bits."""

    moments: tuple[Moment, ...]
    remainders_bytes: int
    is_wider: bool = False


#: By the cell's fingerprint, the card and whether only what ships answers.
_FOUND: dict[tuple[str, str, bool], Step] = {}


def _alone(spec: CellSpec) -> CellSpec:
    """Return the cell on one GPU whose layers compute as a rank's: FSDP and DeepSpeed lower the weights themselves, and
    ZeRO-3 without autocast raises them."""
    alone = {"num_gpus": 1, "sharding": None, "shard_size": None, "offload": "none", "only_rank": None}
    one = spec.model_copy(update=alone)
    if repeats_micro_steps(one):
        one = one.model_copy(update={"grad_accum": min(one.grad_accum, MOST_MICRO_STEPS)})
    module = rules_of(spec.sharding).module
    if spec.autocast == "none":
        return one.model_copy(update={"dtype": "fp32"}) if module == "zero3" and spec.quant == "none" else one
    if module == "ddp":
        return one
    own = {"dtype": spec.autocast, "autocast": "none"} if spec.method == "full" else {}
    return one.model_copy(update=own | {"kbit_prep": "none"})


def recorded_step(spec: CellSpec, card: catalog.Gpu, say: Say) -> Step:
    """Return the step of a recipe that is recorded now; ``say`` hears of the progress. Raises what a recording does."""
    return _step_of(replay_of(_alone(spec), gpu=recorded_card(card), say=say))


def step_at_hand(spec: CellSpec, card: catalog.Gpu) -> Step | None:
    """Return the step of a recipe at hand, each looked for once; None without one."""
    on = recorded_card(card)
    own = _alone(spec)
    raised = own.model_copy(update={"kbit_prep": spec.kbit_prep})
    for alone in (own, *([raised] if raised != own else [])):
        key = alone.fingerprint, on.short_name, is_shipped_alone()
        if key not in _FOUND and (replay := replay_at_hand(alone, gpu=on, near=True)) is not None:
            _FOUND[key] = _step_of(replay)
        if key in _FOUND:
            return _FOUND[key]._replace(is_wider=alone is raised)
    return None


def _step_of(replay: Replay) -> Step:
    log, last = replay.log, max(mark.step or 0 for mark in replay.log.marks)
    found: list[Moment] = []
    for mark in log.marks:
        if mark.step == last and mark.name in ("forward", "backward", "optimizer_step"):
            found += _moments(log, mark)
    return Step(tuple(found), max(0, replay.peak.allocated_bytes - sum(replay.at_peak.values())))


def _moments(log: Log, mark: PhaseMark) -> Iterator[Moment]:
    """The highest moments of a phase in each part of the model: with its gradients, and without."""
    begin, stop = mark.events.start, mark.events.stop
    before = np.bincount(log.causes[:begin], weights=log.size_bytes[:begin], minlength=len(ALL_CAUSES))
    each = np.zeros((len(ALL_CAUSES), stop - begin + 1))
    each[:, 0] = before
    each[log.causes[begin:stop], np.arange(1, stop - begin + 1)] = log.size_bytes[begin:stop]
    alive = each.cumsum(axis=1)
    alive[[ALL_CAUSES.index(cause) for cause in _LEFT_OUT]] = 0
    total = alive.sum(axis=0)
    for label, which in _labels(mark.name, alive, each):
        for height in (total, total - alive[_GRADIENTS]):
            at = int(np.where(which, height, -1).argmax())
            terms = {cause: int(size) for cause, size in zip(ALL_CAUSES, alive[:, at], strict=True) if size}
            yield Moment(mark.name, label, terms)


def _labels(phase: str, alive: np.ndarray, each: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Masks of the events in the loss, in the layers, and in the embedding after them."""
    at, has_logits = np.arange(alive.shape[1]), np.flatnonzero(alive[_LOGITS] > 0)
    if phase == "optimizer_step":
        yield "optimizer", at >= 0
        return
    is_loss = np.zeros(len(at), dtype=bool)
    if len(has_logits):
        is_loss = at >= has_logits[0] if phase == "forward" else at <= has_logits[-1]
    made = np.flatnonzero(each[_GRADIENTS, 1:] > 0) + 1
    is_embedding = at >= made[-1] if phase == "backward" and len(made) else np.zeros(len(at), dtype=bool)
    for label, which in (
        ("loss", is_loss),
        ("layer", ~is_loss & ~is_embedding),
        ("embedding", is_embedding & ~is_loss),
    ):
        if which.any():
            yield label, which
