"""Notes of a profile: why a command failed, the limits of NVIDIA's libraries on an emulated GPU, dropped images.

In: a command's last lines, the events of a machine (emulate/machine.py), what was replaced. Out: a line each with what
it means or what to do; nothing where nothing is to be said. Never guesses a size.
"""

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vramprobe.catalog.shipped import data_file
from vramprobe.emulate.machine import MachineEvent

_REASONS = tomllib.loads(data_file("failures.toml").read_text(encoding="utf-8"))["reason"]
_NAMES = {"libcudnn": "cuDNN", "libcufft": "cuFFT", "libcusolver": "cuSOLVER", "libcusparse": "cuSPARSE"}
_NAMES |= {"libcusparseLt": "cuSPARSELt"}
_ENDED = "unknown_function"  # of a function without a status: the process was ended
_ASSUMED = "assumed_workspace"  # of a size that follows a rule learnt on another card
_COUNTED = re.compile(r"([\d,]+) for (.+ pixels), counted by")


def why_not(lines: Sequence[str]) -> str | None:
    """The first reason that the lines show."""
    for row in _REASONS:
        match = next(filter(None, (re.search(row["pattern"], line) for line in lines)), None)
        if match and (not row["others"] or any(word in line for word in row["others"] for line in lines)):
            return row["text"].format(*match.groups())
    return None


def not_served(library: str) -> str:
    """A library that links CUDA's runtime statically, whose handshake an emulated driver does not have."""
    said = f"{library} has CUDA's runtime in it, which an emulated GPU cannot serve: its kernels do not run"
    if library.startswith("libcute_dsl"):
        said += " (CuTe DSL; vLLM's linear attention, as Qwen3.5's, is without it by --gdn-prefill-backend triton)"
    return said


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


def unread_images(replaced: Iterable[Mapping[str, Any]], tokens: int | None, samples: int | None) -> list[str]:
    """Say that a sample has fewer tokens than the image of its row; nothing where either number is unknown."""
    replaced = list(replaced)
    counts = [_COUNTED.match(str(one.get("by"))) for one in replaced if one.get("kind") == "image tokens"]
    has_images = any(one.get("kind") == "dataset" and "; one image of" in str(one.get("by")) for one in replaced)
    if not has_images or not tokens or not samples or not counts or counts[0] is None:
        return []
    of_image, of_sample = int(counts[0][1].replace(",", "")), tokens // samples
    if of_sample >= of_image:
        return []
    return [
        f"the images did not reach the model: a sample has {of_sample:,} tokens, an image of {counts[0][2]} alone "
        f"{of_image:,}; the program reads its rows in another form than the replaced ones have, so give it a file of "
        "your own rows, with any pictures"
    ]
