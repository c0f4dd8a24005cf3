"""Lifetimes: who watches Python's frames changes no bytes, or is told that it would."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from vramprobe import api
from vramprobe.allocator.allocator import CachingAllocator
from vramprobe.architecture import UnsupportedArchitecture, architecture
from vramprobe.bounds import tensors as parameters
from vramprobe.spec import resolve
from vramprobe.terms.cell.setup import setup_of
from vramprobe.terms.step.requests import Run
from vramprobe.terms.step.walk import one_of_each_kind, play, walk_layers
from vramprobe.terms.tape.lifetimes import OutlivedStep
from vramprobe.terms.tape.tape import Tape

CELLS: dict[str, dict[str, Any]] = {
    "checkpoints": {"method": "qlora", "gradient_checkpointing": True},
    "mixed": {"method": "full", "recipe": "mixed", "grad_accum": 2},
    "fused loss": {"method": "lora", "fused_linear_cross_entropy": True},
}


@contextmanager
def frames_kept(install: Callable[[Any], None], installed: Callable[[], Any]) -> Iterator[list[FrameType]]:
    """Inside, a trace or profile function keeps every frame, as a debugger may."""
    kept: list[FrameType] = []

    def keep(frame: FrameType, event: str, argument: object) -> Any:
        kept.append(frame)
        return keep

    before = installed()
    install(keep)
    try:
        yield kept
    finally:
        install(before)


KEEPERS = [(sys.settrace, sys.gettrace), (sys.setprofile, sys.getprofile)]
by_keeper = pytest.mark.parametrize("keeper", KEEPERS, ids=["trace", "profile"])


def logged(**options: Any) -> Any:
    run = new_run(**options)
    run._num_steps = 1
    return run._log.parts, run._log.end(0)


def new_run(**options: Any) -> Run:
    spec = resolve(device="cuda", model="qwen3-0.6b", batch_size=1, seq_len=64, num_layers=3, **options)
    return Run(spec, CachingAllocator(), workspace_bytes=1)


def walked(**options: Any) -> Any:
    spec = resolve(device="cuda", model="llama-3.2-1b", batch_size=2, seq_len=64, **options)
    arch = architecture(spec.architecture)
    return walk_layers(setup_of(spec, arch, parameters.tensors(spec, arch)), one_of_each_kind(arch))


@by_keeper
@pytest.mark.parametrize("options", CELLS.values(), ids=CELLS)
def test_moments_are_the_same_while_frames_are_kept(options: dict[str, Any], keeper: Any) -> None:
    expected = walked(**options)
    with frames_kept(*keeper) as kept:
        found = walked(**options)
    assert kept
    assert found == expected


@by_keeper
@pytest.mark.parametrize("options", CELLS.values(), ids=CELLS)
def test_requests_are_the_same_while_frames_are_kept(options: dict[str, Any], keeper: Any) -> None:
    options = {"method": "full"} | options
    expected = logged(**options)
    with frames_kept(*keeper):
        found = logged(**options)
    assert found == expected


def test_predict_says_the_same_under_a_tracer() -> None:
    words = "model='gpt2', method='full', recipe='mixed', batch_size=2, seq_len=512, gpu='RTX-4090'"
    script = (
        "import sys\nfrom vramprobe import api\nkept = []\n"
        "def keep(frame, event, argument):\n    kept.append(frame)\n    return keep\n"
        f"sys.settrace(keep)\nprint(api.predict({words}).model_dump_json())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    expected = api.predict(
        model="gpt2", method="full", recipe="mixed", batch_size=2, seq_len=512, gpu="RTX-4090"
    ).model_dump_json()
    assert done.stdout.strip() == expected


def test_values_that_outlive_their_step_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same without what turns the tracer off."""
    monkeypatch.setattr("vramprobe.terms.step.walk.play", play.__wrapped__)
    with frames_kept(*KEEPERS[0]), pytest.raises(OutlivedStep, match="outlived the step"):
        walked(method="lora")
    run = new_run(method="lora")
    with frames_kept(*KEEPERS[0]), pytest.raises(OutlivedStep, match="requests outlived the step"):
        Run._chunks.__wrapped__(run, range(3), 1)


def test_a_value_that_ends_in_another_thread_is_refused() -> None:
    """As where a sampling profiler has the frame while its function returns."""
    tape = Tape()
    held = [tape.new(1, "fp32")]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    with pytest.raises(OutlivedStep, match="another thread"):
        tape.require_own_thread()


def test_the_frames_of_a_step_that_failed_change_no_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = walked(method="lora")

    def fails(*_: Any) -> None:
        raise UnsupportedArchitecture("no rule")

    with monkeypatch.context() as patch:
        patch.setattr("vramprobe.terms.models.modules.Model.activation", fails)
        with pytest.raises(UnsupportedArchitecture) as failed:
            walked(method="lora")
    assert failed.value.__traceback__ is not None  # which holds the frames of that walk
    assert walked(method="lora") == expected


@by_keeper
def test_the_tracer_is_set_again_when_a_step_fails(keeper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    install, installed = keeper
    monkeypatch.delattr("vramprobe.terms.models.modules.Model.activation")
    with frames_kept(install, installed):
        tracer = installed()
        with pytest.raises(AttributeError):
            walked(method="lora")
        assert installed() is tracer is not None
