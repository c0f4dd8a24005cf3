"""Whole logs: mixed ranks, wrapped and cut messages, progress bars, nvidia-smi, encodings, and any size."""

import io
import json
import tracemalloc

import pytest

from vramprobe.errors import VramprobeError
from vramprobe.explain.log import LogFacts, read
from vramprobe.units import GIB, MIB

SITE = "/home/joe/env/lib/python3.10/site-packages/"
MESSAGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.07 GiB. GPU {gpu} has a total capacity of "
    "23.68 GiB of which 609.80 MiB is free. Including non-PyTorch memory, this process has 23.08 GiB memory in use. Of "
    "the allocated memory 20.90 GiB is allocated by PyTorch, and 1.87 GiB is reserved by PyTorch but unallocated. If"
)
FORWARD = ("transformers/trainer.py", "compute_loss"), ("transformers/loss/loss_utils.py", "ForCausalLMLoss")
BACKWARD = ("accelerate/accelerator.py", "backward"), ("torch/_tensor.py", "backward")


def traceback(frames: tuple[tuple[str, str], ...], gpu: int = 0) -> list[str]:
    lines = [line for path, name in frames for line in (f'  File "{SITE}{path}", line 7, in {name}', "    x = y(z)")]
    return ["Traceback (most recent call last):", *lines, MESSAGE.format(gpu=gpu)]


def mixed(first: list[str], second: list[str], prefix: str) -> list[str]:
    """Lines of two ranks in turn."""
    return [prefix.format(rank) + line for pair in zip(first, second, strict=True) for rank, line in enumerate(pair)]


def read_text(*lines: str) -> LogFacts:
    return read(io.BytesIO("\n".join(lines).encode()))


def functions(log: LogFacts) -> list[list[str]]:
    return [[frame.function for frame in failure.frames] for failure in log.failures]


def test_a_traceback_and_its_message() -> None:
    log = read_text("starting", *traceback(FORWARD), "done")
    (failure,) = log.failures
    assert functions(log) == [["compute_loss", "ForCausalLMLoss"]]
    assert (failure.rank, failure.is_mixed, failure.oom.device) == (None, False, 0)


@pytest.mark.parametrize("prefix", ["[rank{}]: ", "[default{}]:", "{}: ", "[{}]:"])
def test_ranks_that_write_at_once_are_told_apart(prefix: str) -> None:
    log = read_text(*mixed(traceback(FORWARD, 0), traceback(BACKWARD, 1), prefix))
    assert functions(log) == [["compute_loss", "ForCausalLMLoss"], ["backward", "backward"]]
    assert [failure.rank for failure in log.failures] == ["0", "1"]
    assert not any(failure.is_mixed for failure in log.failures)


def test_workers_of_ray_and_colors_are_taken_off() -> None:
    lines = [f"\x1b[36m(TaskRunner pid=41, ip=10.0.0.1)\x1b[0m {line}" for line in traceback(FORWARD)]
    log = read_text(*lines)
    assert functions(log) == [["compute_loss", "ForCausalLMLoss"]]
    assert log.failures[0].rank == "pid 41"


def test_ranks_without_a_prefix_are_said_to_be_mixed() -> None:
    log = read_text(*mixed(traceback(FORWARD, 0), traceback(BACKWARD, 1), ""))
    assert log.failures[0].is_mixed


def test_an_earlier_handled_error_lends_no_frames() -> None:
    earlier = ["Traceback (most recent call last):", '  File "a.py", line 1, in evaluate', "KeyError: 'x'"]
    log = read_text(*earlier, *traceback(BACKWARD))
    assert functions(log) == [["backward", "backward"]]
    assert not log.failures[0].is_mixed


def test_a_wrapped_message_is_joined_and_a_repeated_one_counts_once() -> None:
    whole = MESSAGE.format(gpu=0)
    words = whole.split()
    wrapped = [" ".join(words[start : start + 12]) for start in range(0, len(words), 12)]
    log = read_text(*traceback(FORWARD)[:-1], *wrapped, "the launcher repeats:", whole)
    (failure,) = log.failures
    (same,) = read(io.BytesIO("\r\n".join(wrapped).encode())).failures
    assert failure.oom.unused == same.oom.unused == round(1.87 * GIB)
    assert len(failure.frames) == 2


def test_a_log_that_ends_in_the_message() -> None:
    log = read_text(*traceback(FORWARD)[:-1], MESSAGE.format(gpu=0)[:110])
    (failure,) = log.failures
    assert failure.oom.is_cut
    assert (failure.oom.requested, failure.oom.free) == (round(2.07 * GIB), None)


def test_rich_and_notebook_tracebacks() -> None:
    rich = ["╭─── Traceback (most recent call last) ───╮", f"│ {SITE}transformers/trainer.py:9 in evaluate │"]
    assert functions(read_text(*rich, MESSAGE.format(gpu=0))) == [["evaluate"]]
    new = [
        "OutOfMemoryError       Traceback (most recent call last)",
        f"File {SITE}trl/x.py:9, in Trainer.evaluate(self)",
    ]
    assert functions(read_text(*new, MESSAGE.format(gpu=0))) == [["evaluate"]]
    old = ["RuntimeError           Traceback (most recent call last)", f"{SITE}trl/x.py in evaluate(self, x)"]
    assert functions(read_text(*old, MESSAGE.format(gpu=0))) == [["evaluate"]]


def test_lines_of_containers_and_loggers() -> None:
    whole = traceback(FORWARD)
    docker = [json.dumps({"log": f"{line}\n", "stream": "stderr"}) for line in whole]
    criterion = [f"2026-11-02T10:11:12.123456789Z stderr F {line}" for line in whole]
    logger = [f"(EngineCore_DP0 pid=41) ERROR 11-02 10:11:12 [core.py:708] {line}" for line in whole]
    one = [json.dumps({"pod": {"name": "x", "messages": ["a", "\n".join(whole)]}})]
    escaped = [f"ErrorMessage {json.dumps(chr(10).join(whole))}"]
    for lines in (docker, criterion, logger, one, escaped):
        (failure,) = read_text(*lines).failures
        assert [frame.function for frame in failure.frames] == ["compute_loss", "ForCausalLMLoss"]
        assert {frame.source for frame in failure.frames} == {"x = y(z)"}
        assert failure.oom.requested == round(2.07 * GIB)
    assert len(read_text('{"log": "' + "[" * 5000 + '"', MESSAGE.format(gpu=0)).failures) == 1


def test_the_source_line_of_a_frame_is_kept_per_rank() -> None:
    first, second = traceback(FORWARD), traceback(BACKWARD)
    second[2] = "    loss.backward()"
    log = read_text(*mixed(first, second, "[rank{}]: "))
    sources = [frame.source for failure in log.failures for frame in failure.frames]
    assert sources == ["x = y(z)", "x = y(z)", "loss.backward()", "x = y(z)"]
    assert read_text('  File "a.py", line 3, in f', MESSAGE.format(gpu=0)).failures[0].frames[0].source == ""


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_lines_in_no_known_form_are_numbered_as_an_editor_numbers_them(end: str) -> None:
    lines = [
        "starting",
        " 1%|#| 1/9 [00:01<00:08]\r 2%|#| 2/9 [00:02<00:07]",
        "no available memory",
        "x",
        "alloc failed",
    ]
    log = read(io.BytesIO(end.join(lines).encode()))
    assert log.unknown == [3, 5]
    assert log.num_lines == 5


SUMMARY = """\
|===========================================================================|
|                  PyTorch CUDA memory summary, device ID {device}                 |
|---------------------------------------------------------------------------|
|            CUDA OOMs: 1            |        cudaMalloc retries: 3         |
|        Metric         | Cur Usage  | Peak Usage | Tot Alloc  | Tot Freed  |
| Allocated memory      |  17182 MiB |  49319 MiB |  84301 MiB |  67119 MiB |
|       from large pool |  17025 MiB |  49262 MiB |  84025 MiB |  66999 MiB |
|       from small pool |    156 MiB |    156 KiB |    276 MiB |    119 MiB |
| GPU reserved memory   |     50 GiB |     60 GiB |  50112 MiB |      0 B   |
|===========================================================================|
"""


def test_tables_of_memory_summary() -> None:
    log = read_text(*SUMMARY.format(device=0).splitlines(), "x", *SUMMARY.format(device=1).splitlines(), "x")
    assert not log.summaries.is_open
    first, second = log.summaries.tables.values()
    assert (first.device, second.device, first.num_ooms, first.num_retries) == (0, 1, 1, 3)
    peak = {"Allocated memory": 49319 * MIB, "GPU reserved memory": 60 * GIB}
    pools = {"Allocated memory from large pool": 49262 * MIB, "Allocated memory from small pool": 156 * 1024}
    assert first.peak == second.peak == peak | pools
    assert first.now["GPU reserved memory"] == 50 * GIB
    assert log.readings.used == {}


def test_progress_settings_and_errors_without_figures() -> None:
    log = read_text(
        "  1%| | 8/494 [00:08<08:33, 1.7it/s]\r 18%|#8  | 88/494 [01:02<08:33,  1.7it/s]",
        "--model_name_or_path Qwen/Qwen2.5-7B --per_device_train_batch_size 2 --cutoff_len=2048",
        "Killed",
        " 99%|#8  | 400/494 [01:02<08:33,  1.7it/s]",
    )
    assert log.progress == (88, 494)
    assert log.settings == {"model": "Qwen/Qwen2.5-7B", "batch_size": "2", "seq_len": "2048"}
    assert [failure.oom.backend for failure in log.failures] == ["host"]


TABLE = """\
+-----------------------------------------------------------------------------------------+
|   0  NVIDIA A100-SXM4-80GB          On  |   00000000:07:00.0 Off |                    0 |
| N/A   34C    P0             62W /  400W |   {used}MiB /  81920MiB |      0%      Default |
+-----------------------------------------+------------------------+----------------------+
| Processes:                                                                              |
|    0   N/A  N/A     41234      C   /home/joe/bin/python                      4210MiB    |
|    0   N/A  N/A     41235      C   /home/joe/bin/python                     70210MiB    |
"""


def test_the_tables_of_nvidia_smi_and_its_csv() -> None:
    log = read_text(*TABLE.format(used=74420).splitlines(), *TABLE.format(used=1234).splitlines())
    assert log.readings.used == {0: 74420 * MIB}
    assert log.readings.total == {0: 81920 * MIB}
    assert log.readings.processes == {0: {41234: 4210 * MIB, 41235: 70210 * MIB}}
    csv = [
        "index, memory.used [MiB], memory.total [MiB]",
        "0, 12 MiB, 81920 MiB",
        "1, 800 MiB, 81920 MiB",
        "0, 9, x, y",
    ]
    assert read_text(*csv).readings.used == {0: 12 * MIB, 1: 800 * MIB}


def test_numbers_of_any_length_are_no_error() -> None:
    many = "9" * 5000
    lines = [
        f"--per_device_train_batch_size {many}",
        f"{many}/{many} [00:01<00:08]",
        f'  File "a.py", line {many}, in f',
        f"    x = torch.zeros({many}, {many})",
        f"CUDA out of memory. Tried to allocate {many}.00 GiB. GPU {many} has a total capacity of {many}.00 GiB",
        f"|   {many}   N/A  N/A  {many}   C   python   {many}MiB |",
        f"PyTorch CUDA memory summary, device ID {many}",
        f"triton OutOfResources: out of resource: shared memory, Required: {many}, Hardware limit: {many}.",
    ]
    assert len(read_text(*lines).failures) == 2


def test_encodings_and_binaries() -> None:
    text = "\n".join(traceback(FORWARD))
    assert len(read(io.BytesIO(text.encode("utf-16"))).failures) == 1  # PowerShell's >
    assert len(read(io.BytesIO(b"\xff\xfa\n" + text.encode())).failures) == 1
    with pytest.raises(VramprobeError, match="binary"):
        read(io.BytesIO(b"\x7fELF\0\0\1"))


class Endless(io.RawIOBase):
    """``num_bytes`` of one line after the other, or of one line without an end, then a failure."""

    def __init__(self, unit: bytes, num_bytes: int) -> None:
        self.unit, self.left = unit, num_bytes
        self.tail = io.BytesIO(b"\n" + "\n".join(traceback(FORWARD)).encode())

    def read(self, size: int = -1) -> bytes:
        if self.left <= 0:
            return self.tail.read(size)
        chunk = self.unit * max(size // len(self.unit), 1)
        self.left -= len(chunk)
        return chunk


@pytest.mark.parametrize("unit", [b"y" * 999 + b"\n", b"x" * 100], ids=["lines", "one line"])
def test_a_huge_log_is_never_held_whole(unit: bytes) -> None:
    num_bytes = 24 * MIB
    tracemalloc.start()
    try:
        log = read(Endless(unit, num_bytes))  # type: ignore[arg-type]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert functions(log) == [["compute_loss", "ForCausalLMLoss"]]
    assert log.num_bytes > 0.9 * num_bytes
    assert peak < 12 * MIB


def long_log(num_bytes: int) -> bytes:
    """Lines of a trainer for so many bytes, then an error."""
    step = b"{'loss': 1.5, 'learning_rate': 1e-05}\r 18%|##  | 88/494 [04:04<18:48,  2.78s/it]\n"
    return step * (num_bytes // len(step)) + "\n".join(traceback(FORWARD)).encode() + b"\nafter it\n"


def test_chunks_that_tell_nothing_are_passed_over_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vramprobe.explain.log._SETTINGS_BYTES", 0)
    monkeypatch.setattr("vramprobe.explain.log._BROAD_BYTES", 0)
    monkeypatch.setattr("vramprobe.explain.lines._CHUNK_BYTES", 2**16)
    text = long_log(MIB // 2)
    quick = read(io.BytesIO(text))
    monkeypatch.setattr("vramprobe.explain.log._Reader._wants_all", lambda self: True)
    assert read(io.BytesIO(text)) == quick
    assert (functions(quick), quick.progress) == ([["compute_loss", "ForCausalLMLoss"]], (88, 494))


@pytest.mark.parametrize("chunk_bytes", [7, 64, 1000, 2**20])
def test_an_error_across_the_borders_of_chunks(monkeypatch: pytest.MonkeyPatch, chunk_bytes: int) -> None:
    monkeypatch.setattr("vramprobe.explain.lines._CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr("vramprobe.explain.log._SETTINGS_BYTES", 0)
    log = read(io.BytesIO(long_log(4000)))
    assert (functions(log), len(log.failures)) == ([["compute_loss", "ForCausalLMLoss"]], 1)
    assert log.progress == (88, 494)


def test_every_end_of_a_log_gives_an_answer_or_says_that_there_is_none() -> None:
    text = "\n".join(traceback(FORWARD))
    whole = text.index(MESSAGE.format(gpu=0)[:40])
    for end in range(0, len(text), 7):
        log = read(io.BytesIO(text[:end].encode()))
        if end > whole + 80:
            assert log.failures[0].oom.requested == round(2.07 * GIB)
        elif end < whole:
            assert log.failures == []
