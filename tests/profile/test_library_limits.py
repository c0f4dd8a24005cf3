"""What a profile says of NVIDIA's libraries: sizes that are counted as 0, functions that are missing."""

from __future__ import annotations

from vramprobe.emulate.machine import MachineEvent
from vramprobe.profile.library_limits import last_lines_of, library_notes, library_remarks


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
