"""Compute the number of optimizer steps of a command's whole run: by its Trainer's own arithmetic, or by the user's
options.

In: a run, steps, tokens or epochs. Out: a RunLength, or a SpecError that says which option to give. Epochs of a dataset
that --empty-weights replaced mean nothing, and are never taken.
"""

import math
from dataclasses import dataclass

from vramprobe.errors import SpecError
from vramprobe.profile.raw import RawRun, RawTrainer


@dataclass(frozen=True, kw_only=True)
class RunLength:
    """``num_steps`` on ``num_ranks``. ``is_data``: the run is over so much data, so that more replicas need fewer
    steps; else each number of replicas takes the same steps."""

    num_steps: int
    num_ranks: int
    is_data: bool
    said: str

    def steps_on(self, num_ranks: int) -> int:
        """Optimizer steps with so many replicas."""
        return -(-self.num_steps * self.num_ranks // num_ranks) if self.is_data else self.num_steps


def run_length(
    run: RawRun,
    num_ranks: int,
    step_tokens: int | None,
    *,
    steps: int | None = None,
    tokens: int | None = None,
    epochs: float | None = None,
) -> RunLength:
    """The run's length on ``num_ranks``, whose step has ``step_tokens`` on each. Raises SpecError where it is not
    known."""
    if steps is not None:
        return RunLength(num_steps=steps, num_ranks=num_ranks, is_data=False, said="--steps")
    if tokens is not None:
        if not step_tokens:
            raise SpecError("--tokens: how many tokens a step has is not known, as no embedding was seen: give --steps")
        each = step_tokens * num_ranks
        return RunLength(num_steps=-(-tokens // each), num_ranks=num_ranks, is_data=True, said="--tokens")
    return _of_trainer(run, num_ranks, epochs)


def _of_trainer(run: RawRun, num_ranks: int, epochs: float | None) -> RunLength:
    trainer = next((raw.trainer for raw in run.ranks if raw.trainer is not None), None)
    replaced = [str(one.get("what")) for one in run.replaced if one.get("kind") == "dataset"]
    if trainer is None:
        raise SpecError(
            "how many steps the run has is not known, as no transformers Trainer was seen: give --steps or --tokens"
        )
    if trainer.are_given and epochs is None:
        return RunLength(num_steps=trainer.num_steps, num_ranks=num_ranks, is_data=False, said="max_steps")
    if replaced:
        raise SpecError(
            f"how many steps the run has is not known: {', '.join(replaced)} was replaced by --empty-weights, so its "
            "epochs mean nothing; give --steps or --tokens"
        )
    wanted = trainer.num_epochs if epochs is None else epochs
    return RunLength(
        num_steps=_steps_of_epochs(trainer, wanted), num_ranks=num_ranks, is_data=True, said=f"{wanted:g} epochs"
    )


def _steps_of_epochs(trainer: RawTrainer, epochs: float) -> int:
    """As the Trainer counts: the steps of an epoch, which it rounds by its release, times the epochs, rounded up."""
    if not trainer.are_given:
        if epochs == trainer.num_epochs:
            return trainer.num_steps
        return math.ceil(epochs * trainer.num_steps / trainer.num_epochs)
    if trainer.num_batches is None:
        raise SpecError(
            "--epochs: how long an epoch is is not known, as the data are a stream: give --steps or --tokens"
        )
    return math.ceil(epochs * max(1, -(-trainer.num_batches // trainer.grad_accum)))
