"""One cell from load to the last step, phase by phase; whoever watches is handed in as an Observer.

The step is a trainer's: forward under autocast with the model's own loss, the outputs dropped before backward, backward
outside autocast, optimizer step, gradients set to None; or that of another loop (trainers.py). Never measures anything
itself.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from vramprobe.choices import PhaseName
from vramprobe.spec import CellSpec
from vramprobe.trainers import LOOPS, TRAINERS
from vramprobe.workload.fused_loss import fuse_loss
from vramprobe.workload.images import add_images, is_vision, text_tokens
from vramprobe.workload.loss import options_of
from vramprobe.workload.model import TORCH_DTYPES
from vramprobe.workload.releases import CALL_OPTIONS, HAS_MASK, vocab_size
from vramprobe.workload.stepper import Stepper
from vramprobe.workload.storages import Storages, storages_of
from vramprobe.workload.trainer import reference_storages

#: One token in so many is padding, rounded up; and the label that the library's losses leave out.
_PADDED_PART, _NO_LOSS = 8, -100


class Observer(Protocol):
    """Interface of an instrument to the workload: when a phase runs, and which storages stand at this point."""

    def phase(
        self, name: PhaseName, step: int | None = None, micro_step: int | None = None
    ) -> AbstractContextManager[None]: ...

    def holds(self, cause: str, storages: Storages, step: int | None = None) -> None: ...


class _Nobody:
    """The observer of timed steps: nothing is traced."""

    def phase(
        self, name: PhaseName, step: int | None = None, micro_step: int | None = None
    ) -> AbstractContextManager[None]:
        return nullcontext()

    def holds(self, cause: str, storages: Storages, step: int | None = None) -> None:
        pass


NOBODY = _Nobody()


@dataclass(frozen=True)
class Workload:
    """Everything a step needs, alive."""

    spec: CellSpec
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: dict[str, torch.Tensor]  # input_ids and what goes with them, (rows, row_tokens) int64, and those of images
    stepper: Stepper
    kept: list[Any] = field(default_factory=list)  # the outputs of the last forward, where the loop keeps them


def set_up(spec: CellSpec, observer: Observer, join: Callable[[], Stepper] | None = None) -> Workload:
    """Load, prepare and place the batch, each a phase; ``join`` makes this process a rank of several."""
    torch.manual_seed(spec.seed)
    with observer.phase("load"):
        stepper = Stepper(spec) if join is None else join()
        model = stepper.load()
    with observer.phase("prepare"):
        model, optimizer = stepper.prepare(model)
        if spec.fused_linear_cross_entropy:
            fuse_loss(spec, getattr(model, "module", model))  # which DDP wraps
        if spec.torch_compile:
            model.compile()  # in place: names and parameters stay; the first forward compiles
    with observer.phase("batch"):
        batch = _make_batch(spec, getattr(model, "module", model))
    observer.holds("batch", storages_of(batch.values()))
    return Workload(spec, model, optimizer, batch, stepper)


def train_step(work: Workload, observer: Observer, step: int) -> None:
    """One optimizer step over ``grad_accum`` micro-batches; ``step`` counts from 1."""
    spec, stepper = work.spec, work.stepper
    is_late = LOOPS[spec.loop].frees_gradients_late
    for micro_step in range(1, spec.grad_accum + 1):
        with stepper.micro_step(work.model, is_last=micro_step == spec.grad_accum), ExitStack() as until_backward_ends:
            if TRAINERS[spec.trainer].scores_first and stepper.trainer is not None:
                with observer.phase("forward", step, micro_step):  # a phase of its own: it repeats by itself
                    stepper.trainer.score(work.batch)
            with observer.phase("forward", step, micro_step):
                loss = _forward(work, until_backward_ends.enter_context(stepper.inputs(work.model, work.batch)))
            if is_late:
                _zero_grad(work, observer, step)
            with observer.phase("backward", step, micro_step):
                stepper.backward(work.model, loss)
                del loss
    observer.holds("gradients", stepper.gradients(work.model), step)
    with observer.phase("optimizer_step", step):
        stepper.step(work.model, work.optimizer)
    observer.holds("optimizer_state", stepper.state(work.model, work.optimizer), step)
    # Not once after prepare: bitsandbytes casts its layers' biases and moves int8 scales in the first forward.
    observer.holds("weights", stepper.weights(work.model) | reference_storages(stepper.trainer), step)
    if not is_late:
        _zero_grad(work, observer, step)
    if LOOPS[spec.loop].outputs_until == "step":
        work.kept.clear()
    kept = stepper.gradients if is_late else stepper.kept_gradients
    observer.holds("kept_gradients", kept(work.model), step)


def _zero_grad(work: Workload, observer: Observer, step: int) -> None:
    with observer.phase("zero_grad", step):
        work.optimizer.zero_grad(set_to_none=True)


@dataclass
class StackFacts:
    """Facts that a forward through the layers shows; both stay empty for a model without a stack of layers."""

    residual_dtype: str | None = None  # of the hidden states that leave the last layer, e.g. "float32"
    attention_kernels: list[str] = field(default_factory=list)  # fused ones in the autograd graph; none: eager or math


@contextmanager
def watch_stack(model: nn.Module) -> Iterator[StackFacts]:
    """While open, notes the facts of the first forward through the longest stack of layers, a vision tower's apart.

    Not of a compiled one: a hook within it would be compiled too, and break the graph that is measured.
    """
    facts = StackFacts()
    stacks = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) and not is_vision(name)
    ]
    if not stacks or getattr(model, "_compiled_call_impl", None) is not None:
        yield facts
        return

    def note(module: nn.Module, args: object, output: object) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if facts.residual_dtype is None and isinstance(hidden, torch.Tensor):
            facts.residual_dtype = str(hidden.dtype).removeprefix("torch.")
            facts.attention_kernels = _attention_nodes(hidden)

    handle = max(stacks, key=len)[-1].register_forward_hook(note)
    try:
        yield facts
    finally:
        handle.remove()


def _attention_nodes(tensor: torch.Tensor) -> list[str]:
    """Names of the fused attention functions that backward will run: the graph knows which kernel was chosen."""
    found: set[str] = set()
    todo, seen = [tensor.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [earlier for earlier, _ in node.next_functions]
            if "Attention" in node.name() or "FlashAttn" in node.name():
                found.add(node.name())
    return sorted(name.removesuffix("0").removesuffix("Backward") for name in found)


def _forward(work: Workload, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss; the logits and the rest of the outputs are gone when this returns, but where the loop keeps them."""
    spec = work.spec
    autocast: AbstractContextManager = nullcontext()
    if work.stepper.trainer is not None:  # which puts each of its models under autocast
        loss = work.stepper.trainer.loss(batch)
        return loss / spec.grad_accum if spec.grad_accum > 1 else loss
    if spec.autocast != "none" and not work.stepper.autocasts:
        autocast = torch.autocast(device_type=spec.device, dtype=TORCH_DTYPES[spec.autocast])
    with autocast:
        outputs = work.model(**batch, **CALL_OPTIONS, **options_of(spec))
    loss, loop = outputs.loss, LOOPS[spec.loop]
    if loop.outputs_until:
        if loop.raises_outputs and spec.autocast != "none":
            from accelerate.utils import convert_to_fp32  # as Accelerator.prepare_model has it

            outputs = convert_to_fp32(outputs)
        work.kept[:] = [outputs]  # and the last ones go
    return loss / spec.grad_accum if spec.grad_accum > 1 else loss


def _make_batch(spec: CellSpec, model: nn.Module) -> dict[str, torch.Tensor]:
    """Random tokens, images beside them, and labels or what a trainer's collator puts in their place. A mask of the
    model's own loss only with padding, for it changes the kernel; a trainer's masks leave nothing out.
    """
    shape = (spec.num_rows, spec.row_tokens)
    num_tokens = text_tokens(spec, vocab_size(model))
    input_ids = torch.randint(num_tokens, shape, device=spec.device)
    if spec.trainer != "sft":
        masks = {name: torch.ones_like(input_ids) for name in TRAINERS[spec.trainer].inputs[1:]}
        return {"input_ids": input_ids} | masks
    batch = {"input_ids": input_ids, "labels": input_ids.clone()}
    if spec.images:
        add_images(spec, model.config, batch)
    if HAS_MASK or (spec.cp_size > 1 and spec.loss == "chunked_nll"):
        # As TRL's collator. Without one, transformers takes the gap between a rank's two parts of a row for the border
        # of two packed rows, and makes a mask of all pairs of tokens.
        batch["attention_mask"] = torch.ones_like(input_ids)
    if spec.padding:  # as a collator pads: on the right, and no loss there
        num_padded = -(-spec.seq_len // _PADDED_PART)
        batch["attention_mask"] = torch.ones_like(input_ids)
        batch["attention_mask"][:, -num_padded:] = 0
        batch["labels"][:, -num_padded:] = _NO_LOSS
    return batch
