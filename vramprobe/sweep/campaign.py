"""A campaign file (YAML) → a Campaign: stages, each of them a sweep, a fit or a search for boundaries, in their order.

In: a file as in data/campaigns/, or a name there. Out: a frozen Campaign, or a SpecError that names file and stage.

    name: small
    stages:
      calibration:
        sweep: calibrate-gpu            # a sweep's name or file, or its content: {defaults: …, cells: […]}
      model:
        fit: calibration                # or a list of stages: their records, fitted
      held-out:
        sweep: {cells: [{model: gpt2, method: lora, batch_size: 4, seq_len: 512}]}
        predict_with: model             # predicted before it runs, and compared
      largest-batch:
        boundary: batch_size            # or seq_len: the largest that runs, of each cell
        step: 1
        sweep: {cells: [{model: gpt2, method: lora, seq_len: 512}]}
        predict_with: model
        after: held-out                 # or a list: waits for these, too
"""

from __future__ import annotations

import functools
import graphlib
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from vramprobe import catalog
from vramprobe.errors import SpecError
from vramprobe.records.frozen import FrozenModel
from vramprobe.sweep.boundary import Question
from vramprobe.sweep.definition import Sweep, load_sweep, sweep_of
from vramprobe.sweep.yaml_file import parsed

_NAME = r"[A-Za-z0-9][\w.-]*"
_Names = Annotated[tuple[str, ...], BeforeValidator(lambda given: (given,) if isinstance(given, str) else given)]


class Stage(FrozenModel):
    """One stage: ``fit`` names those whose records are fitted; otherwise ``sweep`` is run, or its boundaries sought."""

    sweep: str | dict[str, Any] | None = None
    fit: _Names = ()
    boundary: Question | None = None
    step: int = Field(1, ge=1)
    predict_with: str | None = None
    after: _Names = ()

    @model_validator(mode="after")
    def _one_kind(self) -> Stage:
        if bool(self.fit) == (self.sweep is not None):
            raise ValueError("give either sweep or fit")
        if self.fit and (self.boundary or self.predict_with):
            raise ValueError("boundary and predict_with belong to a sweep, and this stage is a fit")
        if self.step != 1 and self.boundary is None:
            raise ValueError("step belongs to a boundary")
        return self

    @property
    def needs(self) -> tuple[str, ...]:
        """The stages that must have ended before."""
        return (*self.fit, *self.after, *([self.predict_with] if self.predict_with else []))


class Campaign(FrozenModel):
    """``stages`` by name, in the order of running."""

    path: Path
    name: str = Field(pattern=f"^{_NAME}$")
    description: str = ""
    stages: dict[Annotated[str, Field(pattern=f"^{_NAME}$")], Stage]

    def sweep(self, stage: str, *, device: str, overrides: dict[str, Any]) -> Sweep:
        """The cells of a stage; of a boundary with the count that is sought at its smallest."""
        asked = self.stages[stage]
        if asked.boundary is not None:
            overrides = overrides | {asked.boundary: asked.step}
        if isinstance(asked.sweep, str):
            beside = self.path.parent / asked.sweep
            found = load_sweep(beside if beside.is_file() else asked.sweep, device=device, overrides=overrides)
        else:
            assert asked.sweep is not None
            where = f"{self.path}, stage {stage}"
            found = sweep_of({"name": stage} | asked.sweep, where, device=device, overrides=overrides)
        return replace(found, name=f"{self.name}/{stage}")


def campaign_in(path: str | Path) -> Campaign | None:
    """The campaign that a file holds, or that ships by this name; None for a sweep. Raises SpecError."""
    found = campaign_or_sweep(path)
    return found if isinstance(found, Campaign) else None


def campaign_or_sweep(path: str | Path) -> Campaign | Callable[..., Sweep]:
    """Read a file once, so that it may be a pipe: return its campaign, or the function that gives a device's sweep, as
    :func:`load_sweep` does. Raises SpecError.
    """
    file = catalog.sweep_file(path)
    content = parsed(file)
    if not isinstance(content, dict) or "stages" not in content:
        return functools.partial(sweep_of, content, path)
    try:
        campaign = Campaign.model_validate({"path": file, "name": file.stem} | content)
    except ValidationError as error:
        raise SpecError("; ".join(_complaints(file, error))) from None
    return campaign.model_copy(update={"stages": {name: campaign.stages[name] for name in _in_order(campaign)}})


def _in_order(campaign: Campaign) -> list[str]:
    stages = campaign.stages
    for name, stage in stages.items():
        for needed in stage.needs:
            where = f"{campaign.path}, stage {name}"
            if needed not in stages:
                raise SpecError(f"{where}: no stage {needed!r}; the stages are {', '.join(stages)}")
            if needed == stage.predict_with and not stages[needed].fit:
                raise SpecError(f"{where}: predict_with {needed} is no fit; name a stage with `fit:`")
            if needed in stage.fit and stages[needed].fit:
                raise SpecError(f"{where}: {needed} is a fit and has no records; name stages with `sweep:`")
    try:
        return list(graphlib.TopologicalSorter({name: stage.needs for name, stage in stages.items()}).static_order())
    except graphlib.CycleError as error:
        raise SpecError(f"{campaign.path}: stages wait for each other: {' → '.join(error.args[1])}") from None


def _complaints(path: Path, error: ValidationError) -> Iterator[str]:
    for one in error.errors():
        place = [str(part) for part in one["loc"] if not re.search(r"[\[(\]]", str(part))]
        where = f"{path}, {' → '.join(place)}" if place else str(path)
        yield f"{where}: {one['msg'].removeprefix('Value error, ')}"
