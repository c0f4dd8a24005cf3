"""Rented: the jobs that `launch` started, as SkyPilot tells, and their results, brought here from the bucket.

In: the folder of a launch, with what was planned. Out: each job beside its plan, in seconds and dollars; the bucket's
files. Starts and ends no machine.
"""

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vramprobe.errors import MissingDependency, SpecError, StoreError, VramprobeError
from vramprobe.sweep.launch import PLANNED

#: What copies a bucket's new files, by its scheme.
_COPY = {"s3": ["aws", "s3", "sync"], "gs": ["gcloud", "storage", "rsync", "--recursive"]}
RECORDS = "records"


@dataclass(frozen=True, kw_only=True)
class Rented:
    """One job. ``dollars``: its time so far at the planned price; ``billed``: SkyPilot's own account, null without one.

    ``status`` is SkyPilot's word, null where it knows no such job.
    """

    name: str
    gpu: str
    status: str | None
    seconds: float | None
    num_recoveries: int
    planned_seconds: float | None
    planned_dollars: float | None
    dollars: float | None
    billed: float | None


def status(folder: str | Path) -> list[Rented]:
    """Each job of a launch as it is now. Raises StoreError without one, MissingDependency without SkyPilot."""
    planned = planned_in(folder)
    jobs = _told(["sky", "jobs", "queue", "--all", "--output", "json"])
    costs = _told(["sky", "cost-report", "--output", "json"])
    return [_rented(task, jobs, costs) for task in planned["tasks"]]


def collect(folder: str | Path) -> Path:
    """Copy what is new in the launch's bucket to ``folder``/records and return that.

    Raises SpecError for a bucket that no known command copies, MissingDependency without that command.
    """
    bucket, into = planned_in(folder)["bucket"], Path(folder) / RECORDS
    scheme = bucket.partition("://")[0] if "://" in bucket else ""
    if scheme not in _COPY:
        raise SpecError(
            f"bucket {bucket}: only s3:// and gs:// are copied; copy it to {into} yourself, and give --no-copy"
        )
    words = [*_COPY[scheme], bucket, str(into)]
    if shutil.which(words[0]) is None:
        raise MissingDependency(f"copying {bucket} needs the command {words[0]}, and there is none here")
    into.mkdir(parents=True, exist_ok=True)
    if (code := subprocess.run(words, stdout=subprocess.DEVNULL).returncode) != 0:
        raise VramprobeError(f"`{' '.join(words)}` ended with {code}; what was copied before stays")
    return into


def planned_in(folder: str | Path) -> dict[str, Any]:
    """Read the facts that `launch` wrote. Raises StoreError where it did not."""
    file = Path(folder) / PLANNED
    try:
        return json.loads(file.read_text())
    except FileNotFoundError:
        raise StoreError(f"no launch was planned in {folder}; name its folder, or run vramprobe launch first") from None
    except (OSError, ValueError) as error:
        raise StoreError(f"{file} cannot be read ({error}); launch again with --dry-run to write it anew") from None


def _told(words: list[str]) -> list[dict[str, Any]]:
    if shutil.which(words[0]) is None:
        raise MissingDependency("the jobs are SkyPilot's: pip install 'vramprobe[cloud]'")
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise VramprobeError(f"`{' '.join(words)}` ended with {done.returncode}: {last}")
    start = done.stdout.find("[")  # SkyPilot may greet before it
    try:
        return json.loads(done.stdout[start:] if start >= 0 else done.stdout)
    except ValueError:
        raise VramprobeError(f"`{' '.join(words)}` printed no JSON: {done.stdout[:100]!r}") from None


def _rented(task: dict[str, Any], jobs: list[dict[str, Any]], costs: list[dict[str, Any]]) -> Rented:
    same = [job for job in jobs if job.get("job_name") == task["name"]]
    latest = max(same, key=lambda job: job.get("job_id") or 0, default={})
    seconds, price = latest.get("job_duration"), task["usd_per_hour"]
    clusters = [one for one in costs if str(one.get("name", "")).startswith(f"{task['name']}-")]
    return Rented(
        name=task["name"],
        gpu=task["gpu"],
        status=latest.get("status"),
        seconds=seconds,
        num_recoveries=latest.get("recovery_count") or 0,
        planned_seconds=task["planned_seconds"],
        planned_dollars=task["planned_dollars"],
        dollars=None if seconds is None or price is None else round(price * seconds / 3600, 4),
        billed=round(sum(one.get("total_cost") or 0.0 for one in clusters), 4) if clusters else None,
    )
