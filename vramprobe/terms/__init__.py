"""Terms: a spec and its architecture -> bytes per physical cause, by arithmetic alone.

In: a CellSpec. Out: the ledger's terms (weights, gradients, optimizer state, batch, saved activations) and the moments
that can be the peak, each a sum of named terms. The peak is the highest moment, never one long sum. Never imports torch
or the workload: the two accounts meet only in the fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vramprobe.architecture import Architecture, architecture
from vramprobe.spec import CellSpec
from vramprobe.terms import optimizer, parameters
from vramprobe.terms.parameters import Tensor
from vramprobe.terms.setup import setup_of
from vramprobe.terms.tape import CAUSES
from vramprobe.terms.walk import walk_of


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


def ledger_terms(spec: CellSpec) -> dict[str, int]:
    """Bytes of the steady step's ledger by cause, as :class:`vramprobe.record.Ledger` defines them.

    Raises UnsupportedArchitecture for what the formula engine has no arithmetic for.
    """
    arch = architecture(spec.architecture)
    tensors = parameters.tensors(spec, arch)
    trained = [tensor for tensor in tensors if tensor.trained]
    walk = walk_of(setup_of(spec, arch, tensors))
    return {
        **_idle_terms(spec, arch, tensors, optimizer.state_bytes(spec, trained)),
        "gradients": _gradients_bytes(trained),
        "saved_activations": walk.saved_bytes(spec.batch_size, spec.seq_len),
    }


def moments(spec: CellSpec) -> list[Moment]:
    """The moments of a steady step that can be its peak, in the order of the step.

    Raises UnsupportedArchitecture for what the formula engine has no arithmetic for.
    """
    arch = architecture(spec.architecture)
    tensors = parameters.tensors(spec, arch)
    trained = [tensor for tensor in tensors if tensor.trained]
    idle = _idle_terms(spec, arch, tensors, optimizer.allocated_state_bytes(spec, trained))
    places = walk_of(setup_of(spec, arch, tensors)).highest(spec.batch_size, spec.seq_len)
    made = [Moment(phase, place, _in_order({**idle, **terms})) for (phase, place), terms in places.items()]
    step = {**idle, "gradients": _gradients_bytes(trained),
            "optimizer_temporaries": optimizer.temporaries_bytes(spec, trained)}  # fmt: skip
    return [*made, Moment("optimizer_step", "optimizer", _in_order(step))]


def _idle_terms(spec: CellSpec, arch: Architecture, tensors: Sequence[Tensor], state_bytes: int) -> dict[str, int]:
    """What is alive between two steps: input_ids and labels are int64, and the cell passes no mask."""
    return {
        "weights": parameters.weights_bytes(tensors, spec.quant) + parameters.buffers_bytes(arch),
        "optimizer_state": state_bytes,
        "batch": 2 * 8 * spec.num_tokens,
    }


def _gradients_bytes(trained: Sequence[Tensor]) -> int:
    return sum(tensor.num_bytes * tensor.num_copies for tensor in trained)


def _in_order(terms: dict[str, int]) -> dict[str, int]:
    return {cause: size for cause in CAUSES if (size := terms.get(cause))}
