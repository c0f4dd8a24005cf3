"""A sweep file and what is asked of it → a Job: the cells chosen, the folder, the GPU, the fit and the price.

In: the words of plan and run (questions.py). Out: a Job. Plans nothing and runs nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vramprobe.emulate import machine_folder
from vramprobe.errors import SpecError
from vramprobe.predict.questions import given_fit

if TYPE_CHECKING:
    from vramprobe.model.card_fit import CardFit
    from vramprobe.sweep import definition
    from vramprobe.sweep.card import Card, Rate
    from vramprobe.sweep.on_data import Data
    from vramprobe.sweep.plan import Recording

#: Gives a sweep, for a ``device`` and with ``overrides``, as definition.load_sweep does of a file.
Load = Callable[..., "definition.Sweep"]


class Job(NamedTuple):
    """A sweep with everything that planning and running it need."""

    sweep: definition.Sweep
    folder: Path
    card: Card | None
    fit: CardFit | None
    rate: Rate | None
    records: bool = False  # whether cells without a recipe at hand are recorded for their predictions

    @property
    def recording(self) -> Recording | None:
        """Return what records cells without a recipe at hand, on this card; None where nothing is recorded."""
        from vramprobe.predict.recorded import predict_many

        if not self.records:
            return None
        return functools.partial(predict_many, gpu=self.card.gpu if self.card else None, model=self.fit)


def job_of(
    path: str | Path | Load,
    *,
    choose: Callable[[Job], definition.Sweep] = lambda job: job.sweep,
    out: str | Path | None = None,
    device: str = "auto",
    gpu: str | None = None,
    fit: str | Path | CardFit | None = None,
    usd_per_hour: float | None = None,
    provider: str | None = None,
    only: str | Sequence[str] = (),
    skip: str | Sequence[str] = (),
    shard: str | None = None,
    records: bool = False,
    data: Data | None = None,
    card_of: Callable[[definition.Sweep], Card | None] | None = None,
    **overrides: Any,
) -> Job:
    """The sweep of a file as it is to be planned or run; ``path`` may be what gives the sweep of a device.

    ``out`` is the folder it would resume in (results/<device>/<sweep> by default), and ``fit`` what predicts: a file, a
    model, or the folder's own fit.json. ``records``: cells without a recipe at hand are recorded, some seconds each.
    ``data``: each cell at the longest batch that it makes of these rows, in place of its seq_len, which truncates them.
    ``choose``: the cells to plan or run, once the GPU and the fit are known. ``card_of`` finds the GPU that the sweep
    will use; this machine's by default. ``overrides``: options of every cell.
    """
    from vramprobe.measure.environment import device_to_use
    from vramprobe.sweep import definition
    from vramprobe.sweep.card import card_named, hourly_rate

    if gpu is not None and device == "cpu":
        raise SpecError(f"a plan for {gpu} is one for device cuda, and cpu was given; drop one of them")
    device = "cuda" if gpu is not None else device_to_use(device)
    load = path if callable(path) else functools.partial(definition.load_sweep, path)
    loaded = load(device=device, overrides=overrides)
    if data is not None:
        from vramprobe.sweep.on_data import on_data

        loaded = on_data(loaded, data)
    chosen = definition.select(loaded, only=only, skip=skip, shard=shard)
    card = card_named(gpu) if gpu is not None else (card_of or _card_here)(chosen)
    folder = Path(out) if out is not None else default_results(chosen.name, device, card)
    job = Job(chosen, folder, card, _fit_of(fit, folder), hourly_rate(card, usd_per_hour, provider), records)
    return job._replace(sweep=choose(job))


def _fit_of(fit: str | Path | CardFit | None, folder: Path) -> CardFit | None:
    """The fit that is given, or lies beside the results; ``none``: without."""
    if fit is not None:
        return None if str(fit) == "none" else given_fit(fit)
    beside = folder / "fit.json"
    return given_fit(beside) if beside.exists() else None


def _card_here(chosen: definition.Sweep) -> Card | None:
    """The GPU that the sweep will use; None where its cells are for the CPU, or where there is no GPU to be seen."""
    from vramprobe.measure import nvml
    from vramprobe.sweep.card import card_seen

    gpu = nvml.first_visible_gpu() if any(one.device == "cuda" for one in chosen.cells) else None
    watched = nvml.open_device(gpu[0]) if gpu else None
    total_bytes = watched.total_bytes() if watched else None
    if not gpu or not total_bytes:
        return None
    return card_seen(gpu[1], total_bytes, is_emulated=machine_folder() is not None)


def default_results(sweep_name: str, device: str, card: Card | None = None) -> Path:
    """results/<device>/<sweep>: the GPU's short name in lower case, or cpu; emulated GPUs in a folder apart."""
    name = device if card is None else card.gpu.short_name if card.gpu else card.name.removeprefix("NVIDIA ")
    home = Path("results", "emulated") if card is not None and card.is_emulated else Path("results")
    return home / name.lower().replace(" ", "-") / sweep_name
