"""Notes of a profile: NVIDIA's libraries, why a command failed, images of replaced rows that a program drops."""

from pathlib import Path

import pytest
from profile_factory import analysed

from vramprobe.emulate.machine import MachineEvent
from vramprobe.profile.notes import last_lines_of, library_notes, library_remarks, unread_images, why_not


def event(kind: str, name: str, detail: str) -> MachineEvent:
    return MachineEvent(kind=kind, name=name, pid=1, detail=detail)


def test_a_library_is_named_once():
    sizes = ("cusolverDnSgetrf_bufferSize", "cusolverDnXgeqrf_bufferSize")
    events = [event("lower_bound", name, "libcusolver.so.12") for name in sizes]
    events += [event("lower_bound", "cudnnBackendGetAttribute", "libcudnn"), event("static_runtime", "/a.so", "")]
    [note] = library_notes(library_remarks(events))
    assert note.startswith("memory is a lower bound: workspaces of cuDNN, cuSOLVER are counted as 0, because")


def test_an_assumed_workspace_is_a_note_once_and_no_lower_bound():
    names = ("cudnnBackendGetAttribute", "cudnnGetRNNTempSpaceSizes")
    [note] = library_notes(library_remarks([event("assumed_workspace", name, "libcudnn") for name in names]))
    assert note.startswith("workspaces of cuDNN follow what cuDNN 9.19 asked for on an H200; for other cards")


def test_a_missing_function_is_a_note_and_nothing_is_said_of_a_run_without():
    sentence = "cusparseSpGEMM_compute of libcusparse.so.12 is not emulated: …"
    assert library_notes(library_remarks([event("unsupported_function", "cusparseSpGEMM_compute", sentence)])) == [
        sentence
    ]
    assert library_notes(library_remarks([])) == []
    assert library_notes({}) == []


def test_the_last_line_is_the_emulators_own_sentence_and_not_the_list_of_modules():
    ended = [event("unknown_function", "cudaFrobnicate", "libcudart.so.13: cudaFrobnicate is not emulated: …")]
    tail = ['  File "train.py", line 7 in main', "", "Extension modules: numpy._core, torch._C (total: 12)"]
    lines = last_lines_of(tail, library_remarks(ended))
    assert lines == [
        '  File "train.py", line 7 in main',
        "vramprobe: libcudart.so.13: cudaFrobnicate is not emulated: …",
    ]
    assert last_lines_of(tail, {}) == tail[:1]


ROWS = {
    "kind": "dataset",
    "what": "org/vlm",
    "by": "512 rows of 256 tokens, known: messages, images; one image of 672 × 672",
}
COUNTED = {"kind": "image tokens", "what": "org/m", "by": "1,441 for 672 × 672 pixels, counted by Qwen3VLProcessor"}


@pytest.mark.parametrize(
    ("replaced", "tokens", "samples", "is_said"),
    [
        ([ROWS, COUNTED], 8 * 272, 8, True),
        ([ROWS, COUNTED], 8 * 1713, 8, False),
        ([ROWS, COUNTED], 8 * 1713, 1, False),  # packed
        ([ROWS, COUNTED], None, 8, False),
        ([COUNTED], 8 * 272, 8, False),  # the program's own rows, which may be text
        ([ROWS, COUNTED | {"by": "not counted: ValueError: no"}], 8 * 272, 8, False),
    ],
)
def test_a_sample_shorter_than_its_image_has_lost_it(replaced, tokens, samples, is_said) -> None:
    said = unread_images(replaced, tokens, samples)
    assert bool(said) == is_said
    assert not said or "a sample has 272 tokens, an image of 672 × 672 pixels alone 1,441" in said[0]


def test_a_library_with_a_runtime_of_its_own_is_named(tmp_path: Path) -> None:
    libraries = ["libcute_dsl_runtime.so", "libother.so"]
    emulator = {"version": "1", "num_cards": 1, "context_bytes": 0, "static_runtimes": libraries}
    went_on, failed = (analysed(tmp_path, emulator=emulator, exit_status=status).warnings for status in (0, 1))
    assert not any("CUDA's runtime" in text for text in went_on)
    first, second = (text for text in failed if "CUDA's runtime" in text)
    assert first.startswith("libcute_dsl_runtime.so has CUDA's runtime in it")
    assert "--gdn-prefill-backend triton" in first
    assert second == "libother.so has CUDA's runtime in it, which an emulated GPU cannot serve: its kernels do not run"


def test_a_kernel_that_cannot_be_compiled_is_one_line() -> None:
    log = ["csrc/flashinfer_norm_binding.cu: cublasLt.h: No such file or directory", "ninja: build stopped: failed."]
    assert "VLLM_USE_FLASHINFER_SAMPLER=0" in (why_not(log) or "")
    assert why_not(log[:1]) is None
    assert why_not(["ninja: build stopped: the program's own extension failed."]) is None


_TRL = "TRL currently supports vLLM versions from 0.22.0 to 0.31.0. You have version {} installed. We recommend"


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (
            ["import vllm._C", "ImportError: libcudart.so.12: cannot open shared object file: No such"],
            "libcudart.so.12",
        ),
        ([_TRL.format("0.19.0"), "TypeError: LLM.__init__()"], "0.19.0 is installed, and this TRL supports 0.22.0"),
        (["ModuleNotFoundError: No module named 'flash_attn'"], "choose SDPA"),
        ([_TRL.format("0.40.0")], "vLLM 0.40.0 is installed"),
        (
            [_TRL.format("0.32.0"), "Value error, Unknown quantization method: bitsandbytes. Must"],
            "has no bitsandbytes",
        ),
    ],
)
def test_a_wrong_release_and_a_missing_library_are_one_line(log: list[str], said: str) -> None:
    assert said in (why_not(log) or "")
    assert why_not(["ImportError: libx.so.1: cannot open shared object file", "TypeError"]) is None


@pytest.mark.parametrize("exit_status", [0, 1])
def test_only_a_command_that_failed_is_told_why(tmp_path: Path, exit_status: int) -> None:
    warnings = analysed(tmp_path, exit_status=exit_status, tail=[_TRL.format("0.32.0")]).warnings
    assert any("this TRL supports" in one for one in warnings) == (exit_status == 1)
