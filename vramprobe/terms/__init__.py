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
from vramprobe.terms import families, optimizer, parameters
from vramprobe.terms.modules import Model
from vramprobe.terms.parameters import Tensor
from vramprobe.terms.tape import Tape

#: Depths of the two shallow walks; memory is linear in depth from the first layer that is neither first nor last.
_SHALLOW = (3, 4)

#: Every cause a moment's bytes may have, in the order they are shown.
CAUSES = (
    "weights", "gradients", "optimizer_state", "batch", "saved_activations", "checkpoint_store", "recomputed_layer",
    "logits", "cast_copies", "dequantisation", "temporaries", "optimizer_temporaries",
)  # fmt: skip


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
    return {
        **_idle_terms(spec, arch, tensors, optimizer.state_bytes(spec, trained)),
        "gradients": _gradients_bytes(trained),
        "saved_activations": _walk(spec, arch)[0],
    }


def moments(spec: CellSpec) -> list[Moment]:
    """The moments of a steady step that can be its peak, in the order of the step.

    Raises UnsupportedArchitecture for what the formula engine has no arithmetic for.
    """
    arch = architecture(spec.architecture)
    tensors = parameters.tensors(spec, arch)
    trained = [tensor for tensor in tensors if tensor.trained]
    idle = _idle_terms(spec, arch, tensors, optimizer.allocated_state_bytes(spec, trained))
    _, places = _walk(spec, arch)
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
    assert terms.keys() <= set(CAUSES), terms.keys() - set(CAUSES)
    return {cause: terms[cause] for cause in CAUSES if terms.get(cause)}


Places = dict[tuple[str, str], dict[str, int]]


def _walk(spec: CellSpec, arch: Architecture) -> tuple[int, Places]:
    """(saved activations in bytes, terms of the highest moment of each place) for the model's own depth."""
    if arch.num_layers <= _SHALLOW[1]:
        return _walk_layers(spec, arch, arch.num_layers)
    (saved, places), (deeper_saved, deeper_places) = (_walk_layers(spec, arch, depth) for depth in _SHALLOW)
    extra = arch.num_layers - _SHALLOW[0]
    return saved + extra * (deeper_saved - saved), {
        place: {cause: terms.get(cause, 0) + extra * (deeper_places[place].get(cause, 0) - terms.get(cause, 0))
                for cause in terms.keys() | deeper_places[place].keys()}
        for place, terms in places.items()
    }  # fmt: skip


def _walk_layers(spec: CellSpec, arch: Architecture, num_layers: int) -> tuple[int, Places]:
    tape = Tape()
    model = Model(tape, spec, arch, num_layers)
    saved_bytes = 0
    for _ in range(min(spec.grad_accum, 2)):  # from the second micro-step on, gradients are alive throughout
        before = tape.total_bytes
        loss = families.forward(model)
        saved_bytes = tape.total_bytes - before
        tape.backward(loss.node, tape.new(1, "fp32"))
        del loss
        tape.forget_required()
    return saved_bytes, {place: peak.by_cause for place, peak in tape.peaks.items()}
