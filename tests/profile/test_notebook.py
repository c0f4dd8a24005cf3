"""``%load_ext vramprobe`` in a kernel: the profile so far, as often as it is asked for, and the kernel goes on."""

import subprocess
from pathlib import Path

import pytest
from emulated import require_emulation
from grids import exhaustive, grid
from run_command import TRAIN

from vramprobe.emulate.enter import entrance

SHELL = """
class Shell:
    def register_magic_function(self, function, kind, name): self.magics = {(kind, name): function}
shell = Shell()
import vramprobe
vramprobe.load_ipython_extension(shell)
magic = shell.magics["line", "vramprobe"]
"""


def in_a_kernel(folder: Path, *cells: str) -> subprocess.CompletedProcess:
    require_emulation()
    (folder / "kernel.py").write_text("\n".join([SHELL, *cells]))
    way = entrance("RTX-4090")
    command = [str(way.python), str(folder / "kernel.py")]
    return subprocess.run(
        command, cwd=folder, env=way.environment | {"TMPDIR": str(folder)}, capture_output=True, text=True
    )


def test_a_kernel_is_shown_so_far_and_goes_on(tmp_path: Path) -> None:
    first, second = TRAIN.replace("NUM_STEPS", "5"), TRAIN.replace("NUM_STEPS", "1").replace("64, 1024", "640, 1024")
    again = "print('AGAIN'); magic('--gpus RTX-3090,T4 --save out.jsonl')"
    done = in_a_kernel(tmp_path, first, "magic('')", second, again)
    assert done.returncode == 0, done.stderr
    one, two = done.stdout.split("AGAIN")
    assert "4 steps; the last two are byte-identical" in one
    assert "of step" in one
    assert "weights" in one
    assert "of step 6" in two
    assert "RTX-3090" in two
    assert (tmp_path / "out.jsonl").read_text().count("\n") == 1
    assert not list(tmp_path.glob("vramprobe-profile-*"))


@pytest.mark.parametrize("words", grid(["--gpu all --what", "all", "--save"], "--save"))
def test_words_that_it_does_not_know_are_said_and_nothing_is_raised(words: str, tmp_path: Path) -> None:
    done = in_a_kernel(tmp_path, f"magic('{words}')", "print('goes on')")
    assert done.stdout == "goes on\n", done.stderr
    assert "it takes --gpus, --save and --timeline" in done.stderr


@exhaustive
def test_nothing_on_a_card_is_a_profile_without_one(tmp_path: Path) -> None:
    done = in_a_kernel(tmp_path, "magic('')")
    assert "no process used a GPU through torch" in done.stdout
