"""VramprobeCallback: a Trainer's own run, measured by phase and beside its prediction, in the Trainer's logs.

In: what transformers' Trainer tells its callbacks. Out: scalars in its logs, the profile and the prediction at the end.
It is called by name, and so is no subclass of transformers' TrainerCallback, which is not imported.
"""

import logging
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vramprobe.errors import VramprobeError
from vramprobe.interop.watch import begin, profile_so_far
from vramprobe.units import GIB

if TYPE_CHECKING:
    from vramprobe.interop.questions import JudgedPrediction
    from vramprobe.records.profile import ProfileRecord

_LOG = logging.getLogger("vramprobe")
_PREFIX = "vramprobe/"
_LAST_LOG = "train_runtime"  # of the Trainer's log at the end of training


class VramprobeCallback:
    """``Trainer(callbacks=[VramprobeCallback()])``: make it before the model is on the GPU.

    Each log gets the allocated and reserved peaks so far; the last one those of each phase, the causes at the peak, the
    predicted peak and its ratio to the measured one, all in GiB. ``profile``, ``prediction`` and ``why_no_prediction``
    are there after ``train()``. The GPU is an emulated one where the run is emulated; without any, nothing is measured.
    """

    def __init__(self, *, gpu: str | None = None, trace: str = "step", **options: Any) -> None:
        """``gpu``: predict for this one (default: the one that is used). ``trace``: as in :func:`vramprobe.watch`.

        ``options``: a cell's, where the prediction should not read them off the run, such as ``seq_len``.
        """
        begin(trace)
        self._gpu, self._options = gpu, options
        self._longest, self._is_first = 0, False
        self._handle: Any = None  # of torch's hook
        self.profile: ProfileRecord | None = None
        self.prediction: JudgedPrediction | None = None
        self.why_no_prediction = ""

    def __getattr__(self, name: str) -> Any:
        """Any event that is not listened to."""
        if name.startswith("on_"):
            return _nothing
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        """Note how long the rows are that the model gets."""
        self._go_first(sys._getframe(1).f_locals.get("self"))
        if model is not None and not getattr(args, "torch_compile", False):
            self._handle = model.register_forward_pre_hook(self._note_rows, with_kwargs=True)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, model: Any = None, **more: Any) -> None:
        """Add the scalars to the Trainer's log, before those who report it read it."""
        if logs is None:
            return
        scalars = self._so_far()
        if _LAST_LOG in logs and self.profile is None:
            scalars |= self._at_end(args, model)
        scalars = {f"{_PREFIX}{name}": value for name, value in scalars.items()}
        logs |= scalars
        if state is not None and getattr(state, "log_history", None):
            state.log_history[-1] |= scalars

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        """Analyse the run, where no last log did."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        if self.profile is None:
            self._at_end(args, model)

    def _go_first(self, handler: Any) -> None:
        """A Trainer calls those who report its logs before the callbacks that it was given: be called first."""
        callbacks = getattr(handler, "callbacks", None)
        if isinstance(callbacks, list) and self in callbacks:
            callbacks.remove(self)
            callbacks.insert(0, self)

    def _note_rows(self, module: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        ids = kwargs.get("input_ids")
        if ids is None and args:
            ids = args[0]
        shape = getattr(ids, "shape", ())
        if len(shape) > 1:
            self._longest = max(self._longest, int(shape[-1]))

    def _so_far(self) -> dict[str, float]:
        cuda = _cuda()
        if cuda is None:
            return {}
        return {
            "peak_allocated_gib": cuda.max_memory_allocated() / GIB,
            "peak_reserved_gib": cuda.max_memory_reserved() / GIB,
        }

    def _at_end(self, args: Any, model: Any) -> dict[str, float]:
        """The profile and the prediction, as scalars."""
        self._predict(args, model)
        scalars: dict[str, float] = {}
        try:
            self.profile = profile_so_far()
        except VramprobeError as error:
            _LOG.warning("no profile of this run: %s", error)
            return scalars
        rank = self.profile.highest_rank
        for phase in rank.phases if rank else ():
            scalars[f"{phase.name}_allocated_gib"] = phase.allocated_bytes / GIB
        for cause, num_bytes in self.profile.causes().items():
            scalars[f"at_peak/{cause}_gib"] = num_bytes / GIB
        if self.prediction is not None:
            scalars["predicted_allocated_gib"] = self.prediction.peak_allocated_bytes.value / GIB
            if rank is not None and (highest := _highest_of_steps(rank)):
                scalars["predicted_over_measured"] = self.prediction.peak_allocated_bytes.value / highest
        return scalars

    def _predict(self, args: Any, model: Any) -> None:
        from vramprobe.interop.questions import predict

        is_flat = getattr(args, "packing", False) or getattr(args, "padding_free", False)  # all rows in one
        is_seen = self._longest and not is_flat and "seq_len" not in self._options
        own: dict[str, Any] = {"seq_len": self._longest} if is_seen else {}
        try:
            self.prediction = predict(model, args, gpu=self._gpu or _gpu_here(), **own, **self._options)
        except VramprobeError as error:
            self.why_no_prediction = str(error)
            _LOG.warning("no prediction of this run: %s", error)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """An event that changes nothing."""


def _cuda() -> Any:
    """torch.cuda where this process uses it."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized() else None


def _gpu_here() -> str | None:
    """The catalog's name of the GPU in use; None where there is none, or it is not known."""
    from vramprobe.catalog import gpu_seen

    cuda = _cuda()
    known = None if cuda is None else gpu_seen(cuda.get_device_name())
    return None if known is None else known.short_name


def _highest_of_steps(rank: Any) -> int:
    """The allocated peak of the training steps, which is what is predicted, in bytes; 0 where there was none."""
    steps = ("forward", "backward", "optimizer_step", "zero_grad")
    return max((one.allocated_bytes for one in rank.phases if one.name in steps), default=0)
