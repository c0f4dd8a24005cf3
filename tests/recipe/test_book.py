"""The cache and the recording process: what ends early leaves one clear line and nothing behind."""

import os
from pathlib import Path

import pytest

from vramprobe import api, catalog
from vramprobe.emulate.enter import Entrance
from vramprobe.recipe import recorder
from vramprobe.recipe.book import recorded_as
from vramprobe.recipe.recipe import CannotRecord
from vramprobe.recipe.recorder import USUAL, close_recorders, record_packed

SPEC = recorded_as(api.cell(model="smollm2-135m", method="lora", device="cuda", batch_size=1, seq_len=64))
SAYS = """#!/bin/sh
read request
echo '{"say": "recording run 1 of 4"}'
"""


def stands_in(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> Path:
    """In place of the recording process, ``script``; the emulated machine's folder."""
    program, machine = folder / "python", folder / "machine"
    program.write_text(SAYS + script)
    program.chmod(0o755)
    machine.mkdir()
    way = Entrance(python=program, environment=dict(os.environ), machine=machine)
    monkeypatch.setattr(recorder, "entrance", lambda *words, **options: way)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(recorder.tempfile, "tempdir", str(folder))
    return machine


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("kill -9 $$", "the recording's process ended with -9"),
        ("echo no memory left >&2; exit 3", "ended with 3: no memory left"),
        (
            "echo \"ModuleNotFoundError: No module named 'pydantic'\" >&2; exit 1",
            "has no pydantic, which a recording needs: .*pip install .*pydantic",
        ),
        (
            """echo '{"error": "peft has no layer for it", "kind": "CannotRecord"}'; cat > /dev/null""",
            "peft has no layer for it",
        ),
    ],
)
def test_a_recording_that_ends_early_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, words: str
) -> None:
    machine = stands_in(monkeypatch, tmp_path, script)
    said: list[str] = []
    with pytest.raises(CannotRecord, match=words):
        record_packed(SPEC, catalog.find_gpu("H100-SXM"), said.append)
    assert said == ["recording run 1 of 4"]
    close_recorders()
    assert not machine.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["python"]


def test_an_interrupted_recording_ends_its_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = stands_in(monkeypatch, tmp_path, "cat > /dev/null")

    def interrupt(words: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record_packed(SPEC, catalog.find_gpu("H100-SXM"), interrupt)
    assert recorder._RECORDERS == {}
    assert not machine.exists()


def test_a_process_that_was_killed_between_two_cells_is_started_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = stands_in(monkeypatch, tmp_path, """echo '{"error": "no", "kind": "CannotRecord"}'; cat > /dev/null""")
    gpu = catalog.find_gpu("H100-SXM")
    for _ in range(2):
        with pytest.raises(CannotRecord, match="no"):
            record_packed(SPEC, gpu, lambda words: None)
        process = recorder._RECORDERS[gpu.short_name, USUAL]._process
        process.kill()
        process.wait()
        machine.mkdir(exist_ok=True)
    close_recorders()
