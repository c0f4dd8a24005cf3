"""Training frameworks, unmodified, on an emulated GPU: ``python benchmarks/frameworks/frameworks.py``.

Each command of runs/runs.toml runs in an environment of its own (runs/NAME.txt, made by uv without any
package of NVIDIA's), on empty checkpoints and rows of text that are all alike: once under the hook of ``vramprobe
profile``, which ends it after three steps that repeat, and once without it, to its own end. Peaks are what torch's
allocator reports, the highest over all phases, of the rank that has the most; they are *emulated*, and none was
compared with a real card here. ``equal``: whether allocated and reserved peaks of every rank are the same bytes with
the hook and without it; where three steps were not enough for that, ``whole`` says that both went to their own end. A
framework that clears gradients by itself (DeepSpeed, Unsloth) has no phase zero_grad. Rows that the table has are kept;
``--only NAME`` runs these anew.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.frameworks import stacks
from benchmarks.tables import as_csv, as_table, read_csv, write_or_check
from vramprobe.catalog.own import cache_folder
from vramprobe.emulate.enter import entrance_for_command
from vramprobe.profile import launch
from vramprobe.profile.interpreter import interpreter_of

HERE = Path(__file__).resolve().parent
FILES, TABLE = HERE / "runs", HERE / "frameworks.csv"
ROOT = HERE.parents[1]
CONFIGS = ROOT / "vramprobe" / "data" / "models"
CONFIG_FOLDERS = (CONFIGS, CONFIGS.with_name("profiled"), FILES)
OUT = ROOT / "out" / "frameworks"
STEPS, LIMIT_SECONDS = 3, 900
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One entry of runs.toml. ``before``: what its users run first. ``remark``: what a reader should know. ``sources``:
    OWNER/NAME@TAG:PATH of files that the command reads: an example's script as its repository has it."""

    name: str
    package: str
    environment: str
    cards: str
    models: tuple[str, ...]
    command: str
    before: str = ""
    remark: str = ""
    sources: tuple[str, ...] = ()


def runs() -> list[Run]:
    """Return the runs, in order."""
    lists = ("models", "sources")
    return [Run(**entry | {key: tuple(entry.get(key, ())) for key in lists}) for entry in _read_runs()["run"]]


def _read_runs() -> dict[str, list[Row]]:
    return tomllib.loads((FILES / "runs.toml").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME", action="append", help="run these anew")
    parser.add_argument("--environments", metavar="FOLDER", type=Path, default=cache_folder() / "frameworks")
    parser.add_argument("--uv", default="uv", help="uv's command, for environments that are not there yet")
    parser.add_argument(
        "--clones", metavar="FOLDER", type=Path, help="of git clones, OWNER+NAME each, that examples' scripts come from"
    )
    parser.add_argument("--check", action="store_true", help="say whether the page is what the CSV says")
    parser.add_argument("--start", nargs=3, metavar=("NAME", "hooked|whole|plain", "FOLDER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    every = {run.name: run for run in runs()}
    if given.start:
        name, way, folder = given.start
        if way == "plain":
            return _start_plain(every[name], Path(folder))
        return _start_hooked(every[name], Path(folder), STEPS if way == "hooked" else None)
    found = read_csv(TABLE)
    if given.check:
        write_or_check({TABLE.with_suffix(".md"): page(found)}, "frameworks/frameworks.py", check=True)
    for run in every.values():
        if run.name not in given.only if given.only else any(row["name"] == run.name for row in found):
            continue
        row = measure(run, given.environments, given.uv, given.clones)
        _say(f"{run.name}: {row['allocated_peak_bytes']} {row['missing'] or 'nothing is missing'}")
        found = [*(kept for kept in read_csv(TABLE) if kept["name"] != run.name), row]
        _write(sorted(found, key=lambda row: list(every).index(row["name"])))


def measure(run: Run, environments: Path, uv: str, clones: Path | None) -> Row:
    """Both runs of one command; what was seen, and what is missing."""
    python = environment_of(run.environment, environments, uv)
    work = OUT / "work" / run.environment  # transformers 4 does not read a tokenizer that 5 has saved
    _prepare(run, work, python, clones)
    started = time.monotonic()
    hooked = _started(run, "hooked", work, python)
    seconds = time.monotonic() - started
    plain = _started(run, "plain", work, python)
    peaks, equal = hooked.get("peaks", []), ""
    if peaks and plain.get("exit_status") == 0:
        equal = "yes" if peaks == plain["peaks"] else _equal_as_a_whole(run, plain["peaks"], work, python)
    missing = [hooked.get("missing", ""), plain.get("missing", "")]
    packages = stacks.pins_of(FILES / f"{run.environment}.txt")
    return {
        "name": run.name,
        "framework": run.package,
        "version": packages[run.package],
        "torch": packages["torch"],
        "card": run.cards,
        "ranks": len(peaks),
        "allocated_peak_bytes": max((peak[0] for peak in peaks), default=""),
        "reserved_peak_bytes": max((peak[1] for peak in peaks), default=""),
        "steps": hooked.get("steps", ""),
        "seconds": round(seconds),
        "stopped": hooked.get("stopped", ""),
        "equal": equal,
        "phases": hooked.get("phases", ""),
        "missing": "; ".join(filter(None, missing)),
        "remark": "; ".join(filter(None, [run.remark, hooked.get("remark", "")])),
        "command": run.command,
    }


def _equal_as_a_whole(run: Run, peaks: list[list[int]], work: Path, python: Path) -> str:
    """Compare the peaks with those of the hook to the command's own end, which three steps have not reached."""
    whole = _started(run, "whole", work, python).get("peaks", [])
    return "whole" if whole == peaks else f"no: {whole} with the hook to the end, {peaks} without"


def environment_of(name: str, environments: Path, uv: str) -> Path:
    """The interpreter of an environment with exactly these pins; made where it is not there."""
    return stacks.environment(environments / name, stacks.pins_of(FILES / f"{name}.txt"), uv=uv)


def _prepare(run: Run, work: Path, python: Path, clones: Path | None) -> None:
    """The folder that the command is typed in."""
    work.mkdir(parents=True, exist_ok=True)
    for path in FILES.iterdir():
        if path.suffix in (".py", ".yaml", ".json"):
            shutil.copy(path, work)
    for source in run.sources:
        _copy_source(source, work, clones)
    prepare = [str(python), str(FILES / "prepare.py")]
    commands = [] if (work / "data" / "vision").is_dir() else [[*prepare, "data", "data"]]
    for model in run.models:
        if not any((work / model).glob("tokenizer*")):
            one_file = ["one-file"] if "1B" in model else []  # as torchtune's own configuration names it
            found = next(one for one in CONFIG_FOLDERS if (one / f"{model.lower()}.json").is_file())
            commands.append([*prepare, str(found / f"{model.lower()}.json"), model, *one_file])
    if run.before:
        commands.append(shlex.split(run.before))
    if commands:
        run_on_cards(commands, work, python, run.cards)


def _copy_source(source: str, work: Path, clones: Path | None) -> None:
    """OWNER/NAME@TAG:PATH from its clone: a file under its own name, a folder (PATH/) under its path."""
    repository, tag, path = re.fullmatch(r"(.+)@(.+):(.+)", source).groups()
    if clones is None:
        sys.exit(f"{source}: give --clones FOLDER, which has a clone of it as {repository.replace('/', '+')}")
    git = ["git", "-C", clones / repository.replace("/", "+")]
    if not path.endswith("/"):
        shown = subprocess.run([*git, "show", f"{tag}:{path}"], check=True, stdout=subprocess.PIPE)
        (work / Path(path).name).write_bytes(shown.stdout)
        return
    shutil.rmtree(work / path, ignore_errors=True)
    packed = subprocess.run([*git, "archive", tag, path], check=True, stdout=subprocess.PIPE)
    subprocess.run(["tar", "-x", "-C", work], check=True, input=packed.stdout)


def run_on_cards(commands: Sequence[Sequence[str]], work: Path, python: Path, cards: str) -> None:
    """Commands of an environment, whose torch does not load without a driver, one after the other, in ``work``."""
    way = entrance_for_command(python, cards, say=_say)
    try:
        for command in commands:
            subprocess.run(
                [python.parent / command[0], *command[1:]],
                cwd=work,
                check=True,
                env=way.environment | plain_environment(python),
            )
    finally:
        shutil.rmtree(way.machine, ignore_errors=True)


def plain_environment(python: Path) -> dict[str, str]:
    """As in a shell in which the environment was activated, without the network."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return kept | {
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        "VIRTUAL_ENV": str(python.parent.parent),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "DO_NOT_TRACK": "1",
        "AXOLOTL_DO_NOT_TRACK": "1",
        "UNSLOTH_DISABLE_STATISTICS": "1",
    }


def _started(run: Run, way: str, work: Path, python: Path) -> Row:
    """One of the two runs, in a process of its own in that folder; what it says of itself."""
    folder = OUT / "runs" / f"{run.name}-{way}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.rmtree(work / "out", ignore_errors=True)
    environment = plain_environment(python)  # every start compiles anew, which leaves more reserved than a cache does
    environment |= {f"{name}_CACHE_DIR": str(folder / name.lower()) for name in ("TORCHINDUCTOR", "TRITON")}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(ROOT), str(Path(__file__).resolve()), run.name, way, str(folder)],
            cwd=work,
            env=environment,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            process.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            for number in (signal.SIGINT, signal.SIGINT, signal.SIGKILL):
                os.killpg(process.pid, number)
                time.sleep(10)
            process.wait()
    result = folder / "result.json"
    if not result.is_file():
        return {"missing": f"{way}: no end in {LIMIT_SECONDS} s, or none at all"}
    return json.loads(result.read_text())


# vramprobe by sys.path rather than PYTHONPATH: the command's processes must not find it.
_CHILD = """
import runpy, sys
home, path, *words = sys.argv[1:]
sys.path.insert(0, home)
sys.argv = [path, "--start", *words]
runpy.run_path(path, run_name="__main__")
"""


def _start_hooked(run: Run, folder: Path, steps: int | None) -> None:
    """Under the hook, to so many steps that repeat, or to the command's own end."""
    raw = folder / "raw"
    raw.mkdir()
    options = launch.Options(trace="all", steps=steps)
    ended = launch.run(shlex.split(run.command), raw, options, emulate=run.cards, say=_say)
    seen = [[json.loads(line) for line in path.read_text().splitlines()] for path in sorted(raw.glob("*.jsonl"))]
    for path in raw.glob("*.history"):
        path.unlink()
    trained = [one for one in seen if any(line["line"] == "phase" for line in one)]
    phases = [[line for line in one if line["line"] == "phase"] for one in trained]
    steps = [sum(line["line"] == "step" for line in one) for one in trained]
    wrong = [
        f"exit status {ended.exit_status}" if ended.exit_status else "",
        f"{ended.num_left} processes left" if ended.num_left else "",
        "" if ended.stopped else "it was not stopped",
        *{f"out of memory in {line['phase']}" for one in trained for line in one if line["line"] == "oom"},
    ]
    result = {
        "exit_status": ended.exit_status,
        "stopped": "yes" if ended.stopped and not ended.exit_status else "no",
        "steps": " ".join(map(str, sorted(set(steps)))),
        "peaks": sorted(
            [max(line[f"{tier}_peak_bytes"] for line in one) for tier in ("allocated", "reserved")] for one in phases
        ),
        "phases": " ".join(dict.fromkeys(line["name"] for one in phases for line in one)),
        "missing": "; ".join(filter(None, wrong)),
        "remark": "; ".join({line["message"] for one in trained for line in one if line["line"] == "warning"}),
    }
    (folder / "result.json").write_text(json.dumps(result))


def _start_plain(run: Run, folder: Path) -> None:
    """On the same card without the hook, to its own end."""
    words = shlex.split(run.command)
    way = entrance_for_command(interpreter_of(words, os.environ), run.cards, say=_say)
    try:
        done = subprocess.run(words, env=way.environment, check=False)
        ranks = [json.loads(path.read_text()) for path in way.machine.glob("values-*.json")]
    finally:
        shutil.rmtree(way.machine, ignore_errors=True)
    highest = ("allocated_highest_bytes", "reserved_highest_bytes")
    peaks = sorted([card[tier] for tier in highest] for one in ranks for card in one["cards"])
    missing = f"without the hook: exit status {done.returncode}" if done.returncode else ""
    result = {"exit_status": done.returncode, "peaks": peaks, "missing": missing}
    (folder / "result.json").write_text(json.dumps(result))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _with_commas(number: str) -> str:
    return f"{int(number):,}" if number else ""


def _write(found: list[Row]) -> None:
    TABLE.write_text(as_csv(found))
    TABLE.with_suffix(".md").write_text(page(read_csv(TABLE)))


def page(found: list[Row]) -> str:
    """The table as a page."""
    lines = [
        "# Training frameworks, unmodified, on an emulated GPU",
        "",
        *(__doc__ or "").split("\n\n", 1)[1].strip().splitlines(),
        "",
    ]
    shown = [
        {"run": row["name"], "framework": f"{row['framework']} {row['version']}"}
        | {name: row[name] for name in ("torch", "card", "ranks")}
        | {f"{tier} peak, bytes": _with_commas(row[f"{tier}_peak_bytes"]) for tier in ("allocated", "reserved")}
        | {name: row[name] for name in ("steps", "seconds", "stopped", "equal", "missing", "remark")}
        for row in found
    ]
    lines += [*as_table(shown, "llllrrrrrllll"), "", "Commands, and the phases that were seen:", ""]
    lines += [f"- {row['name']}: `{row['command']}`: {row['phases'].replace(' ', ', ')}" for row in found]
    lines += ["", "## What does not run, and why", ""]
    lines += [f"- {one['what']}: {one['why']}" for one in _read_runs()["not_run"]]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
