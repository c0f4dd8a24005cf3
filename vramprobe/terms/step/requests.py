"""Requests: what a run asks of its allocator, one after the other: weights, batch, steps, the optimizer's state.

In: a spec, what its card decides, an allocator. Out: the allocator's own counts. At the cell's own sizes, with every
layer in its turn, where walk.py counts one layer of each kind for every batch and length: what a caching allocator
holds beside the tensors depends on the order of all of them. Never imports torch, the workload or an allocator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from vramprobe.bounds import states
from vramprobe.bounds import tensors as parameters
from vramprobe.bounds.tensors import Tensor
from vramprobe.kernels.chip import Chip, chip_like
from vramprobe.rules.arithmetic import counted_architecture
from vramprobe.spec import CellSpec
from vramprobe.terms.cell import optimizer
from vramprobe.terms.cell.loading import Allocator, load
from vramprobe.terms.cell.setup import Setup, setup_of
from vramprobe.terms.models import families
from vramprobe.terms.models.modules import Model
from vramprobe.terms.step.moments import kept_outputs_bytes
from vramprobe.terms.tape.lifetimes import undisturbed
from vramprobe.terms.tape.micro_steps import LOGGED, StepLog
from vramprobe.terms.tape.request_log import SAMPLED, Chunk, NotAlike, chunks_of, unrolled
from vramprobe.terms.tape.scratch import Asked
from vramprobe.terms.tape.tape import MIDDLE_LAYER, Tape
from vramprobe.trainers import LOOPS


@dataclass(frozen=True)
class Given:
    """A cell's own batch size and length, where walk.py leaves both open."""

    batch_size: int
    seq_len: int

    def covers(self, count: int, other: int) -> bool:
        """Whether the first size is at least the second."""
        return count >= other


class Run:
    """One cell, from its weights to as many steps as are asked for; each method asks for what it is called after."""

    def __init__(self, spec: CellSpec, allocator: Allocator, *, workspace_bytes: int, chip: Chip | None = None) -> None:
        """``workspace_bytes``: cuBLAS's for one thread. ``chip``: whose kernels' scratch is asked for; null: one's that
        is not NVIDIA's, of which nothing is known. Raises UnsupportedArchitecture, as terms.moments does.
        """
        self.spec, self.allocator, self._workspace_bytes = spec, allocator, workspace_bytes
        self.arch = counted_architecture(spec)
        self._chip = chip_like(chip)
        self.asked = None if chip is None else Asked(chip)  # chips that are alike in this ask for the same in all
        self._num_steps = 0
        self._num_more = 0  # micro-steps of this step that the log leaves out, as many as were played
        self._keeps_outputs = kept_outputs_bytes(spec, self.arch) > 0
        #: Whether the next step finds them.
        self._hands_on = self._keeps_outputs and LOOPS[spec.loop].outputs_until == "forward"
        self._kept: list[int] = []  # the frees of what the last step kept
        self._prepare()

    def _prepare(self) -> None:
        """Set how a step runs, and which tensors stand, in the model's order."""
        tensors = parameters.tensors(self.spec, self.arch)
        self._setup = self._sized(setup_of(self.spec, self.arch, tensors, self._chip))
        self._tensors = self._in_order(tensors)

    def _sized(self, setup: Setup) -> Setup:
        return replace(setup, sizes=Given(self.spec.batch_size, self.spec.row_tokens))

    def _in_order(self, tensors: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
        return list(in_order(Model(Tape(), self._setup, range(self.arch.num_layers)), tensors))

    def load(self) -> None:
        """All that stands as the first step begins."""
        load(self.spec, self.arch, self._tensors, self.allocator)

    def step(self) -> None:
        """One step: forward and backward of every micro-batch, the optimizer, the gradients' end."""
        self._num_steps += 1
        self._work()
        self._optimize()
        self._end()

    def _work(self) -> None:
        """Every micro-step."""
        log = self._log
        for part, first in zip(log.parts[:-1], log.firsts, strict=False):
            self._play(part, first)
        self._num_more = 0
        while self._num_more < log.num_left_out:
            before = self.allocator.state()
            self._num_more += 1
            self._play(*log.repeated(self._num_more))
            if self.allocator.state() == before:
                break  # and so each one after it
        self._play(*log.last(self._num_more))

    def _end(self) -> None:
        """What follows the optimizer; what the loop keeps goes in the next step."""
        events, number = self._log.end(self._num_more)
        if not self._hands_on:
            self._play(events, number)
            return
        num_gradients = 0
        while events[num_gradients] < 0:  # up to the mark
            num_gradients += 1
        self._play(events[:num_gradients], number)
        self._kept = [event - self._turn() for event in events[num_gradients + 1 : -1]]

    def _turn(self) -> int:
        """What is added to the numbers of this step's requests: those of every other step are others, so that what one
        keeps has its own in the next."""
        return self._num_steps % 2 * self._log.num_requests if self._hands_on else 0

    @cached_property
    def _log(self) -> StepLog:
        """Every step asks for the same."""
        return self._step_log()

    def _step_log(self) -> StepLog:
        num_micro_steps = self.spec.grad_accum
        if num_micro_steps > LOGGED:
            with suppress(NotAlike):
                return StepLog(self._step_chunks(LOGGED), num_micro_steps)
        return StepLog(self._step_chunks(num_micro_steps), num_micro_steps)

    def _step_chunks(self, num_micro_steps: int) -> list[Chunk]:
        """A step of so many; the last chunk is what follows the optimizer."""
        arch, num_middle = self.arch, self.arch.num_layers - 2
        if num_middle > SAMPLED and {families.layer_place(arch, layer) for layer in range(1, num_middle + 1)} == {
            MIDDLE_LAYER
        }:
            with suppress(NotAlike):
                return unrolled(self._chunks([*range(SAMPLED + 1), arch.num_layers - 1], num_micro_steps), num_middle)
        return self._chunks(range(arch.num_layers), num_micro_steps)

    @undisturbed
    def _chunks(self, layers: Sequence[int], num_micro_steps: int) -> list[Chunk]:
        """The same of a model of these layers."""
        tape = self._tape(layers, num_micro_steps)
        tape.asked = self.asked
        tape.model = model = Model(tape, self._setup, layers)
        if self._hands_on:
            tape.kept = [tape.new(1, "int8")]  # in the place of what the step before left
        for number in range(num_micro_steps):
            tape.micro_step = number
            loss, gradient = families.forward(model), tape.new(1, "fp32")  # both in variables until backward returns
            tape.thread = "backward"
            tape.backward(loss.node, gradient)
            tape.thread = "forward"
            del loss, gradient
            model.end_of_step()
        tape.come_to(("zero_grad", "end"))
        tape.zero_grad(model.leaves())
        if self._hands_on:
            tape.kept = [tape.new(1, "int8")]  # where what the last forward left goes, in the next step
        tape.kept.clear()
        tape.model = None
        tape.require_own_thread()
        return chunks_of(tape.log)

    def _tape(self, layers: Sequence[int], num_micro_steps: int) -> Tape:
        tape = Tape()
        tape.keeps_outputs = self._keeps_outputs
        tape.raises_outputs = tape.keeps_outputs and LOOPS[self.spec.loop].raises_outputs
        return tape

    def _play(self, events: list[int], number: int) -> None:
        """Ask for what a log says, from its request ``number`` on; a thread's workspace in the first step alone."""
        if self._hands_on:
            by = self._turn()
            if number == 0:  # the mark, in the place of what the step before kept
                events, number = events[1:], 1
            found: list[int] = []
            for event in events:
                if event == -1:  # the mark goes, and with it what was kept
                    found += self._kept
                else:
                    found.append(event - by if event < 0 else event)
            events, number = found, number + by
        self.allocator.play(events, number, self._workspace_bytes if self._num_steps == 1 else 0)

    def _trained_tensors(self) -> list[tuple[str, Tensor]]:
        """What the optimizer steps."""
        return [(name, tensor) for name, tensor in self._tensors if tensor.trained]

    def _optimize(self) -> None:
        """The state, made in the first step, and what a step takes for a moment."""
        trained = self._trained_tensors()
        if self._num_steps == 1:
            for name, tensor in trained:
                for number, size_bytes in enumerate(states.allocated_state_parts(self.spec, tensor)):
                    self.allocator.allocate(("state", name, number), size_bytes)
        taken = optimizer.temporary_parts(self.spec, [tensor for _, tensor in trained])
        for number, size_bytes in enumerate(taken):
            self.allocator.allocate(("temporary", number), size_bytes)
        for number in range(len(taken)):
            self.allocator.free(("temporary", number))


def in_order(model: Model, tensors: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Each copy of each tensor with its own name: the base model as it is made, then the adapters, layer by layer."""
    for group in ([one for one in tensors if one.role != "adapter"], [one for one in tensors if one.role == "adapter"]):
        of_layers = [tensor for tensor in group if tensor.per_layer]
        first = next((at for at, tensor in enumerate(group) if tensor.per_layer), len(group))
        for tensor in group[:first]:
            yield tensor.name, tensor
        for layer in model.layers if of_layers else ():
            model.layer = layer
            for tensor in of_layers:
                yield tensor.name.replace("{layer}", str(layer)), tensor
        for tensor in group[first:]:
            if not tensor.per_layer:
                yield tensor.name, tensor
