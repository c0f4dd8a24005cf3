"""The tests marked ``gpu``, on emulated cards: pytest within a process that sees one, as it would run on a real GPU.

They need the environment that ``vramprobe emulate setup`` makes (``make test`` does); without it they are skipped, and
say so. A card's own tests stand in tests/measure/test_cuda.py; here is only what starts them.
"""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from emulated import require_emulation
from grids import grid

from vramprobe.emulate.enter import entrance

ROOT = Path(__file__).parents[2]
#: What pytest itself needs; taken from here, since the emulated environment holds what cells need and no more.
_OF_PYTEST = ("pytest", "_pytest", "pluggy", "iniconfig", "pygments", "py.py", "pytest_timeout.py")
#: On every other card what decides by card: kernels, tiers, memory's end.
_BY_CARD = "tiers or oom or out_of_memory or attention or nvml"
#: In every run of the tests: the instrument on a card, in pytest's own process.
_EACH_TIME = "garbage or above_this_card"


@pytest.fixture(scope="module")
def pytest_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pytest and its own needs alone, by links."""
    import _pytest

    folder, site = tmp_path_factory.mktemp("pytest"), Path(_pytest.__file__).parents[1]
    found = [site / name for name in _OF_PYTEST if (site / name).exists()]
    found += [path for path in site.glob("*.dist-info") if re.match(r"(pytest|pytest_timeout|pluggy)-\d", path.name)]
    for path in found:
        (folder / path.name).symlink_to(path)
    return folder


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("card", "chosen"),
    grid(
        [
            ("L40S", _EACH_TIME),
            ("T4", "tiers"),
            ("H100-SXM", ""),
            ("A100-80GB", _BY_CARD),
            ("RTX-4090", _BY_CARD),
            ("T4", _BY_CARD),
        ],
        ("L40S", _EACH_TIME),
    ),
)
def test_what_is_marked_gpu_passes_on(card: str, chosen: str, pytest_folder: Path) -> None:
    require_emulation()
    way = entrance(card)
    path = os.pathsep.join([way.environment["PYTHONPATH"], str(pytest_folder)])
    options = shlex.split("-m gpu -q --tb=short -W default -p no:cacheprovider")
    words = ["-m", "pytest", *options, "-k", chosen, "tests/measure/test_cuda.py"]
    env = way.environment | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run([str(way.python), *words], cwd=ROOT, env=env, capture_output=True, text=True)
    finally:
        shutil.rmtree(way.machine, ignore_errors=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
