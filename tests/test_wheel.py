"""Wheel as a user installs it, without torch and far from the repository: every verb, and all its data.

The core answers; a verb that needs an extra says which in one line, and answers once it is there.

The environment is a fresh one. What the wheel says that it depends on is linked into it from the one that runs the
tests, and nothing else is there: a dependency that is not declared is missing.
"""

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from importlib.metadata import PathDistribution, distribution
from pathlib import Path

import pytest
import yaml
from command_line import OUT_OF_MEMORY
from grids import exhaustive, grid
from packaging.requirements import Requirement
from typer.main import get_command

import vramprobe
from vramprobe import catalog
from vramprobe.allocator import compiled
from vramprobe.cli.options import ANSWERED
from vramprobe.cli.verbs import app
from vramprobe.emulate import environment
from vramprobe.errors import EXTRAS

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "results" / "cpu" / "quickstart"
CELL = ["--model", "llama-3.1-8b", "--method", "qlora", "--batch-size", "1", "--seq-len", "2048"]
COMPILED = "from vramprobe.allocator import compiled; print(compiled.PlainAllocator is not None)"
#: How a compiled module's file ends.
BUILT = (".so", ".pyd")
ANSWERS: list[tuple[list[str], str]] = [
    (["--help"], "Usage: vramprobe"),
    (["plan", "--help"], "or the name of one that ships: 24gb"),
    (["models"], "llama-3.1-8b"),
    (["gpus"], "RTX 4090"),
    (["recipes", "list"], "ships"),
    (["predict", *CELL, "--gpu", "RTX-4090"], "predicted, not measured"),
    (["recommend", *CELL[:4], "--seq-len", "2048", "--tokens", "50M"], "cheapest"),
    (["plan", "24gb", "--gpu", "RTX-4090"], "112 cells"),
    (["check", str(RECORDS)], "records"),
    (["techniques", "--kind", "optimizer"], "GaLore"),
    (["serve", "--model", "llama-3.1-8b", "--gpu", "RTX-4090"], "KV cache"),
    (
        ["grpo", "--model", "qwen2.5-1.5b", "--method", "lora", "--gradient-checkpointing", "--gpu", "H100-SXM"],
        "KV cache",
    ),
    (["explain", "oom.txt"], "1.96 GiB requested"),
    (["merge", str(RECORDS), "--out", "merged.jsonl"], "records"),
    (["contribute", str(RECORDS), "--out", "contribution.jsonl"], "contribution.jsonl"),
    (["emulate", "--help"], "setup"),
    (["launch", "24gb", "--gpu", "RTX-4090", "--bucket", "bucket-of-runs", "--dry-run"], "RTX 4090"),
]
#: Those that read each kind of data that ships and that the core reads: catalog, sweeps.
FEW = [pair for pair in ANSWERS if pair[0][0] in ("recommend", "plan")]
#: With the extra ``report``, in this order.
REPORTS: list[tuple[list[str], str]] = [
    (["claims", "--id", "L1-12"], "L1-12"),
    (["calibrate", str(RECORDS)], "lora"),
    (["report", str(RECORDS), "--out", "report"], "index.html"),
]
#: A command, and the extra that it needs.
NEEDS_EXTRA: list[tuple[list[str], str]] = [
    *((words, "report") for words, _ in REPORTS),
    (["techniques", "--out", "techniques"], "report"),
    (["predict", *CELL, "--timeline", "memory.png"], "report"),
    (["calibrate-gpu", "--no-doctor"], "report"),
    (["report", str(RECORDS), "--dataset", "data"], "report,hub"),
    (["export", str(RECORDS), "--out", "records.parquet"], "report,hub"),
    (["measure", *CELL, "--device", "cpu"], "measure"),
    (["run", "quickstart", "--device", "cpu", "--limit", "1"], "measure"),
    (["run", "quickstart", "--device", "cpu", "--on", "ray"], "ray"),
    (["run", "quickstart", "--device", "cpu", "--on", "slurm"], "slurm"),
    (["recommend", *CELL[:4], "--seq-len", "2048", "--tokens", "50M", "--prices", "skypilot"], "cloud"),
    (["launch", "24gb", "--gpu", "RTX-4090", "--bucket", "bucket-of-runs"], "cloud"),
    (["mcp"], "mcp"),
]
#: One for each extra; what is said is made in one place.
ONE_OF_EACH = list({extra: (words, extra) for words, extra in NEEDS_EXTRA}.values())
#: Verbs that need a machine, a job or a command of the user's, each tried by the tests of its own.
NEEDS_MORE = {"doctor", "profile", "diff", "status", "collect", "fit", "evaluate"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_wheel(tmp_path_factory.mktemp("wheel"))


def built_wheel(folder: Path, **variables: str) -> Path:
    """Built from a copy, so that nothing is left in the working tree."""
    source, out = folder / "source", folder / "out"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "vramprobe", source / "vramprobe", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    options = shlex.split("--quiet --no-deps --no-index --no-build-isolation --disable-pip-version-check")
    command = [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(out), str(source)]
    subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | variables)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command ``vramprobe`` of a fresh environment."""
    return installed_in(tmp_path_factory.mktemp("environment"), wheel)


@pytest.fixture(scope="module")
def reporting(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command ``vramprobe`` of a fresh environment with the extra ``report``."""
    return installed_in(tmp_path_factory.mktemp("environment"), wheel, "report")


def installed_in(home: Path, wheel: Path, extra: str = "") -> Path:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    python = home / "bin" / "python"
    options = shlex.split("--quiet --no-deps --no-index --disable-pip-version-check")
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", *options, str(wheel)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(home), "platbase": str(home)}))
    (own,) = site.glob("vramprobe-*.dist-info")
    for name in sorted(what_it_needs(PathDistribution(own).requires or [], extra)):
        needed = distribution(name)
        for top in {file.parts[0] for file in needed.files or []} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(needed.locate_file(top))
    return home / "bin" / "vramprobe"


def what_it_needs(requirements: list[str], extra: str) -> set[str]:
    """Names of the distributions of the core and of this extra, and of what those need, without extras."""
    found: set[str] = set()
    todo = list(requirements)
    while todo:
        one = Requirement(todo.pop())
        if (one.marker is None or one.marker.evaluate({"extra": extra})) and one.name.lower() not in found:
            found.add(one.name.lower())
            todo += distribution(one.name).requires or []
    return found


def run(installed: Path, folder: Path, *words: str) -> subprocess.CompletedProcess:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VRAMPROBE"))}
    env = clean | {"COLUMNS": "120"}
    return subprocess.run([installed, *words], cwd=folder, capture_output=True, text=True, env=env)


def python_runs(installed: Path, code: str) -> subprocess.CompletedProcess:
    """Run this code by the environment's interpreter, which sees nothing of this folder or user."""
    return subprocess.run([installed.with_name("python"), "-I", "-c", code], capture_output=True, text=True)


@pytest.fixture(scope="module")
def empty_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "oom.txt").write_text(OUT_OF_MEMORY)
    return folder


def test_every_file_of_the_package_ships(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if not name.split("/")[0].endswith(".dist-info")}
    there = {str(path.relative_to(ROOT)) for path in (ROOT / "vramprobe").rglob("*") if path.is_file()}
    tracked = {path for path in there if "__pycache__" not in path and not path.endswith(BUILT)}
    assert {path for path in shipped if not path.endswith(BUILT)} == tracked
    assert {f"vramprobe/data/sweeps/{name}.yaml" for name in catalog.list_sweeps()} <= shipped
    assert "vramprobe/data/campaigns/edges.yaml" in shipped
    assert "vramprobe/py.typed" in shipped


def test_the_allocator_in_c_ships_where_it_can_be_built(wheel: Path, installed: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        was_built = any(name.endswith(BUILT) for name in archive.namelist())
    assert was_built or compiled.PlainAllocator is None
    done = python_runs(installed, COMPILED)
    assert done.stdout == f"{was_built}\n", done.stderr


def test_without_a_compiler_all_but_it_is_installed(tmp_path: Path) -> None:
    built = built_wheel(tmp_path, CC="no-such-compiler")
    with zipfile.ZipFile(built) as archive:
        names = archive.namelist()
    assert "vramprobe/allocator/compiled.py" in names
    assert not any(name.endswith(BUILT) for name in names)


def test_the_repository_shows_the_sweeps_and_campaigns_that_ship() -> None:
    """One file each: the folders of configs/ are links."""
    for name in ("sweeps", "campaigns"):
        assert (ROOT / "configs" / name).resolve() == ROOT / "vramprobe" / "data" / name


def test_nothing_heavy_is_installed(installed: Path) -> None:
    code = "import importlib.util as u, vramprobe; print(vramprobe.__file__, [n for n in %r if u.find_spec(n)])"
    heavy = ["torch", "transformers", "peft", "bitsandbytes", "accelerate", "pytest"]
    heavy += itertools.chain(*EXTRAS.values())
    done = python_runs(installed, code % heavy)
    assert done.stdout.startswith(str(installed.parents[1])), done.stderr
    assert done.stdout.endswith(" []\n")


def require_answers(installed: Path, folder: Path, answers: list[tuple[list[str], str]]) -> None:
    for words, said in answers:
        done = run(installed, folder, *words)
        assert done.returncode in ANSWERED, (words, done.stderr)
        assert said in done.stdout, (words, done.stdout)


@pytest.mark.parametrize("answers", grid([FEW, ANSWERS], FEW), ids=lambda answers: f"{len(answers)} verbs")
def test_the_verbs_that_the_core_answers(installed: Path, empty_folder: Path, answers: list) -> None:
    require_answers(installed, empty_folder, answers)
    assert run(installed, empty_folder, "--version").stdout == f"vramprobe {distribution('vramprobe').version}\n"


def test_the_verbs_that_the_extra_report_answers(reporting: Path, empty_folder: Path) -> None:
    """In an empty folder; fit.json is written there and used by what comes after."""
    require_answers(reporting, empty_folder, REPORTS)
    page = (empty_folder / "report" / "index.html").read_text()
    assert "<script" in page
    assert "<style" in page


@pytest.mark.parametrize(
    ("words", "extra"), grid(NEEDS_EXTRA, *ONE_OF_EACH), ids=lambda one: one if isinstance(one, str) else one[0]
)
def test_a_verb_without_its_extra_says_the_line_to_type(
    installed: Path, empty_folder: Path, words: list[str], extra: str
) -> None:
    before = sorted(empty_folder.rglob("*"))
    done = run(installed, empty_folder, *words)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1, done.stderr
    assert f"pip install 'vramprobe[{extra}]'" in done.stderr
    assert "report" not in extra or sorted(empty_folder.rglob("*")) == before  # said before any work


def test_a_data_frame_without_pandas_says_the_line_to_type(installed: Path) -> None:
    done = python_runs(installed, f"import vramprobe; vramprobe.load({str(RECORDS)!r})")
    said = "MissingDependency: a DataFrame needs pandas, not installed here: pip install 'vramprobe[report]'\n"
    assert done.stderr.endswith(said)


def test_every_verb_is_tried_without_the_extras() -> None:
    tried = {words[0] for words, _ in (*ANSWERS, *NEEDS_EXTRA)} - {"--help"}
    assert tried | NEEDS_MORE == set(get_command(app).commands)


def test_an_extra_brings_the_modules_that_a_verb_checks() -> None:
    """And ``all`` brings each extra but those of this repository's tests, site and wheels."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, modules in EXTRAS.items():
        names = {Requirement(one).name.lower() for one in declared[extra]}
        assert set(modules) == names - {"vramprobe"}, extra
    (everything,) = map(Requirement, declared["all"])
    assert everything.extras == set(declared) - {"all", "docs", "test", "wheels"}


def readme_commands() -> list[list[str]]:
    """The words of each example of README, without what is cut off its output."""
    found = re.findall(r"<!-- generated by: vramprobe (.*?)(?: \| head -\d+)? -->", (ROOT / "README.md").read_text())
    return [shlex.split(one) for one in found]


@pytest.mark.parametrize("words", [*readme_commands(), ["emulate", "status"]], ids=lambda words: "-".join(words[:3]))
def test_readmes_examples_run_after_its_first_install_line(
    words: list[str], installed: Path, empty_folder: Path, tmp_path: Path, monkeypatch
) -> None:
    """On a machine without an emulated GPU: an answer, or one line that says what to do before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = run(installed, empty_folder, *words)
    if "--" not in words and words[0] != "emulate":
        assert (done.returncode, done.stderr) == (0, "")
        return
    said = done.stdout + done.stderr
    assert done.returncode == 1
    assert "vramprobe emulate setup" in said
    assert "Traceback" not in said
    assert done.stderr.count("\n") <= 1, done.stderr


@exhaustive
@pytest.mark.timeout(1800)
def test_readmes_examples_run_after_pip_install(tmp_path: Path) -> None:
    """From the registry, and on the emulated GPU that this machine has."""
    home = tmp_path / "fresh"
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    source = tmp_path / "checkout"
    left_out = shutil.ignore_patterns(".venv", ".git", "results", "benchmarks", "__pycache__")
    shutil.copytree(ROOT, source, ignore=left_out)
    done = subprocess.run([home / "bin" / "pip", "install", "--quiet", "."], cwd=source, capture_output=True, text=True)
    if "Could not find a version" in done.stderr or "Max retries" in done.stderr:
        pytest.skip("no package registry here")
    assert done.returncode == 0, done.stderr
    for words in readme_commands():
        if "--" not in words or environment.find_environment() is not None:
            done = run(home / "bin" / "vramprobe", tmp_path, *words)
            assert done.returncode in ANSWERED, (words, done.stderr)


def test_a_sweep_that_is_not_there_names_those_that_are(installed: Path, empty_folder: Path) -> None:
    done = run(installed, empty_folder, "plan", "25gb", "--gpu", "RTX-4090", "--json")
    assert done.returncode == 1
    for name in catalog.list_sweeps():
        assert name in done.stderr
    (empty_folder / "24gb").write_text("cells:\n  - {model: gpt2, method: lora, batch_size: 1, seq_len: 64}\n")
    words = ["plan", "24GB", "--gpu", "RTX-4090", "--json"]
    by_name = json.loads(run(installed, empty_folder, *words).stdout)
    by_path = json.loads(run(installed, empty_folder, "plan", "./24gb", "--gpu", "RTX-4090", "--json").stdout)
    assert len(by_path["cells"]) == 1 < len(by_name["cells"])


@exhaustive
def test_an_emulated_card_from_a_wheel_beside_a_cpu_build_of_torch(installed: Path, empty_folder: Path) -> None:
    """The set-up environment's torch runs, not the one beside the installed package."""
    if environment.find_environment() is None:
        pytest.skip("no CUDA build of torch here: `vramprobe emulate setup` makes one")
    site = next(installed.parents[1].glob("lib/python3*/site-packages"))
    beside = site / "torch"
    beside.mkdir()
    (beside / "version.py").write_text("__version__ = '2.13.0+cpu'\ncuda = None\n")
    (beside / "__init__.py").write_text("raise ImportError('the CPU build')\n")
    words = ["--model", "pythia-70m", "--num-layers", "1", "--method", "lora", "--batch-size", "1", "--seq-len", "64"]
    try:
        done = run(installed, empty_folder, "measure", "--emulate", "RTX-4090", *words, "--json")
    finally:
        shutil.rmtree(beside)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["instrument"] == "emulated"


def test_the_citation_has_the_packages_version_and_license() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (cited["version"], cited["license"]) == (vramprobe.__version__, project["license"])
    assert "version" in project["dynamic"]


def test_only_the_job_that_publishes_gets_a_token_and_it_waits_for_those_that_check() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]
    assert {name for name, job in jobs.items() if "permissions" in job} == {"publish"}
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert (jobs["publish"]["needs"], jobs["ask"]["needs"]) == ("ask", "build")
    assert "python tools/wheels.py" in str(jobs["build"]["steps"])


@exhaustive
def test_the_cross_built_wheel_is_installed_and_answers(tmp_path: Path) -> None:
    """Against glibc 2.17, by zig; with the allocator in C."""
    pytest.importorskip("ziglang", reason="no compiler for every platform: pip install 'vramprobe[emulate]'")
    words = ["--only", "manylinux_2_17_x86_64", "--no-check", "--out", str(tmp_path / "dist")]
    subprocess.run([sys.executable, ROOT / "tools" / "wheels.py", *words], check=True)
    (built,) = (tmp_path / "dist").glob("*-cp311-abi3-*.whl")
    assert [path.name for path in (tmp_path / "dist").glob("*-py3-none-any.whl")]
    installed = installed_in(tmp_path / "home", built)
    done = run(installed, tmp_path, "predict", *CELL, "--gpu", "RTX-4090", "--exit-zero")
    assert done.returncode == 0, done.stderr
    assert "GeForce RTX 4090" in done.stdout
    done = python_runs(installed, COMPILED)
    assert done.stdout == "True\n", done.stderr
