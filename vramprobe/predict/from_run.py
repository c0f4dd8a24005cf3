"""A command that was profiled once → its memory at rows and lengths that never ran, and the largest that fit a GPU.

In: the folder of `vramprobe profile --emulate GPU --folder RUN`, or its recipe's file. Out: a Prediction, a Verdict of
each GPU, a Largest. The recipe gives the log at a shape, torch's caching allocator is replayed. Never runs the command.
"""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from vramprobe.allocator.config import parse_alloc_conf
from vramprobe.catalog import Gpu, find_gpu, gpu_or_size, list_gpus
from vramprobe.emulate.cards import card_properties
from vramprobe.errors import SpecError, VramprobeError
from vramprobe.log.log import Log
from vramprobe.log.shapes import Shape
from vramprobe.predict.bisection import bisected
from vramprobe.predict.largest import Largest, LargestAnswer
from vramprobe.predict.prediction import Prediction
from vramprobe.predict.recipe_replay import replay_recipe, with_retries
from vramprobe.predict.verdict import TIGHT_SHARE, Verdict, verdict
from vramprobe.recipe.command import Branch, CommandRecipe, HeldOutShape, read_command
from vramprobe.records.frozen import FrozenModel
from vramprobe.units import format_bytes, plural

#: Ampere's kernels and everything since are chosen alike (profile/cards.py); a size has those of the run's GPU.
_SAME_KERNELS = (8, 0)
_MOST_LINES = 3
#: Beyond so many times the tokens of the largest batch that was probed nothing was checked, and *fits* asks for this
#: much more room. What is known to differ there comes out too high: torch's sums over rows take a workspace that grows
#: with them until the GPU is full, which the probed shapes do not reach (docs/profile.md).
_FAR, _ROOM_WHEN_FAR = 2, 1.25
_MOST = {"batch_size": 1 << 14, "seq_len": 1 << 22}


class OnGpu(FrozenModel):
    """A verdict on one GPU, or the reason why there is none."""

    gpu: str
    verdict: Verdict | None
    why: str = ""


@dataclass(frozen=True)
class RunAnswer:
    """A run at one shape: its prediction, without and with what a GPU's size changes."""

    recipe: CommandRecipe
    shape: Shape
    prediction: Prediction
    log: Log

    def on(self, gpu: Gpu) -> tuple[Prediction, Verdict]:
        """The prediction on ``gpu`` and its verdict. Raises SpecError for a GPU whose kernels are others."""
        if why := _other_kernels(self.recipe.gpu, gpu):
            raise SpecError(f"{gpu.name}: {why}")
        prediction = with_retries(self.prediction, self.log, parse_alloc_conf(self.recipe.alloc_conf or ""), gpu)
        judged = verdict(prediction, gpu)
        loose = round(sum(one.bytes_per_token for one in self.branch.loose) * self.shape[0] * self.shape[1])
        if judged.verdict == "fits" and judged.needed_bytes.high + loose > TIGHT_SHARE * judged.usable_bytes:
            why = f"{judged.reason}; {format_bytes(loose)} of it do not follow from the shape and may be more"
            judged = judged.model_copy(update={"verdict": "tight", "reason": why})
        is_far = _is_far(self.recipe, self.shape)
        if judged.verdict == "fits" and is_far and judged.needed_bytes.high * _ROOM_WHEN_FAR > judged.usable_bytes:
            why = f"{judged.reason}; so far beyond the probed shapes a quarter more room is asked for"
            judged = judged.model_copy(update={"verdict": "tight", "reason": why})
        return prediction, judged

    @cached_property
    def branch(self) -> Branch:
        """The branch that the shape is in."""
        return self.recipe.branch_of(self.shape)


def predict_run(
    run: str | Path | CommandRecipe, *, batch_size: int | None = None, seq_len: int | None = None
) -> RunAnswer:
    """The memory of the command of ``run`` at these rows and tokens of a row, each the run's own where it is None.

    Raises StoreError for a folder without a recipe, UnknownBranch for a shape whose order of requests was not recorded.
    """
    recipe = run if isinstance(run, CommandRecipe) else read_command(Path(run))
    shape = (batch_size or recipe.shape[0], seq_len or recipe.shape[1])
    for name, value in (("batch_size", batch_size), ("seq_len", seq_len)):
        if value is not None and not 1 <= value <= _MOST["seq_len"]:
            raise SpecError(f"{name}: {value} given; must be from 1 to {_MOST['seq_len']:,}")
    branch = recipe.branch_of(shape)
    name, config = f"{shlex.join(recipe.command)} at {shape[0]} x {shape[1]}", parse_alloc_conf(recipe.alloc_conf or "")
    replay = replay_recipe(branch.recipe, config, shape, stack=recipe.stack, empties_cache=False)
    return RunAnswer(recipe, shape, replay.prediction(name, _notes(recipe, branch, shape)), replay.log)


def run_on_gpus(answer: RunAnswer, gpus: Sequence[str] | Literal["all"]) -> list[OnGpu]:
    """Judge each of ``gpus``, or of the catalog's."""
    wanted = list_gpus() if gpus == "all" else [gpu_or_size(name) for name in gpus]
    found = []
    for gpu in wanted:
        try:
            found.append(OnGpu(gpu=gpu.short_name, verdict=answer.on(gpu)[1]))
        except VramprobeError as error:
            found.append(OnGpu(gpu=gpu.short_name, verdict=None, why=str(error).removeprefix(f"{gpu.name}: ")))
    return found


def largest_of_run(run: str | Path, question: Literal["batch_size", "seq_len"], *, gpu: str, **other: Any) -> Largest:
    """The largest batch, or length, of the run's command that fits on ``gpu``, lengths as even as the run's own.

    ``other``: the one that is not asked for, the run's own by default. Raises VramprobeError where none fits.
    """
    recipe, card = read_command(Path(run)), gpu_or_size(gpu)
    # the largest power of two, up to 64, that divides the command's own length
    even = 1 if question == "batch_size" else min(recipe.shape[1] & -recipe.shape[1], 64)
    seen: dict[int, tuple[Prediction, Verdict] | None] = {}
    unknown: list[str] = []

    def judged(count: int) -> tuple[Prediction, Verdict] | None:
        if count not in seen:
            try:
                seen[count] = predict_run(recipe, **other, **{question: count * even}).on(card)
            except SpecError as error:
                if _other_kernels(recipe.gpu, card):
                    raise
                unknown.append(str(error))
                seen[count] = None
        return seen[count]

    def passes(verdicts: tuple[str, ...]) -> Callable[[int], bool]:
        def within(count: int) -> bool:
            """Judge a shape in a gap as the next larger that is known."""
            found = next((one for at in range(count, 2 * count + 8) if (one := judged(at)) is not None), None)
            return found is not None and found[1].verdict in verdicts

        return within

    def answer(count: int | None) -> LargestAnswer | None:
        known = next((at for at in range(count or 0, 0, -1) if judged(at) is not None), None)
        if known is None or (found := judged(known)) is None:
            return None
        return LargestAnswer(value=known * even, prediction=found[0], verdict=found[1])

    most = _MOST[question] // even
    tight = answer(bisected(passes(("fits", "tight")), most, least=1))
    if tight is None:
        raise VramprobeError(
            unknown[0] if unknown and not any(seen.values()) else f"not even {question} {even} fits on {card.name}"
        )
    fits = answer(bisected(passes(("fits",)), most, least=1))
    notes = [f"lengths in steps of {even}, as those that were recorded"] if even > 1 else []
    return Largest(
        question=question,
        gpu=card.name,
        fits=fits,
        tight=tight if fits is None or tight.value != fits.value else None,
        notes=notes,
        num_predictions=len(seen),
    )


def _other_kernels(ran_on: str, gpu: Gpu) -> str:
    """Return the reason why ``gpu`` is not judged; "" where its kernels are those of the run."""
    if gpu.is_size or gpu.short_name == ran_on:
        return ""
    if gpu.vendor != "NVIDIA":
        return "its kernels differ, and what was recorded is CUDA's"
    both = (card_properties(find_gpu(ran_on).short_name), card_properties(gpu.short_name))
    if min(one.compute_capability for one in both) < _SAME_KERNELS:
        return f"its kernels differ from those of {ran_on}: profile the command with --emulate {gpu.short_name}"
    return ""


def _notes(recipe: CommandRecipe, branch: Branch, shape: Shape) -> list[str]:
    rows, length = shape
    ran = "was probed" if shape in branch.shapes else "never ran"
    notes = [
        f"{rows} x {length:,} {ran}: {shlex.join(recipe.command)} was profiled at {recipe.shape[0]} x "
        f"{recipe.shape[1]:,} on the emulated {recipe.gpu}, and {plural(len(branch.shapes), 'shape')} with these "
        "requests were probed"
    ]
    notes += [_said_of(recipe.held_out)] if recipe.held_out else ["no shape was held out to check the rules"]
    if _is_far(recipe, shape):
        notes.append(
            f"{rows * length:,} tokens are more than {_FAR} times the {_most_tokens(recipe):,} of the largest batch "
            "that was probed: not checked so far out; profile the command at a larger batch to be sure"
        )
    notes += [
        f"{plural(one.num_requests, 'request')} of a size that does not follow from the shape, counted by tokens "
        f"({format_bytes(round(one.bytes_per_token * rows * length))} here): {one.line}"
        for one in branch.loose[:_MOST_LINES]
    ]
    return notes


def _is_far(recipe: CommandRecipe, shape: Shape) -> bool:
    """Return True for a batch of more tokens than the probed shapes can vouch for."""
    return shape[0] * shape[1] > _FAR * _most_tokens(recipe)


def _most_tokens(recipe: CommandRecipe) -> int:
    return max(rows * length for branch in recipe.branches for rows, length in branch.shapes)


def _said_of(held_out: Sequence[HeldOutShape]) -> str:
    said = [
        f"{one.shape[0]} x {one.shape[1]:,}: {_off(one.predicted_requested_bytes, one.requested_bytes)} requested, "
        f"{_off(one.predicted_allocated_bytes, one.allocated_bytes)} allocated"
        for one in held_out
    ]
    return f"error on the shapes held out: {'; '.join(said)}"


def _off(predicted: int, seen: int) -> str:
    return "0 B" if predicted == seen else f"{(predicted - seen) / max(seen, 1):+.3%}"
