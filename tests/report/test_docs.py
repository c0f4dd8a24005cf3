"""README.md, docs/ and benchmarks/: every command and example runs, every link, path and option is there.

A command stands in a generated block, or in HOW with the way it is run here. A page that names a new one makes a test
fail until somebody says how it is run.
"""

import ast
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
from command_line import vramprobe, within
from factories import specs, synthetic
from grids import exhaustive, grid
from test_imports import FLOORS
from typer.main import get_command

from tools import readme
from vramprobe import api
from vramprobe.cli import verbs
from vramprobe.cli.options import ANSWERED
from vramprobe.model.card_fit import save_fit
from vramprobe.predict.expected import fit_records
from vramprobe.sweep.campaign import campaign_in

ROOT = Path(__file__).parents[2]
#: What `make` sets an environment up from.
SETUP = ("Makefile", "pyproject.toml", "setup.py", "constraints.txt")
VERBS = get_command(verbs.app).commands

PAGES = readme.pages()
_FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_COMMENT = re.compile(r"\s{2,}#.*$")


@dataclass(frozen=True)
class Way:
    """Way in which a command is run here; ``why`` it is not run word for word, where it is not."""

    instead: str | None = None  # the command that is run in its place
    more: str = ""  # words that are added
    loaded: bool = False  # a benchmark's module is loaded, so that all it stands on is there, and not started
    elsewhere: str | None = None  # the test file that runs it
    why: str = ""


AS_IT_IS = Way()
HELD_OUT = "--model smollm2-360m --method qlora --batch-size 2 --seq-len 2048"
HOURS = Way(loaded=True, why="it measures for minutes and asserts nothing")
HOW = {
    # The folder out/demo of the workshop holds records that seem measured on a GPU.
    "vramprobe run configs/sweeps/calibrate-gpu.yaml --out out/demo": Way(
        more="--dry-run --device cpu", why="no GPU is here"
    ),
    "vramprobe fit out/demo --out out/demo/fit.json": AS_IT_IS,
    f"vramprobe predict {HELD_OUT} --fit out/demo/fit.json": AS_IT_IS,
    "vramprobe report out/demo --fit out/demo/fit.json --out out/demo/report": AS_IT_IS,
    "make docs": Way(elsewhere="tests/report/test_site.py", why="it takes some seconds"),
    "vramprobe profile --emulate RTX-4090 --empty-weights -- python train.py": Way(
        elsewhere="tests/profile/test_emulated_run.py", why="it needs a command"
    ),
    "vramprobe recommend --tokens 50M -- python train.py": Way(
        elsewhere="tests/profile/test_recommended.py", why="it needs a command"
    ),
    "vramprobe recipes list": AS_IT_IS,
    "vramprobe recipes export recipes.zip": Way(
        elsewhere="tests/recipe/test_shipped.py", why="the cache of whoever runs this may be empty"
    ),
    "vramprobe recipes merge recipes.zip": Way(
        elsewhere="tests/recipe/test_shipped.py", why="it needs another machine's file"
    ),
    "vramprobe emulate setup": Way(
        elsewhere="tests/emulate/test_build_environment.py", why="it downloads a CUDA build of torch"
    ),
    "vramprobe emulate setup --torch 2.6.0 --package transformers==4.50.3 --package tokenizers==0.21.1 "
    "--package huggingface_hub==0.30.1 --package peft==0.15.1 --package requests --package urllib3 --package certifi "
    "--package charset-normalizer": Way(
        elsewhere="tests/emulate/test_build_environment.py", why="it downloads a CUDA build of torch"
    ),
    "vramprobe profile --emulate RTX-4090 --empty-weights --baseline memory.jsonl --max-growth 2% --summary summary.md "
    "-- python train.py": Way(elsewhere="tests/profile/test_profile_limits.py", why="it needs a command, a baseline"),
    "python benchmarks/truth/operators.py": Way(more="--check", why="it runs for ten minutes on an emulated GPU"),
    "vramprobe predict --model qwen3.5-27b --method qlora --batch-size 1 --seq-len 4096 --gradient-checkpointing "
    "--gpu RTX-4090": Way(elsewhere="tests/recipe/test_recorded.py", why="it records for a minute"),
    "python tools/book.py": Way(elsewhere="tests/recipe/test_shipped.py", why="it records for hours"),
    "python tools/page_parts.py": Way(elsewhere="tests/report/test_page_recipes.py", why="it is about the repository"),
    "python tools/book.py --check": Way(elsewhere="tests/recipe/test_shipped.py", why="it is about the repository"),
    "vramprobe doctor": Way(elsewhere="tests/measure/test_doctor.py", why="half a minute"),
    "vramprobe measure --model smollm2-135m --method lora --batch-size 1 --seq-len 64 --save out/mine.jsonl": Way(
        more="--num-layers 1 --timing-steps 0 --device cpu", why="the whole model takes longer"
    ),
    "vramprobe plan configs/sweeps/80gb.yaml": Way(more="--gpu H100-SXM", why="there may be no GPU here"),
    "vramprobe run configs/sweeps/80gb.yaml --budget 1.60": Way(
        instead="vramprobe run configs/sweeps/quickstart.yaml --budget 1.60 --price 2 --dry-run --device cpu",
        why="it is about a GPU",
    ),
    "vramprobe run configs/sweeps/80gb.yaml": Way(
        instead="vramprobe run configs/sweeps/quickstart.yaml --dry-run --device cpu", why="it is about a GPU"
    ),
    "vramprobe run configs/sweeps/80gb.yaml --on ray": Way(
        elsewhere="tests/sweep/test_on_ray.py", why="a cluster takes minutes"
    ),
    "vramprobe run configs/sweeps/80gb.yaml --on ray://head-node:10001": Way(
        elsewhere="tests/sweep/test_on_ray.py", why="it needs a cluster"
    ),
    "vramprobe plan edges --gpu RTX-4090": Way(elsewhere="tests/sweep/test_campaign.py"),
    "vramprobe run edges --budget 0.50": Way(elsewhere="tests/sweep/test_campaign.py", why="it needs a GPU"),
    "vramprobe launch h200-speed --gpu H100-SXM,A100-80GB-SXM --spot --budget 5 --bucket s3://my-records --dry-run": (
        AS_IT_IS
    ),
    "vramprobe profile --emulate H100-SXM --empty-weights --requests 4x1024x128 "
    "-- vllm serve Qwen/Qwen3-0.6B --max-model-len 8192": Way(
        elsewhere="tests/profile/test_requests.py", why="it needs vLLM"
    ),
    "vramprobe status": Way(elsewhere="tests/sweep/test_launch_command.py", why="it needs SkyPilot"),
    "vramprobe collect": Way(elsewhere="tests/sweep/test_launch_command.py", why="it needs SkyPilot"),
    "vramprobe profile --emulate H100-SXM --empty-weights --save predicted.jsonl -- python train.py": Way(
        elsewhere="tests/profile/test_emulated_run.py", why="it needs a command"
    ),
    "vramprobe launch --predicted predicted.jsonl --gpu H100-SXM --bucket s3://my-records --dry-run "
    "-- python train.py": Way(elsewhere="tests/sweep/test_launch_command.py", why="it needs a command and its profile"),
    "vramprobe run configs/sweeps/80gb.yaml --on slurm": Way(
        elsewhere="tests/sweep/test_on_slurm.py", why="it needs a cluster"
    ),
    "vramprobe run configs/sweeps/80gb.yaml --shard 1/2 --out out/one": Way(
        instead="vramprobe run configs/sweeps/quickstart.yaml --shard 1/2 --dry-run --device cpu",
        why="it takes minutes",
    ),
    "vramprobe run configs/sweeps/80gb.yaml --shard 2/2 --out out/two": Way(
        instead="vramprobe run configs/sweeps/quickstart.yaml --shard 2/2 --dry-run --device cpu",
        why="it takes minutes",
    ),
    "vramprobe merge out/one out/two -o out/all.jsonl": Way(
        instead="vramprobe merge results/cpu/quickstart -o out/all.jsonl", why="the shards above are not run"
    ),
    "vramprobe export results -o records.parquet": AS_IT_IS,
    "vramprobe check results/h100-sxm/80gb": AS_IT_IS,  # the workshop has the committed records there, too
    "vramprobe evaluate out/demo --leave-out model": AS_IT_IS,
    "vramprobe calibrate results/cpu/quickstart": AS_IT_IS,
    "vramprobe report results/cpu/quickstart -o out/report": AS_IT_IS,
    "vramprobe report results/cpu/quickstart --dataset out/dataset": AS_IT_IS,
    "vramprobe report results/emulated/records.jsonl.xz -o results/emulated --claims results/claims/claims.csv": Way(
        more="--check", why="it would write what is committed"
    ),
    "vramprobe report results/emulated/records.jsonl.xz --dataset out/dataset": AS_IT_IS,
    "vramprobe --skill": AS_IT_IS,
    "make demo": Way(instead="make -n demo", why="it sets up an environment; its commands are above"),
    "make demo-here": Way(instead="make -n demo-here", why="it measures for minutes"),
    "make demo-gpu": Way(instead="make -n demo-gpu", why="its four commands are above"),
    "make test": Way(instead="make -n test", why="it would run this test"),
    "make test-all": Way(instead="make -n test-all", why="it would run this test"),
    "make truth": Way(instead="make -n truth", why="its stacks take 20 GB and its runs minutes"),
    "make test-gpu": Way(instead="make -n test-gpu", why="it needs a GPU"),
    "make wheels": Way(instead="make -n wheels", why="compiling for five platforms takes minutes"),
    "make lint": Way(instead="make -n lint", why="CI runs it"),
    "make readme": Way(instead="make -n readme", why="it measures anew; that all is fresh is tested"),
    "python tools/readme.py --check": Way(elsewhere="tests/report/test_published.py"),
    "python tools/reports.py --check": Way(elsewhere="tests/report/test_published.py"),
    "python tools/planned.py --check": Way(elsewhere="tests/report/test_published.py"),
    "vramprobe emulate setup --package deepspeed==0.19.8 --package hjson==3.1.0 --package msgpack==1.2.4 "
    "--package ninja==1.13.2 --package einops==0.8.2 --package py-cpuinfo==9.0.0": Way(
        elsewhere="tests/emulate/test_build_environment.py", why="it downloads a CUDA build of torch"
    ),
    "python benchmarks/truth/published.py": Way(more="--check", why="it would write its table"),
    "python benchmarks/truth/reproduce.py": Way(more="--check", why="its environments take minutes, its rows more"),
    "python benchmarks/truth/reproduce.py --line 22": Way(
        elsewhere="tests/benchmarks/test_reproduce.py", why="its environment takes a minute"
    ),
    "python benchmarks/truth/reproduce.py --profile --line 22 --line 10": Way(
        elsewhere="tests/benchmarks/test_reproduce.py", why="its environment takes a minute, the runs three"
    ),
    "python benchmarks/truth/oom.py": Way(elsewhere="tests/benchmarks/test_oom_reports.py", why="half a minute"),
    "python benchmarks/truth/megatron.py CLONE": Way(more="--check", why="a case takes minutes"),
    "python benchmarks/truth/snapshots.py CLONES": Way(
        elsewhere="tests/benchmarks/test_public_snapshots.py", why="it needs clones of eight repositories"
    ),
    "python benchmarks/truth/data_creep.py --run": Way(
        elsewhere="tests/benchmarks/test_data_lengths.py", why="its runs take minutes"
    ),
    "python benchmarks/truth/data_lengths.py --run": Way(
        elsewhere="tests/benchmarks/test_data_lengths.py", why="its runs take minutes"
    ),
    "python benchmarks/speed/counted_steps.py": Way(
        elsewhere="tests/speed/test_counted_fit.py", why="it would write its tables"
    ),
    "python benchmarks/rollouts/serving.py": Way(more="--check", why="it would write its table"),
    "python benchmarks/rollouts/graphs.py": Way(more="--check", why="it would write its table"),
    "python benchmarks/rollouts/features.py --python PATH": Way(
        instead="python benchmarks/rollouts/features.py", more="--check", why="it would start vLLM for each row"
    ),
    "python benchmarks/rollouts/grpo.py --python PATH": Way(
        instead="python benchmarks/rollouts/grpo.py", more="--check", why="it would start vLLM five times"
    ),
    "python benchmarks/rollouts/grpo.py --verl PATH": Way(
        instead="python benchmarks/rollouts/grpo.py", more="--check", why="it would start verl twice"
    ),
    "python benchmarks/rollouts/emulated.py --python PATH": Way(
        instead="python benchmarks/rollouts/emulated.py", more="--check", why="it would start vLLM for each row"
    ),
    "python benchmarks/techniques/techniques.py --python PATH": Way(
        instead="python benchmarks/techniques/techniques.py", more="--check", why="its runs take half an hour"
    ),
    "python benchmarks/frameworks/stacks.py": AS_IT_IS,
    "python benchmarks/frameworks/stacks.py fms-2025-02": Way(
        elsewhere="tests/benchmarks/test_reproduce.py", why="it downloads a CUDA build of torch"
    ),
    "python benchmarks/frameworks/stacks.py hf-2024-12": Way(
        elsewhere="tests/benchmarks/test_reproduce.py", why="it downloads a CUDA build of torch"
    ),
    "python benchmarks/versions/versions.py": Way(more="--check", why="its environments take minutes, its runs hours"),
    "python benchmarks/truth/claims.py": Way(more="--check", why="its runs take half an hour"),
    "python benchmarks/truth/qlora_70b.py": Way(more="--check", why="its environments take minutes, its runs more"),
    "python benchmarks/frameworks/frameworks.py": Way(
        more="--check", why="its environments take minutes, its runs more"
    ),
    "python benchmarks/truth/contexts.py": Way(more="--check", why="it would write its page"),
    "python benchmarks/truth/t4.py": Way(more="--check", why="it would write its page"),
    "python tools/roles.py --check": AS_IT_IS,
    "python benchmarks/truth/own_commands.py": Way(more="--check", why="its runs take minutes"),
    "python benchmarks/truth/recipes.py": Way(more="--check", why="it would write its page"),
    "python benchmarks/truth/recipes.py --again 20": HOURS,
    "python benchmarks/truth/recipes.py --again 10 --kind ranks": HOURS,
    "python benchmarks/truth/late_2026.py": Way(more="--check", why="it would write its page"),
    "python benchmarks/truth/published_verdicts.py": Way(more="--check", why="it would ask other tools"),
    "python benchmarks/truth/coverage.py": Way(more="--check", why="it would write its page"),
    "python benchmarks/truth/shares.py": Way(elsewhere="tests/predict/test_shares.py"),
    "python benchmarks/truth/catalog.py": Way(more="--check", why="it would write its table"),
}
#: Files that name scripts and tables in sentences.
SAYING = (".json", ".md", ".py", ".sh", ".toml", ".txt", ".yaml")
#: Named in the pages, and made by whoever follows them.
MADE_BY_A_USER = {
    ".claude/skills/vramprobe/SKILL.md",
    "requirements.txt",
    "results/h100-sxm/80gb",
    "results/…/*.jsonl",
    "slurm-jobs/",
    "truth.md",
}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def fences(page: Path) -> list[tuple[str, str]]:
    """(language, text) of each fenced block that is not generated."""
    own = readme.BLOCK.sub("", page.read_text())
    return [(match["language"], match["body"]) for match in _FENCE.finditer(own)]


def spans(page: Path) -> list[str]:
    """Code within sentences and tables."""
    return _SPAN.findall(_FENCE.sub("", readme.BLOCK.sub("", page.read_text())))


def commands(page: Path) -> list[str]:
    """Return what a reader may type: each line of a block, and each of make's and Python's within a sentence."""
    lines = [line for language, text in fences(page) if not language for line in text.splitlines()]
    found = [_COMMENT.sub("", line.removeprefix("$ ")) for line in lines]
    whole = [line for line in found if line.startswith(("vramprobe ", "make ", "python "))]
    return whole + [span for span in spans(page) if span.startswith(("make ", "python "))]


def mentions(page: Path) -> list[str]:
    """Everything that begins with vramprobe, a generated block's command, a whole one or a part in a sentence."""
    generated = [match["source"] for match in readme.BLOCK.finditer(page.read_text())]
    return [text for text in (*commands(page), *spans(page), *generated) if text.startswith("vramprobe ")]


def generated() -> set[str]:
    return {match["source"] for page in PAGES for match in readme.BLOCK.finditer(page.read_text())}


def test_every_command_is_generated_or_run_here() -> None:
    named = {command for page in PAGES for command in commands(page)}
    assert len(named) > 20
    assert named - generated() - set(HOW) == set(), "say in HOW how each of these is run"
    assert set(HOW) - named == set(), "no page names these any more"
    assert all(way.why for way in HOW.values() if way.instead or way.more or way.loaded)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a checkout is, to write to: sweeps, results, and a demo that seems to have measured a GPU."""
    folder = tmp_path_factory.mktemp("workshop")
    for name in ("configs", "benchmarks", "tools", "vramprobe", "docs", *SETUP):
        (folder / name).symlink_to(ROOT / name)
    (folder / "results").mkdir()
    (folder / "results" / "emulated").symlink_to(ROOT / "results" / "emulated")
    shutil.copytree(ROOT / "results" / "claims", folder / "results" / "claims")
    committed = ROOT / "results" / "cpu"
    shutil.copytree(committed / "quickstart", folder / "results" / "cpu" / "quickstart")
    shutil.copytree(committed / "quickstart", folder / "results" / "h100-sxm" / "80gb")
    demo = folder / "out" / "demo"
    demo.mkdir(parents=True)
    records = [synthetic(spec) for spec in specs()]
    (demo / "records.jsonl").write_text("".join(record.to_json_line() + "\n" for record in records))
    save_fit(fit_records(records), demo / "fit.json")
    return folder


def run_in(folder: Path, words: list[str]) -> subprocess.CompletedProcess:
    """A verb or a script that compares its table runs in this process; whatever may start others, in its own."""
    if words[0] == "vramprobe":
        return vramprobe(*words[1:], cwd=folder)
    if words[0] == "python" and words[-1] == "--check":
        return checked_in(folder, words[1:])
    words = [sys.executable, *words[1:]] if words[0] == "python" else words
    paths = {"PYTHONPATH": str(ROOT), "PYTHON": sys.executable}
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, env=os.environ | paths)


def checked_in(folder: Path, words: list[str]) -> subprocess.CompletedProcess:
    """As ``python SCRIPT --check`` runs it, and none of its modules stays, whose names scripts share."""
    before = set(sys.modules)
    script = str(folder / words[0])
    with mock.patch.object(sys, "path", [str(Path(script).parent), str(ROOT), *sys.path]):
        try:
            return within(lambda: runpy.run_path(script, run_name="__main__"), words, folder)
        finally:
            for name in set(sys.modules) - before:
                if str(getattr(sys.modules[name], "__file__", None)).startswith(str(ROOT / "benchmarks")):
                    del sys.modules[name]


#: Checks of some seconds to minutes: those of every prediction in a table.
LONG = [
    name
    for name in HOW
    if any(
        word in name
        for word in (
            "records.jsonl.xz -o",
            "claims.py",
            "truth/t4.py",
            "vramprobe measure --model smollm2",
            "versions.py",
            "fit.json -o out/report",
            "fit.json --out out/demo/report",
            "--leave-out model",
            "techniques.py --python",
        )
    )
]


@pytest.mark.parametrize("command", grid(HOW, *(name for name in HOW if name not in LONG)))
def test_the_command_runs(command: str, workshop: Path) -> None:
    way = HOW[command]
    script = shlex.split(command)[1]
    if way.elsewhere:
        named = Path(script).stem if command.startswith("python ") else script
        assert named in (ROOT / way.elsewhere).read_text()
        return
    words = shlex.split(f"{way.instead or command} {way.more}")
    if way.loaded:
        assert '__name__ == "__main__"' in (ROOT / script).read_text()
        words = ["python", "-c", f"import runpy; runpy.run_path({script!r})"]
    done = run_in(workshop, words)
    assert done.returncode in ANSWERED, done.stderr
    assert "Nothing to be done" not in done.stdout


@pytest.mark.parametrize("text", dict.fromkeys(text for page in PAGES for text in mentions(page)))
def test_every_verb_and_option_named_is_there(text: str) -> None:
    first, *words = shlex.split(text.partition(" | head ")[0])[1:]
    if first.startswith("-"):
        assert first in ("--help", "--version", "--skill")
        return
    assert first in VERBS
    verb = VERBS[first]
    while words and words[0] in getattr(verb, "commands", {}):
        verb = verb.commands[words.pop(0)]
    words = words[: words.index("--")] if "--" in words else words  # the rest is another program's
    known = {option for parameter in verb.params for option in (*parameter.opts, *parameter.secondary_opts)}
    assert [word for word in words if word.startswith("-") and word not in known | {"--help", "--"}] == []


def examples() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for number, (language, text) in enumerate(fences(page)):
            if language == "python":
                yield f"{name_of(page)}-{number}", text


@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("default")  # as in a process of its own
@pytest.mark.parametrize(
    "example", [pytest.param(text, id=name, marks=exhaustive if "measure" in text else ()) for name, text in examples()]
)
def test_the_example_runs(example: str, workshop: Path) -> None:
    """A sweep that calibrates a GPU is not run, as above: no GPU is here. Its words are held against the function's."""
    code = compile(example, "example.py", "exec")
    with mock.patch.object(api, "run", mock.create_autospec(api.run)):
        done = within(lambda: exec(code, {"__name__": "__main__"}), ["-c"], workshop)
    assert done.returncode == 0, done.stderr


def test_the_sweep_in_the_pages_expands(tmp_path: Path) -> None:
    sweeps = [text for page in PAGES for language, text in fences(page) if language == "yaml"]
    sweeps = [text for text in sweeps if "stages:" not in text]
    assert sweeps
    for text in sweeps:
        (tmp_path / "mine.yaml").write_text(text)
        done = run_in(tmp_path, shlex.split("vramprobe plan mine.yaml --device cpu --json"))
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["cells"]


def test_the_campaign_in_the_pages_is_one(tmp_path: Path) -> None:
    campaigns = [text for page in PAGES for language, text in fences(page) if language == "yaml" and "stages:" in text]
    assert campaigns
    for text in campaigns:
        (tmp_path / "mine.yaml").write_text(text)
        assert campaign_in(tmp_path / "mine.yaml").stages


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in _LINK.findall(_FENCE.sub("", page.read_text())):
        if link.startswith("https://"):
            continue
        name, _, section = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{link}: nothing is there"
        titles = re.findall(r"^#+ (.+)$", _FENCE.sub("", target.read_text()), re.MULTILINE) if section else []
        assert not section or section in map(readme.anchor, titles), f"{link}: no such section"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_path_named_is_there(page: Path) -> None:
    """In code, whatever begins with a folder of ours, and every file or folder that stands alone."""
    ours = tuple(f"{name}/" for name in ("configs", "results", "benchmarks", "docs", "tests", "tools", "vramprobe"))
    code = (*spans(page), *(body for _, body in fences(page)))
    text = [word for one in code for word in re.split(r"[\s\"'(),]+", one)]
    alone = [span for span in spans(page) if re.fullmatch(r"[\w/.-]+(?:/|\.py|\.md|\.yaml|\.sh|\.csv|\.txt)", span)]
    for name in {*(word for word in text if word.startswith(ours)), *alone} - MADE_BY_A_USER:
        assert any(any(folder.glob(name)) for folder in (ROOT, ROOT / "vramprobe", page.parent)), name


def test_every_script_and_table_named_is_there() -> None:
    """Paths under benchmarks/ and tools/, wherever they are named: pages, docstrings, comments, messages, sweeps."""
    named = re.compile(r"(?<![\w./-])((?:benchmarks|tools)/[\w./-]*\w)(?![\w{*])")
    folders = (".ci", "benchmarks", "configs", "docs", "examples", "tests", "tools", "vramprobe")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in SAYING]
    found = {
        (name, str(path.relative_to(ROOT)))
        for path in (ROOT / "README.md", ROOT / "Makefile", *files)
        for name in named.findall(path.read_text())
        if "NAME" not in name
    }
    assert len(found) > 100
    assert sorted((name, path) for name, path in found if not (ROOT / name).exists()) == []


def test_what_is_installed_is_an_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {name for page in PAGES for name in re.findall(r"'\.\[(\w+)\]'", page.read_text())}
    assert named
    assert named <= set(extras)


def test_the_readme_is_short_and_leads_to_the_first_page() -> None:
    """README.md leads to the first page, which leads to every other: tests/report/test_site.py."""
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 240
    assert "docs/index.md" in _LINK.findall(text)


def test_the_way_names_every_package_from_the_bottom_up() -> None:
    text = (ROOT / "docs" / "way.md").read_text()
    table = re.search(r"^\| package \| contents \|\n(.*?)\n\n", text, re.MULTILINE | re.DOTALL)
    assert table
    named = [name for row in table[1].splitlines()[1:] for name in _SPAN.findall(row.split("|")[1])]
    there = {
        f"{path.name}/" if path.is_dir() else path.name
        for path in (ROOT / "vramprobe").iterdir()
        if path.name not in ("__init__.py", "__pycache__", "py.typed")
    }
    assert sorted(named) == sorted(there)
    assert [re.sub(r"/|\.py$", "", name) for name in named if name != "data/"] == list(FLOORS)


@pytest.mark.parametrize("path", sorted((ROOT / "vramprobe").rglob("__init__.py")), ids=lambda path: path.parent.name)
def test_every_package_says_what_goes_in_what_comes_out_and_its_lines(path: Path) -> None:
    said = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split())
    assert len(said) < 1000
    assert re.search(r"\btorch\b|the process line|the independence line", said), "name the line that it may not cross"
    if path.parent != ROOT / "vramprobe":
        assert "In: " in said
        assert "Out: " in said


def test_the_check_names_what_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    page = "<!-- generated by: {} -->\n{}<!-- end -->\n"
    fresh = readme.block("benchmarks/truth/shares.md", ROOT / "README.md")
    with_stale = page.format("benchmarks/truth/shares.md", fresh) + page.format("benchmarks/truth/catalog.md", "old\n")
    monkeypatch.setattr(
        Path, "read_text", lambda path, read=Path.read_text: with_stale if path == ROOT / "README.md" else read(path)
    )
    monkeypatch.setattr(readme, "pages", lambda: [ROOT / "README.md"])
    monkeypatch.setattr(sys, "argv", ["readme.py", "--check"])
    with pytest.raises(SystemExit) as stopped:
        readme.main()
    assert (
        stopped.value.code == "1 blocks are stale; rebuild them: make readme\n  README.md: benchmarks/truth/catalog.md"
    )


def test_a_section_is_taken_without_its_heading() -> None:
    page = "benchmarks/truth/claims.md"
    taken = readme.block(f"{page}#what-came-out", ROOT / "README.md")
    assert re.match(r"\d+ cells ran, for \d+ claims", taken)
    assert "#" not in taken
    with pytest.raises(SystemExit, match="no section #nowhere"):
        readme.block(f"{page}#nowhere", ROOT / "README.md")
