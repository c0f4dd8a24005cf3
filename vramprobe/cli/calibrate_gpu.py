"""``vramprobe calibrate-gpu``: 20 cells on the GPU that is here and on its emulation, a page, a file to contribute.

In: nothing but the GPU. Out: records of both sides, truth.md, contribution.jsonl, and what they come to. Goes on where
it was interrupted; a step that cannot be done is named and keeps nothing else from being done.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from vramprobe.cli.emulate import say
from vramprobe.cli.options import Emulate, Json, print_json
from vramprobe.errors import SpecError, VramprobeError, require_extra
from vramprobe.sweep.signals import exit_on_signal

#: Of the minutes, so much for the GPU; the emulation and the page have the rest.
_SHARE_OF_THE_GPU = 0.6


def calibrate_gpu(
    sweep: Annotated[str, typer.Argument(help="The cells: a sweep file, or the name of one that ships.")] = (
        "calibrate-gpu"
    ),
    out: Annotated[Path, typer.Option("--out", "-o", help="Results folder; the same one resumes.")] = Path(
        "out/calibrate-gpu"
    ),
    minutes: Annotated[float, typer.Option(help="Time for all of it; run it again to go on.")] = 15.0,
    doctor: Annotated[bool, typer.Option("--doctor/--no-doctor", help="Check this machine first.")] = True,
    emulate: Emulate = None,
    json_output: Json = False,
) -> None:
    """Show how true the emulation is on this GPU: 20 cells measured and emulated, a page, a file to contribute."""
    from vramprobe import api

    if not 1 <= minutes <= 24 * 60:
        raise SpecError(f"--minutes {minutes:g} given; allowed: 1 to 1440")
    require_extra("report", "the table of this GPU")
    began = time.monotonic()
    here = ["--emulate", emulate] if emulate is not None else ["--device", "cuda"]
    if doctor and _vramprobe("doctor", *here) != 0:
        raise typer.Exit(1)
    seconds = _SHARE_OF_THE_GPU * 60 * minutes
    say(f"measuring on the GPU, for at most {seconds / 60:.0f} min")
    status = _vramprobe("run", sweep, *here, "--out", str(out / "measured"), "--max-time", f"{seconds:.0f}s")
    notes = [] if status <= 1 else [f"measuring ended with status {status}; run the same command again to go on"]
    if status <= 1:
        status, said = _emulate(sweep, out, max(60 * minutes - (time.monotonic() - began), 60.0))
        notes += said
    found = api.card_truth(out)
    contribution = None
    try:
        contribution = _contribution(out)
    except VramprobeError as error:
        notes.append(f"nothing to contribute: {error}")
    if json_output:
        files = [str(path) for path in found.files]
        said = {"lines": found.lines, "files": files, "contribution": contribution and str(contribution)}
        print_json(said | {"notes": notes})
    else:
        _print(found.lines, [*found.files[:1], *([contribution] if contribution else [])], notes)
    raise typer.Exit(status if status > 1 else int(contribution is None))


def _vramprobe(*words: str) -> int:
    """The exit status of this command line in a process of its own; it ends by itself where a signal ends this one."""
    process = subprocess.Popen([sys.executable, "-m", "vramprobe", *words], stdout=sys.stderr, env=_environment())
    try:
        return process.wait()
    except SystemExit as stop:  # a signal: what the sweep was running is recorded, and the page shows what there is
        exit_on_signal.answered()
        process.terminate()
        process.wait()
        return stop.code if isinstance(stop.code, int) else 1


def _environment() -> dict[str, str]:
    """This one's, in which the same package is found."""
    from vramprobe.measure.launcher import worker_environment

    return dict(os.environ) | {"PYTHONPATH": worker_environment()["PYTHONPATH"]}


def _emulate(sweep: str, out: Path, seconds: float) -> tuple[int, list[str]]:
    """Run the same cells on the emulated GPU: its status, and why not, where that cannot be."""
    from vramprobe import api

    gpu = api.card_truth_gpu(out)
    if gpu is None:
        return 1, ["no emulation: no cell was measured on a GPU that the catalog knows (`vramprobe gpus`)"]
    say(f"emulating {gpu}, for at most {seconds / 60:.0f} min")
    folder = out / "emulated"
    words = ("--emulate", gpu, "--out", str(folder), "--max-time", f"{seconds:.0f}s")
    status = _vramprobe("run", sweep, *words)
    if not (folder / "records.jsonl").exists():
        return status, ["no emulation (above): run `vramprobe emulate setup`, then this command again"]
    return status, [f"emulating ended with status {status}; run the same command again"] if status > 1 else []


def _contribution(out: Path) -> Path:
    """The file to send, anew from all that was measured."""
    from vramprobe import api

    file = out / "contribution.jsonl"
    file.unlink(missing_ok=True)
    return api.contribute(out / "measured", file).file


def _print(lines: list[str], files: list[Path], notes: list[str]) -> None:
    for line in lines:
        print(line)
    for note in notes:
        print(f"note: {note}")
    for file in files:
        print(f"→ {file}")
