"""Input that cannot be emulated: one clear line on stderr, exit code 1, no traceback, nothing left behind.

Through the command line, in processes of their own, without a CUDA build of torch: what is found is made up.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_installation import METADATA, VERSION
from grids import grid

from vramprobe.emulate import MACHINE_VARIABLE

ROOT = Path(__file__).parents[2]
CELL = ["--model", "pythia-70m", "--method", "lora", "--batch-size", "1", "--seq-len", "64"]
SWEEP = str(ROOT / "configs" / "sweeps" / "quickstart.yaml")
Refused = Callable[..., str]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Make the folder where the process looks for packages first, with a torch without CUDA."""
    folder = tmp_path / "site-packages"
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "version.py").write_text("__version__ = '2.13.0+cpu'\ncuda = None\nhip = None\n")
    return folder


@pytest.fixture
def cuda_site(site: Path) -> Path:
    """Put a CUDA build of torch into ``site``."""
    (site / "torch" / "version.py").write_text(VERSION)
    (site / "torch-2.13.0.dist-info").mkdir()
    (site / "torch-2.13.0.dist-info" / "METADATA").write_text(METADATA)
    return site


@pytest.fixture
def refused(site: Path, tmp_path: Path) -> Refused:
    """The one line with which the command line refuses these words."""
    cache = tmp_path / "cache"

    def run(*words: str, code: int = 1, **variables: str) -> str:
        without = ("LD_PRELOAD", "CC", MACHINE_VARIABLE, "VRAMPROBE_EMULATED_CARDS")
        environment = {name: value for name, value in os.environ.items() if name not in without}
        environment |= {"PYTHONPATH": f"{site}:{ROOT}", "VRAMPROBE_CACHE_DIR": str(cache)} | variables
        done = subprocess.run(
            [sys.executable, "-m", "vramprobe", *words],
            capture_output=True,
            text=True,
            env=environment,
            cwd=tmp_path,
            check=False,
            timeout=120,
        )
        assert "Traceback" not in done.stderr
        assert done.returncode == code, done.stderr
        assert done.stdout == ""
        assert done.stderr.startswith("vramprobe: ")
        assert done.stderr.count("\n") == 1, done.stderr
        assert not list(cache.glob("machines/*"))
        return done.stderr

    return run


def customize(site: Path, code: str) -> None:
    """Have the process begin with this."""
    (site / "sitecustomize.py").write_text(code)


def test_a_card_that_cannot_be_is_one_line(refused: Refused) -> None:
    assert "unknown GPU 'NOPE'. `vramprobe gpus` lists them." in refused("measure", "--emulate", "NOPE", *CELL)


VERBS = [["measure", *CELL], ["run", SWEEP], ["plan", SWEEP], ["doctor"]]


@pytest.mark.parametrize("words", grid(VERBS, *VERBS[:2]), ids=lambda words: words[0])
def test_every_verb_names_the_command_that_sets_up_a_cuda_build(words: list[str], refused: Refused) -> None:
    told = refused(*words, "--emulate", "H100-SXM")
    assert "is a build without CUDA" in told
    assert "`vramprobe emulate setup --torch 2.13.0` sets up a CUDA build" in told


@pytest.mark.parametrize("words", grid(VERBS, ["run", SWEEP]), ids=lambda words: words[0])
def test_the_cpu_is_no_emulated_card(words: list[str], refused: Refused) -> None:
    told = refused(*words, "--emulate", "H100-SXM", "--device", "cpu")
    assert "--emulate H100-SXM is for device cuda, and cpu was given; drop one of them" in told


def test_a_plan_for_two_cards(refused: Refused) -> None:
    told = refused("plan", SWEEP, "--emulate", "H100-SXM", "--gpu", "RTX-4090")
    assert "--emulate H100-SXM and --gpu RTX-4090 both name the GPU to plan for" in told


@pytest.mark.parametrize("words", grid(VERBS[:2], ["run", SWEEP]), ids=lambda words: words[0])
def test_verify_is_for_emulated_cards(words: list[str], refused: Refused) -> None:
    assert "give --emulate GPU, too" in refused(*words, "--verify", "--device", "cpu")


def test_an_emulated_card_within_another_machine(refused: Refused, tmp_path: Path) -> None:
    told = refused(
        "measure",
        "--emulate",
        "RTX-4090",
        *CELL,
        VRAMPROBE_EMULATED_CARDS="H100-SXM",
        **{MACHINE_VARIABLE: str(tmp_path)},
    )
    assert "--emulate RTX-4090: this process sees an emulated H100-SXM already" in told
    assert "this process sees an emulated machine already" in refused(
        "measure", "--emulate", "RTX-4090", *CELL, **{MACHINE_VARIABLE: str(tmp_path)}
    )


def test_a_torch_that_is_too_old(site: Path, refused: Refused) -> None:
    (site / "torch" / "version.py").write_text("__version__ = '2.2.1+cu121'\ncuda = '12.1'\n")
    told = refused("measure", "--emulate", "H100-SXM", *CELL)
    assert "is torch 2.2.1+cu121, too old for an emulated GPU: 2.3 or newer is needed" in told
    assert "`vramprobe emulate setup` sets up a CUDA build" in told


def test_no_compiler(cuda_site: Path, refused: Refused, tmp_path: Path) -> None:
    customize(cuda_site, "import sys\nsys.modules['ziglang'] = None\n")
    (tmp_path / "bin").mkdir()
    told = refused("measure", "--emulate", "H100-SXM", *CELL, PATH=str(tmp_path / "bin"))
    assert "needs a C compiler, and there is no cc, gcc or clang on PATH" in told
    assert "pip install 'vramprobe[emulate]'" in told


def test_a_cache_that_cannot_be_written(cuda_site: Path, refused: Refused, tmp_path: Path) -> None:
    pytest.importorskip("elftools")
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    (tmp_path / "file").touch()
    within = str(tmp_path / "file" / "cache")
    for words in (["measure", "--emulate", "H100-SXM", *CELL], ["emulate", "setup"]):
        told = refused(*words, VRAMPROBE_CACHE_DIR=within)
        assert f"{within}/" in told
        assert "cannot be written (Not a directory)" in told
        assert "set VRAMPROBE_CACHE_DIR to a folder elsewhere" in told
    shut = tmp_path / "shut"
    shut.mkdir()
    shut.chmod(0o555)
    if os.access(shut, os.W_OK):
        return  # root may write anywhere
    told = refused("measure", "--emulate", "H100-SXM", *CELL, VRAMPROBE_CACHE_DIR=str(shut))
    assert "cannot be written (Permission denied)" in told


@pytest.mark.parametrize(
    "words",
    grid([["measure", "--emulate", "H100-SXM", *CELL], ["emulate", "setup"]], ["emulate", "setup"]),
    ids=lambda words: words[0],
)
def test_another_platform(words: list[str], site: Path, refused: Refused) -> None:
    customize(site, "import platform\nplatform.system = lambda: 'Darwin'\nplatform.machine = lambda: 'arm64'\n")
    told = refused(*words)
    assert "this is macOS on arm64: a GPU can be emulated on Linux x86-64 alone" in told
    assert "emulate setup" not in told


def test_what_cannot_be_set_up_or_removed(refused: Refused) -> None:
    assert "torch 1.0 is too old for an emulated GPU: give 2.3 or newer" in refused(
        "emulate", "setup", "--torch", "1.0"
    )
    assert "'new' is no version of torch" in refused("emulate", "setup", "--torch", "new")
    told = refused("emulate", "remove")
    assert "no environment for torch 2.13.0 was set up; there is none at all" in told
    assert "no environment for torch 9.9 was set up" in refused("emulate", "remove", "--torch", "9.9")


def test_status_says_what_is_missing(site: Path, tmp_path: Path) -> None:
    variables = {"PYTHONPATH": f"{site}:{ROOT}", "VRAMPROBE_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "vramprobe", "emulate", "status"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | variables, check=False)
    assert done.returncode == 1
    assert "missing       torch 2.13.0+cpu in" in done.stdout
    assert done.stderr == ""
