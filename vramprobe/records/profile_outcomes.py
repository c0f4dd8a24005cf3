"""Outcomes of a profiled command: five ways in which it ends.

In: what its processes reported. Out: one frozen class for each kind, which a ProfileRecord holds (profile.py).
"""

from typing import Annotated, Literal

from pydantic import Field

from vramprobe.records.frozen import FrozenModel
from vramprobe.records.profile_memory import Live


class ProfileOk(FrozenModel):
    kind: Literal["ok"] = "ok"
    stopped: bool = False  # by us, after the steps that were asked for


class ProfileOom(FrozenModel):
    """The card ran out, and the command ended by it."""

    kind: Literal["oom"] = "oom"
    rank: int | None = None
    requested_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    free_bytes: int | None = None
    total_bytes: int | None = None
    phase: str | None = None
    step: int | None = None
    line: str | None = None  # that asked for it
    function: str | None = None
    module: str | None = None
    alive: Live | None = None  # then; null without a history
    exit_status: int | None = None
    last_lines: list[str] = []


class ProfileError(FrozenModel):
    """The command ended with an error of its own."""

    kind: Literal["error"] = "error"
    exit_status: int | None = None
    signal: int | None = None
    rank: int | None = None  # whose exception came first, where it has one
    exception: str | None = None  # the first that nobody caught, of all processes: class and message
    line: str | None = None  # that raised it
    function: str | None = None
    last_lines: list[str] = []


class ProfileInterrupted(FrozenModel):
    kind: Literal["interrupted"] = "interrupted"
    signal: int | None = None


class ProfileLost(FrozenModel):
    """Nobody saw how the command ended: vramprobe itself was killed. What was seen until then stands."""

    kind: Literal["lost"] = "lost"
    known: str


ProfileOutcome = Annotated[
    ProfileOk | ProfileOom | ProfileError | ProfileInterrupted | ProfileLost, Field(discriminator="kind")
]
