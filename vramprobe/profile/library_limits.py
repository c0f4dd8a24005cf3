"""Report the emulated driver's notes on NVIDIA's libraries: sizes that it does not know, functions that it does not
have.

In: the events of a machine (emulate/machine.py). Out: lines for the profile. Never guesses a size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vramprobe.emulate.machine import MachineEvent

_NAMES = {"libcudnn": "cuDNN", "libcufft": "cuFFT", "libcusolver": "cuSOLVER", "libcusparse": "cuSPARSE"}
_NAMES |= {"libcusparseLt": "cuSPARSELt"}
_ENDED = "unknown_function"  # of a function without a status: the process was ended
_ASSUMED = "assumed_workspace"  # of a size that follows a rule learnt on another card


def library_remarks(events: Iterable[MachineEvent]) -> dict[str, list[str]]:
    """By kind of event, what it is about: the library of a size that is 0 or assumed, a missing function's sentence."""
    found: dict[str, list[str]] = {"lower_bound": [], _ASSUMED: [], _ENDED: [], "unsupported_function": []}
    for event in events:
        if event.kind in found and event.detail:
            said = event.detail.split(".so")[0] if event.kind in ("lower_bound", _ASSUMED) else event.detail
            found[event.kind] = list(dict.fromkeys([*found[event.kind], said]))
    return found


def library_notes(said: dict[str, Sequence[str]]) -> list[str]:
    """The limits of a run, a line each."""
    notes = list(said.get("unsupported_function", ()))
    if names := [_NAMES.get(library, library) for library in said.get("lower_bound", ())]:
        notes.append(
            f"memory is a lower bound: workspaces of {', '.join(sorted(names))} are counted as 0, "
            "because NVIDIA does not publish their sizes"
        )
    if said.get(_ASSUMED):
        notes.append(
            "workspaces of cuDNN follow what cuDNN 9.19 asked for on an H200; for other cards and versions that is an "
            "assumption"
        )
    return notes


def last_lines_of(tail: Sequence[str], said: dict[str, Sequence[str]]) -> list[str]:
    """The command's last lines without the interpreter's list of modules; the emulator's own sentence is the last."""
    kept = [line for line in tail if not line.startswith("Extension modules:")]
    while kept and not kept[-1].strip():
        kept.pop()
    return kept + [f"vramprobe: {sentence}" for sentence in said.get(_ENDED, ())]
