"""Launch of a training command: its first steps are measured on the rented GPU and held to their prediction.

In: a command, the profile that an emulated run of it left, limits. Out: the task for SkyPilot: set up,
profile the first steps, and go on or stop. Rents nothing by itself.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from vramprobe import catalog
from vramprobe.errors import SpecError
from vramprobe.records.profile import ProfileRecord, last_profile
from vramprobe.sweep.card import Rate, card_named, hourly_rate
from vramprobe.sweep.launch import MOUNTED, Launched, code_elsewhere, job_name, machine, require_bucket, write

#: Where the machine finds the prediction.
_PREDICTED = "~/.vramprobe/predicted.jsonl"
#: More than the predicted interval's width on published runs, less than what is worth paying for.
MAX_GROWTH, MAX_SLOWDOWN, STEPS = "5%", 1.5, 10


@dataclass(frozen=True)
class CommandTask(Launched):
    """A command's task, and what is predicted of it: bytes of the fullest GPU, seconds and dollars."""

    num_gpus: int
    predicted_bytes: int
    predicted_step_seconds: float | None
    rate: Rate | None
    steps: int = STEPS

    @property
    def usd_per_1000_steps(self) -> float | None:
        """At the predicted step time; None where that or the price is not known."""
        if self.rate is None or self.predicted_step_seconds is None:
            return None
        return self.rate.dollars(1000 * self.predicted_step_seconds) * self.num_gpus

    def as_planned(self) -> dict[str, Any]:
        """Facts of the plan as JSON, which status and collect read again; the command's duration is not known."""
        return {
            "name": self.name,
            "gpu": self.gpu,
            "num_gpus": self.num_gpus,
            "planned_seconds": None,
            "planned_dollars": None,
            "usd_per_hour": self.rate and self.rate.usd_per_hour * self.num_gpus,
        }


def launch_command(
    command: Sequence[str],
    gpu: str,
    *,
    predicted: str | Path,
    bucket: str,
    out: str | Path,
    steps: int = STEPS,
    max_growth: str = MAX_GROWTH,
    max_slowdown: float = MAX_SLOWDOWN,
    spot: bool = False,
    provider: str | None = None,
    usd_per_hour: float | None = None,
    folder: str | Path = ".",
) -> tuple[CommandTask, Path]:
    """Write the SkyPilot task of a command that is run in ``folder``: (task, its file); nothing is rented.

    ``predicted``: a journal whose last profile is an emulated run of the command on this GPU. Raises SpecError for
    another GPU's, StoreError where there is none.
    """
    require_bucket(bucket)
    record, short = last_profile(Path(predicted)), catalog.find_gpu(gpu).short_name
    _require_of(record, predicted, short)
    peak = record.highest_rank.peak if record.highest_rank else None
    assert peak is not None
    num_gpus = max(len(record.ranks), 1)
    script = next((word for word in command if word.endswith(".py")), command[0])
    name = job_name(Path(script).stem, short)
    step_seconds = record.step_time.seconds if record.step_time else None
    limits = ["--max-growth", max_growth]
    limits += [] if step_seconds is None else ["--max-slowdown", f"{max_slowdown:g}"]
    content = machine(name, short, num_gpus, bucket=bucket, spot=spot, provider=provider)
    mounted, install = code_elsewhere()
    content["file_mounts"] |= {_PREDICTED: str(Path(predicted).resolve())} | mounted
    has_list = (Path(folder) / "requirements.txt").exists()
    content |= {
        "workdir": str(Path(folder).resolve()),
        "setup": "pip install -r requirements.txt\n" * has_list + install,
        "run": _run(command, f"{MOUNTED}/{short.lower()}/{name}", steps, limits),
    }
    task = CommandTask(
        gpu=gpu,
        name=name,
        text=yaml.safe_dump(content, sort_keys=False),
        num_gpus=num_gpus,
        predicted_bytes=peak.allocated_bytes,
        predicted_step_seconds=step_seconds,
        rate=hourly_rate(card_named(gpu), usd_per_hour),
        steps=steps,
    )
    (file,) = write([task], Path(out), bucket)
    return task, file


def _require_of(record: ProfileRecord, predicted: str | Path, short: str) -> None:
    how = f"vramprobe profile --emulate {short} --empty-weights --save FILE -- COMMAND"
    if record.outcome.kind != "ok" or record.highest_rank is None:
        raise SpecError(f"the last profile of {predicted} ended as {record.outcome.kind}; make another: {how}")
    seen = catalog.gpu_seen(record.environment.device_name or "")
    if seen is None or seen.short_name != short:
        said = record.environment.device_said
        raise SpecError(f"the last profile of {predicted} is of {said}, and {short} is to be rented; make one: {how}")


def _run(command: Sequence[str], out: str, steps: int, limits: list[str]) -> str:
    """The lines that measure the first steps and hold them to their prediction, once, before the command runs."""
    words = ["vramprobe", "profile", "--trace", "none", "--steps", str(steps), *limits]
    gate = f"{shlex.join(words)} --baseline {_PREDICTED} --save {out}/measured.jsonl -- {shlex.join(command)}"
    return "\n".join(
        [
            "set -e",
            f"mkdir -p {out}",
            f"if [ ! -f {out}/as-predicted ]; then",
            f"  {gate}",
            f"  touch {out}/as-predicted",
            "fi",
            shlex.join(command),
            "",
        ]
    )
