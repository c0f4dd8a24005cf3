"""One run of a published row on an emulated machine, in the environment of its stack.

In: a Recipe. Out: a journal's entry: ``ok`` with what HF's TrainerMemoryTracker said of rank 0 (the published figure)
and what the allocator of every rank did, ``oom``, ``timeout`` or ``error`` with its last words. Files that are read are
made once and kept; nothing else of a run stays.
"""

import ast
import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.frameworks.stacks import fingerprint, home, python_of
from benchmarks.truth.reproduction.rows import HERE, Recipe, config_of, shard_bytes_of, tokenizer_of
from vramprobe.emulate.enter import Entrance, entrance_for_command
from vramprobe.emulate.machine import read_events
from vramprobe.emulate.version import emulator_version

FILES_FOLDER = "checkpoints"
_Say = Callable[[str], None]


def run(recipe: Recipe, *, uv: str, limit_seconds: float, say: _Say) -> dict[str, Any]:
    """The entry of one attempt."""
    started, packages = time.time(), fingerprint(recipe.stack)
    way = entrance_for_command(python_of(recipe.stack, uv=uv), recipe.cards, say=say)
    try:
        with tempfile.TemporaryDirectory(prefix="vramprobe-row-") as work:
            command = command_of(recipe, way, Path(work))
            status, said = _started(way, command, Path(work), limit_seconds)
        entry = _told(recipe, status, said, way)
    finally:
        shutil.rmtree(way.machine, ignore_errors=True)
    if any(entry.get("rank_num_retries", ())):
        entry["rank_stepped_reserved_bytes"] = reserved_after_steps(recipe, uv=uv, say=say)
    return {
        "line": recipe.line,
        "fingerprint": recipe.fingerprint,
        "stack": recipe.stack,
        "stack_fingerprint": packages,
        "emulator_version": emulator_version(),
        "seconds": round(time.time() - started, 1),
        "ended": round(time.time()),
        **entry,
    }


def profile(recipe: Recipe, *, uv: str, say: _Say) -> str:
    """Run the same command through ``vramprobe profile``; say the command, and each rank's peak or how it was ended."""
    words, record, said = _profiled(recipe, uv=uv, say=say)
    told = f"{shlex.join(['vramprobe', *words])}\n"
    if record is None:
        return told + said
    peaks = [rank["peak"]["allocated_bytes"] for rank in record["ranks"] if rank["peak"]]
    return f"{told}line {recipe.line}: {peaks} bytes allocated"


def reserved_after_steps(recipe: Recipe, *, uv: str, say: _Say) -> list[int]:
    """Return what each rank reserves at a step's end: after a full card has made the allocator give blocks back.

    Raises RuntimeError where the profile fails.
    """
    _, record, said = _profiled(recipe, "--whole", uv=uv, say=say)
    if record is None:
        raise RuntimeError(said)
    ranks = sorted(record["ranks"], key=lambda rank: rank["rank"] or 0)
    phases = [{phase["name"]: phase for phase in rank["phases"]} for rank in ranks if rank["peak"]]
    return [by_name["optimizer_step"]["reserved_bytes"] for by_name in phases]


def _profiled(recipe: Recipe, *options: str, uv: str, say: _Say) -> tuple[list[str], dict[str, Any] | None, str]:
    """-> the command's words, the profile's record (None where there is none), and what was said."""
    python = python_of(recipe.stack, uv=uv)
    way = entrance_for_command(python, recipe.cards, say=say)  # its machine is for making the files only
    try:
        with tempfile.TemporaryDirectory(prefix="vramprobe-row-") as work:
            folder = Path(work)
            command = [str(python), *command_of(recipe, way, folder)]
            environment = environment_of(way, folder)
            added = {key: environment[key] for key in environment.keys() - way.environment.keys()}
            words = ["profile", "--emulate", recipe.cards, "--trace", "none", "--steps-only", *options, "--json"]
            words += ["--", *command]
            searched = os.pathsep.join([str(HERE.parents[2]), str(HERE)])
            done = subprocess.run(
                [sys.executable, "-m", "vramprobe", *words],
                env={**os.environ, **added, "PYTHONPATH": searched},
                capture_output=True,
                text=True,
                cwd=folder,
                check=False,
            )
    finally:
        shutil.rmtree(way.machine, ignore_errors=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{") and '"ranks"' in line]
    record = json.loads(lines[-1]) if lines else None  # some end with status 2 after they have trained
    return words, record, done.stderr[-3000:]


def command_of(recipe: Recipe, way: Entrance, work: Path) -> list[str]:
    """The words after the interpreter, and the files that they name."""
    data, plugins = work / "data.json", work / "acceleration.yaml"
    _prepare(way, "data", recipe.num_data_rows, data)
    if recipe.plugins:
        plugins.write_text(json.dumps({"plugins": recipe.plugins}))  # YAML is a superset of JSON
    names = {
        "model": model_folder(recipe, way),
        "data": data,
        "out": work / "out",
        "fsdp": HERE / "fsdp1.yaml",
        "port": _free_port(),
    }
    return [word.format(**names) if "{" in word else word for word in recipe.words]


def model_folder(recipe: Recipe, way: Entrance) -> Path:
    """An empty checkpoint and its tokenizer, made once for a stack, as its transformers writes them."""
    shard_bytes = shard_bytes_of(recipe.model)
    given = [config_of(recipe.model), tokenizer_of(recipe.tokenizer), shard_bytes]
    given += [(HERE / name).read_text() for name in ("prepare.py", "checkpoint.py")]
    of_all = hashlib.sha256(json.dumps(given).encode()).hexdigest()[:8]
    folder = home() / FILES_FOLDER / recipe.stack / f"{recipe.model}{'-gptq' if recipe.is_gptq else ''}-{of_all}"
    if not (folder / "tokenizer_config.json").is_file():
        part = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        (part / "given.json").write_text(json.dumps(config_of(recipe.model)))
        (part / "given-tokenizer.json").write_text(json.dumps(tokenizer_of(recipe.tokenizer)))
        gptq = ["gptq"] if recipe.is_gptq else []
        _prepare(way, "model", part / "given.json", part / "given-tokenizer.json", part, shard_bytes, *gptq)
        shutil.rmtree(folder, ignore_errors=True)
        part.replace(folder)
    return folder


def _prepare(way: Entrance, *words: object) -> None:
    command = [way.python, HERE / "prepare.py", *map(str, words)]
    done = subprocess.run(command, env=way.environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.stderr[-2000:]}")


def _started(way: Entrance, command: list[str], work: Path, limit_seconds: float) -> tuple[int | None, str]:
    """-> its exit status (None: it did not end in time), and what it said."""
    environment = environment_of(way, work)
    with (work / "said").open("wb") as said:
        process = subprocess.Popen(
            [way.python, *command],
            env=environment,
            stdout=said,
            stderr=said,
            stdin=subprocess.DEVNULL,
            cwd=work,
            start_new_session=True,
        )
        try:
            status = process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return status, (work / "said").read_text(errors="replace")


def environment_of(way: Entrance, work: Path) -> dict[str, str]:
    """Return what the source's process had, on this machine: no network, and a flash-attn to import."""
    environment = way.environment | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    environment |= {"HF_HOME": str(work / "hf")}
    environment |= {"PYTHONPATH": f"{way.environment['PYTHONPATH']}{os.pathsep}{HERE}"}  # flash_attn
    plugins = work / "acceleration.yaml"
    return environment | ({"ACCELERATION_FRAMEWORK_CONFIG_FILE": str(plugins)} if plugins.is_file() else {})


def _told(recipe: Recipe, status: int | None, said: str, way: Entrance) -> dict[str, Any]:
    """The entry's own part."""
    metrics = metrics_in(said)
    # fms-hf-tuning of 2024 may end with status 2 after it has trained: its own parser
    if status is not None and metrics is not None:
        ranks = sorted(_ranks(way.machine), key=lambda one: int(one["rank"] or 0))
        cards = [card for one in ranks for card in one["cards"]]
        steering = sorted({read["line"] for one in ranks for read in one["reads"] if read["could_have_steered"]})
        peak, settled = published_figures(metrics)
        return {
            "outcome": "ok",
            "peak_bytes": peak,
            "settled_bytes": settled,
            "rank_peak_bytes": [card["allocated_peak_bytes"] for card in cards],
            "rank_reserved_bytes": [card["reserved_peak_bytes"] for card in cards],
            "rank_num_retries": [card["num_retries"] for card in cards],
            "is_busy": True,  # the host runs ahead of a card that trains; False: by an earlier emulator, done at once
            "num_steering_reads": max((one["num_reads_that_could_have_steered"] for one in ranks), default=0),
            "steering_lines": steering,
        }
    events = [f"{event.kind} {event.name} {event.detail}" for event in read_events(way.machine)]
    words = "\n".join([*errors_in(said), "...", said[-2000:], *events])
    words = words.replace(f"{home()}{os.sep}", "")  # the journal is published: no machine's paths
    kind = "timeout" if status is None else "oom" if "OutOfMemoryError" in said else "error"
    return {"outcome": kind, "exit_status": status, "said": words}


def errors_in(said: str, num_chars: int = 4000) -> list[str]:
    """The end of each traceback with its error, a rank's before the launcher's."""
    found = re.findall(r"Traceback \(most recent call last\):\n(?:.*\n)*?(?=\S).*", said)
    return [one[-num_chars:] for one in found[:3]]


def metrics_in(said: str) -> dict[str, Any] | None:
    """The last dictionary that Trainer printed with the memory of its training."""
    found = None
    for line in said.replace("\r", "\n").splitlines():
        at = line.find("{'train_runtime'")
        if at >= 0 and "train_mem_gpu_peaked_delta" in line:
            found = ast.literal_eval(line[at : line.rindex("}") + 1])
    return found


def published_figures(metrics: dict[str, Any]) -> tuple[int, int]:
    """(peak, settled): the highest of TrainerMemoryTracker's running sums over its stages, as benchmark.py has them."""
    allocated, peaks, sums = 0, [], []
    for stage in ("before_init_mem_gpu", "init_mem_gpu", "train_mem_gpu"):
        allocated += metrics.get(f"{stage}_alloc_delta", metrics.get(stage, 0))
        sums.append(allocated)
        peaks.append(allocated + metrics.get(f"{stage}_peaked_delta", 0))
    return max(peaks), max(sums)


def _ranks(machine: Path) -> list[dict[str, Any]]:
    """Read what the processes that used a card left (emulate/values/hook.py)."""
    found = [json.loads(path.read_text()) for path in machine.glob("values-*.json")]
    return [one for one in found if one["cards"]]


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
