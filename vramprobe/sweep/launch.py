"""Launch: a sweep on rented GPUs, as tasks of SkyPilot, one per GPU: set up, doctor as a gate, run, a bucket.

In: a plan per GPU, a bucket, terms, a budget. Out: the text of each task's YAML and the command that starts it as a
managed job, which SkyPilot starts again after a preemption and takes down at the end. Rents nothing by itself.
"""

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from vramprobe import catalog
from vramprobe.errors import SpecError
from vramprobe.recommend.prices import skypilot_gpu
from vramprobe.sweep.jobs import job_of
from vramprobe.sweep.plan import Plan, plan_sweep
from vramprobe.sweep.resume import Journal

#: A machine without work is taken down after so long.
_IDLE_MINUTES = 10
#: Where the bucket is seen; writes are cached on the disk and uploaded by SkyPilot, the running journal included.
MOUNTED = "/vramprobe-results"
#: What was launched from a folder, for status and collect.
PLANNED = "launch.json"
_BUCKET = re.compile(r"(s3|gs|r2|azure|cos|oci)://[\w./-]+|[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Launched:
    """A task for SkyPilot, of a sweep or a command; ``name`` is the job's, and that of its file without .yaml."""

    gpu: str
    name: str
    text: str

    def as_planned(self) -> dict[str, Any]:
        """Facts of the plan as JSON, which status and collect read again."""
        raise NotImplementedError


@dataclass(frozen=True)
class Task(Launched):
    """One GPU's part of a sweep: its plan, and the dollars that it may use (null: no limit)."""

    plan: Plan
    budget: float | None

    def as_planned(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "gpu": self.gpu,
            "num_gpus": 1,
            "planned_seconds": round(self.plan.seconds, 1),
            "planned_dollars": self.plan.dollars and round(self.plan.dollars, 4),
            "usd_per_hour": self.plan.rate and self.plan.rate.usd_per_hour,
        }


def launch_tasks(
    path: str | Path,
    gpus: Sequence[str],
    *,
    bucket: str,
    out: str | Path,
    spot: bool = False,
    provider: str | None = None,
    budget: float | None = None,
    usd_per_hour: float | None = None,
) -> tuple[list[Task], list[Path]]:
    """Write a SkyPilot task for each of ``gpus`` to the folder ``out``: (tasks, their files); nothing is rented.

    ``budget``: dollars for all of them, shared in proportion to their plans. Raises SpecError or UnknownName for a
    bucket that cannot be, a GPU that SkyPilot has no name for, or a budget without prices.
    """
    sweep = sent(path)
    plans = {gpu: _planned(path, gpu, Path(out) / "records", usd_per_hour) for gpu in gpus}
    require_bucket(bucket)
    budgets = _shares(plans, budget)
    terms = {"bucket": bucket, "spot": spot, "provider": provider}
    found = [_task(gpu, plan, sweep, budgets[gpu], terms) for gpu, plan in plans.items()]
    return found, write(found, Path(out), bucket)


def _planned(path: str | Path, gpu: str, folder: Path, usd_per_hour: float | None) -> Plan:
    """Plan the sweep on one such GPU, as if nothing had run before."""
    job = job_of(path, out=folder, gpu=gpu, usd_per_hour=usd_per_hour)
    journal, words = Journal(folder), {"fit": job.fit, "rate": job.rate}
    return plan_sweep(job.sweep, journal, card=job.card, context_of=lambda spec: None, **words)


def require_bucket(bucket: str) -> None:
    """Raise SpecError for what is no bucket."""
    if not _BUCKET.fullmatch(bucket):
        raise SpecError(f"bucket {bucket!r} given; write its name, or s3://NAME, gs://NAME, r2://NAME, azure://NAME")


def skypilot_names(gpu: str) -> list[str]:
    """SkyPilot's names of a GPU of the catalog: clouds write some in two ways, and each must lead back to this GPU."""
    short = catalog.find_gpu(gpu).short_name
    tried = (short, short.removesuffix("-SXM"), short.removesuffix("-40GB-SXM"), short.replace("RTX-", "RTX", 1))
    found = [one for one in dict.fromkeys(tried) if skypilot_gpu(one) == short]
    if not found:
        raise SpecError(f"SkyPilot has no name for {gpu} that is known here; rent it elsewhere and use `vramprobe run`")
    return found


def command(file: Path) -> list[str]:
    """Build the command that starts the task as a managed job."""
    return ["sky", "jobs", "launch", "--yes", "--detach-run", str(file)]


def _shares(plans: dict[str, Plan], budget: float | None) -> dict[str, float | None]:
    if budget is None:
        return dict.fromkeys(plans)
    if not budget > 0:
        raise SpecError(f"a budget must be more than 0 dollars, {budget} given")
    costs = {gpu: dollars for gpu, plan in plans.items() if (dollars := plan.dollars) is not None}
    if unknown := [gpu for gpu in plans if gpu not in costs]:
        raise SpecError(f"a budget needs prices, and none of {', '.join(unknown)} is known; give --price")
    total = sum(costs.values())
    return {gpu: round(budget * dollars / total, 2) if total else budget for gpu, dollars in costs.items()}


def _task(gpu: str, plan: Plan, sweep: str, budget: float | None, terms: dict[str, Any]) -> Task:
    """The task of one GPU; ``terms`` are :func:`machine`'s."""
    short, what = catalog.find_gpu(gpu).short_name, Path(sweep).stem
    name, out = job_name(what, short), f"{MOUNTED}/{short.lower()}/{what}"
    run = ["vramprobe", "run", sweep, "--device", "cuda", "--out", out]
    if budget is not None:
        assert plan.rate is not None
        run += ["--budget", f"{budget:.2f}", "--price", f"{plan.rate.usd_per_hour:g}"]
    content = {
        **machine(name, gpu, 1, **terms),
        **_code(),
        "run": "\n".join(["set -e", "vramprobe doctor --device cuda", shlex.join(run), ""]),
    }
    return Task(gpu, name, yaml.safe_dump(content, sort_keys=False), plan, budget)


def job_name(what: str, short: str) -> str:
    """SkyPilot's name of a job: of small letters, digits and dashes."""
    return re.sub(r"[^a-z0-9-]+", "-", f"vramprobe-{what}-{short}".lower())


def machine(name: str, gpu: str, num_gpus: int, *, bucket: str, spot: bool, provider: str | None) -> dict[str, Any]:
    """The part of a task that says what is rented, and where its results go."""
    resources = {
        "accelerators": dict.fromkeys(skypilot_names(gpu), num_gpus),
        "use_spot": spot,
        "autostop": {"idle_minutes": _IDLE_MINUTES, "down": True},
    }
    return {
        "name": name,
        "resources": resources | ({"infra": provider.lower()} if provider else {}),
        "file_mounts": {MOUNTED: {"source" if "://" in bucket else "name": bucket, "mode": "MOUNT_CACHED"}},
    }


def _code() -> dict[str, str]:
    """Return the task's lines that install this code on the machine: a checkout is sent, a release is installed."""
    root = _PACKAGE.parent
    if (root / "pyproject.toml").exists():
        return {"workdir": str(root), "setup": "pip install -e '.[measure]'\n"}
    from vramprobe import __version__

    return {"setup": f"pip install 'vramprobe[measure]=={__version__}'\n"}


def code_elsewhere() -> tuple[dict[str, str], str]:
    """Return (file mounts, setup lines) that install this code beside the user's own folder, which is sent too."""
    root = _PACKAGE.parent
    if (root / "pyproject.toml").exists():
        return {"~/.vramprobe/code": str(root)}, "pip install ~/.vramprobe/code\n"
    return {}, _code()["setup"].replace("[measure]", "")


def sent(sweep: str | Path) -> str:
    """The sweep as the machine finds it: by its name, or by its path in the checkout that is sent.

    Raises SpecError for a file outside of it.
    """
    if isinstance(sweep, str) and sweep.lower() in catalog.list_sweeps():
        return sweep.lower()
    path, root = Path(sweep).resolve(), _PACKAGE.parent
    if not (root / "pyproject.toml").exists() or not path.is_relative_to(root):
        raise SpecError(f"{sweep} is not sent to the machine: put it into the checkout, or use a sweep that ships")
    return str(path.relative_to(root))


def write(found: Sequence[Launched], folder: Path, bucket: str) -> list[Path]:
    """Write each task's file, and what was planned."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / PLANNED
    before = json.loads(file.read_text()) if file.exists() else {"bucket": bucket, "tasks": []}
    if before["bucket"] != bucket:
        raise SpecError(f"{folder} has a launch into {before['bucket']}; name another folder with --out")
    planned = {one["name"]: one for one in (*before["tasks"], *(task.as_planned() for task in found))}
    for task in found:
        (folder / f"{task.name}.yaml").write_text(task.text)
    file.write_text(json.dumps({"bucket": bucket, "tasks": list(planned.values())}, indent=1) + "\n")
    return [folder / f"{task.name}.yaml" for task in found]
