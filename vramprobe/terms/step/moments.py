"""Moments: a cell's ledger, and the moments of its steady step that can be the peak, in bytes by cause.

In: a CellSpec. Out: the ledger's terms (weights, gradients, optimizer state, batch, saved activations) and Moments,
each a sum of named terms. The peak is the highest moment, never one long sum. A Course keeps a step for every batch
size and length. Never imports the workload or torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from vramprobe.architecture import Architecture
from vramprobe.bounds import states
from vramprobe.bounds import tensors as parameters
from vramprobe.bounds.tensors import Tensor
from vramprobe.kernels.chip import A100, Chip
from vramprobe.options import RANK_OPTIONS
from vramprobe.rules.arithmetic import counted_architecture
from vramprobe.spec import CellSpec
from vramprobe.terms.cell import optimizer, remainders
from vramprobe.terms.cell.setup import Branch, Setup, branch_of, setup_of
from vramprobe.terms.step.walk import Walk, walk_of
from vramprobe.terms.tape.graph import CAUSES, Place
from vramprobe.trainers import LOOPS, TRAINERS, outputs_bytes

_OPTIMIZER: Place = ("optimizer_step", "optimizer")
#: What of a spec decides no moment, or is left open in a Course.
_NOT_IN_A_COURSE = {
    "batch_size",
    "seq_len",
    "grad_accum",
    "model",
    "seed",
    "steps",
    "timing_steps",
    "alloc_conf",
    "limit_vram",
    "loop",
    *RANK_OPTIONS,
}
_MAX_COURSES = 1024


@dataclass(frozen=True)
class Moment:
    """One moment of a steady step: ``phase`` is a record's PhaseName, ``terms`` are bytes by cause."""

    phase: str
    label: str
    terms: dict[str, int]

    @property
    def total_bytes(self) -> int:
        """Allocated bytes at this moment."""
        return sum(self.terms.values())


def ledger_terms(spec: CellSpec, chip: Chip = A100) -> dict[str, int]:
    """Bytes of the steady step's ledger by cause, as :class:`vramprobe.records.record.MemoryLedger` defines them.

    ``chip``: whose attention kernels run. Raises UnsupportedArchitecture for what the formula engine has no
    arithmetic for.
    """
    arch = counted_architecture(spec)
    tensors = parameters.tensors(spec, arch)
    trained = [tensor for tensor in tensors if tensor.trained]
    walk = walk_of(setup_of(spec, arch, tensors, chip))
    return {
        **_idle_terms(spec, arch, tensors, states.state_bytes(spec, trained)),
        "gradients": _gradients_bytes(trained),
        "saved_activations": walk.saved_bytes(spec.batch_size, spec.row_tokens),
    }


@dataclass(frozen=True)
class Course:
    """A step of a cell whose batch size, length and accumulation are left open, but for the side of 1 that they are on
    and the branch that they take; bytes by cause, of the optimizer's step too.
    """

    arch: Architecture
    idle: dict[str, int]  # alive between two steps, but for the batch
    at_step: dict[str, int]
    setup: Setup
    gradient_remainders: int = 0  # of all gradients' blocks; as many of them are counted as there are gradients

    @cached_property
    def walk(self) -> Walk:
        """The Walk of a single GPU."""
        return walk_of(self.setup)

    def remainders(self, gradient_bytes: int) -> int:
        """What blocks have over while so many bytes of gradients stand."""
        share = remainders.share_of(self.gradient_remainders, gradient_bytes, self.at_step["gradients"])
        return self.idle.get("block_remainders", 0) + share


_courses: dict[tuple[str, bool, bool, bool, Chip], dict[Branch, Course]] = {}


def course_of(spec: CellSpec, chip: Chip = A100) -> Course:
    """The Course of a cell, kept for the next one that differs in batch size and length only.

    ``chip``: whose attention kernels run. Raises UnsupportedArchitecture for what the formula engine has no
    arithmetic for.
    """
    sides = spec.batch_size == 1, spec.row_tokens == 1, spec.grad_accum == 1
    key = spec.model_dump_json(exclude=_NOT_IN_A_COURSE), *sides, chip
    known = _courses.get(key, {})
    for course in known.values():
        if (branch := branch_of(spec, course.arch)) in known:
            return known[branch]
        break
    arch = counted_architecture(spec)
    tensors = parameters.tensors(spec, arch)
    trained = [tensor for tensor in tensors if tensor.trained]
    idle = _idle_terms(spec, arch, tensors, states.allocated_state_bytes(spec, trained))
    del idle["batch"]
    step = {"gradients": _gradients_bytes(trained), "optimizer_temporaries": optimizer.temporaries_bytes(spec, trained)}
    left = 0
    if spec.device == "cuda":
        idle["block_remainders"], left = remainders.of_what_stands(spec, tensors), remainders.of_gradients(trained)
    course = Course(arch, idle, step, setup_of(spec, arch, tensors, chip), left)
    if len(_courses) >= _MAX_COURSES:
        _courses.clear()
    _courses.setdefault(key, {})[branch_of(spec, arch)] = course
    return course


def moments(spec: CellSpec, chip: Chip = A100) -> list[Moment]:
    """The moments of a steady step that can be its peak, in the order of the step.

    ``chip``: whose attention kernels run. Raises UnsupportedArchitecture for what the formula engine has no
    arithmetic for.
    """
    return moments_of(course_of(spec, chip), spec)


def moments_of(course: Course, spec: CellSpec) -> list[Moment]:
    """The same of a cell whose course is at hand."""
    idle = course.idle | {"batch": batch_bytes(spec)}
    places = course.walk.highest(spec.batch_size, spec.row_tokens) | {_OPTIMIZER: course.at_step}
    kept, in_forward = kept_outputs_bytes(spec, course.arch), old_outputs_stand(spec)
    return [
        Moment(
            phase,
            place,
            _in_order(
                idle
                | terms
                | {
                    "logits": terms.get("logits", 0) + (kept if phase != "forward" or in_forward else 0),
                    "block_remainders": course.remainders(terms.get("gradients", 0)),
                }
            ),
        )
        for (phase, place), terms in places.items()
    ]


def _idle_terms(spec: CellSpec, arch: Architecture, tensors: Sequence[Tensor], state_bytes: int) -> dict[str, int]:
    """What is alive between two steps."""
    return {
        "weights": parameters.weights_bytes(tensors, spec.quant) + parameters.buffers_bytes(arch, spec.dtype),
        "optimizer_state": state_bytes,
        "batch": batch_bytes(spec),
    }


def kept_outputs_bytes(spec: CellSpec, arch: Architecture, loop: str | None = None) -> int:
    """Bytes of the logits that ``loop`` keeps, the cell's own by default: of one forward, as the old ones go where the
    new ones have come."""
    return outputs_bytes(spec, LOOPS[loop or spec.loop], arch.num_outputs)


def old_outputs_stand(spec: CellSpec) -> bool:
    """Return True if a forward finds the outputs of the one before it."""
    return LOOPS[spec.loop].outputs_until == "forward" or spec.grad_accum > 1


def batch_bytes(spec: CellSpec) -> int:
    """The inputs of a micro-batch: int64 for each token."""
    return 8 * len(TRAINERS[spec.trainer].inputs) * spec.num_tokens


def _gradients_bytes(trained: Sequence[Tensor]) -> int:
    return sum(tensor.num_bytes * tensor.num_copies for tensor in trained)


def _in_order(terms: dict[str, int]) -> dict[str, int]:
    return {cause: size for cause in CAUSES if (size := terms.get(cause))}
