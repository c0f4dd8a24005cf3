"""``vramprobe explain`` from its input to its words: snapshots, logs, wrong input, and what it does not repeat."""

import gzip
import io
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import HERE, vramprobe
from test_log import SUMMARY

from vramprobe import api
from vramprobe.architecture import architecture
from vramprobe.catalog import find_model
from vramprobe.errors import SpecError, VramprobeError
from vramprobe.explain.failure import in_words
from vramprobe.explain.phases import UNKNOWN, Phase
from vramprobe.explain.report import report_of
from vramprobe.explain.requests import Factors, shape_in, tensors_of_size
from vramprobe.units import GIB, MIB

LOG = """\
+ python /home/joe/secret/train.py --token hf_abcdef --model_name_or_path meta-llama/Llama-3.1-8B \
--per_device_train_batch_size 4 --max_length 2048
[rank1]: Traceback (most recent call last):
[rank1]:   File "/home/joe/secret/train.py", line 33, in <module>
[rank1]:     trainer.train(token="hf_abcdef")
[rank1]:   File "/home/joe/env/site-packages/transformers/loss/loss_utils.py", line 47, in ForCausalLMLoss
[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.91 GiB. GPU 1 has a total capacity of \
79.19 GiB of which 3.06 GiB is free. Including non-PyTorch memory, this process has 76.12 GiB memory in use. Of the \
allocated memory 74.10 GiB is allocated by PyTorch, and 503.92 MiB is reserved by PyTorch but unallocated. If
"""


def failing_in(path: str, function: str) -> str:
    """LOG, with the error in this function."""
    return LOG.replace("transformers/loss/loss_utils.py", path).replace("ForCausalLMLoss", function)


def explained(text: str | bytes, **options: Any) -> list[str]:
    return in_words(report_of(io.BytesIO(text if isinstance(text, bytes) else text.encode()), **options))


def test_a_log_in_about_ten_lines_without_its_paths_and_secrets() -> None:
    lines = explained(LOG)
    assert lines == [
        "GPU 1 ran out of memory: 3.91 GiB requested, 3.06 GiB free of 79.19 GiB",
        "     74.10 GiB  allocated by PyTorch",
        "    503.92 MiB  reserved but unused",
        "      1.53 GiB  CUDA context and libraries (about)",
        "phase: forward, the loss (transformers/loss/loss_utils.py:47 in ForCausalLMLoss)",
        "cause: size: even with all unused memory the request lacks 366.48 MiB",
        "the request has the size of logits: 4 × 2048 tokens × 128256 vocabulary in fp32",
        "try: 1. a chunked or fused loss that never holds all logits (use_liger_kernel; TRL: loss_type='chunked_nll')",
        "     2. halve the per-device batch size and double gradient_accumulation_steps",
        "     3. a shorter max_length",
    ]


def test_json_has_bytes_and_no_text_of_the_log() -> None:
    said = json.dumps(report_of(io.BytesIO(LOG.encode())).as_json())
    assert json.loads(said)["oom"]["outside"] == pytest.approx(1.53 * GIB, abs=0.02 * GIB)
    assert "joe" not in said
    assert "hf_" not in said


def test_a_model_that_a_log_names_is_only_looked_up_in_the_catalog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vramprobe.catalog.hub_config.config_file", lambda name, near: pytest.fail("the hub is asked"))
    for name in ("someone/private-model", "/etc/passwd", "./folder"):
        assert not any("size of" in line for line in explained(LOG.replace("meta-llama/Llama-3.1-8B", name)))
    assert any("size of" in line for line in explained(LOG.replace("meta-llama", "x"), model="llama-3.1-8b"))


def test_tensors_of_known_sizes() -> None:
    of = find_model("llama-3.1-8b")
    factors = Factors(of.name, architecture(of.config), of.config["vocab_size"], 4, 2048, 8)
    names = tensors_of_size(14336 * 4096 * 2, 0, factors, UNKNOWN)
    assert [name.partition(" ")[0] for name in names] == ["gate_proj", "up_proj", "down_proj"]
    assert all("14336" in name and "4096" in name and "bf16" in name for name in names)
    (share,) = tensors_of_size(-(-factors.architecture.num_params // 8) * 4, MIB, factors, UNKNOWN)
    assert share == "all 8,030,261,248 parameters / 8 GPUs in fp32"
    assert tensors_of_size(123 * MIB + 1, 1000, factors, UNKNOWN) == []
    scores = tensors_of_size(4 * 32 * 2048**2 * 4, 0, factors, Phase("forward", "attention"))
    assert "eager attention scores: 4 × 32 heads × 2048² in fp32" in scores
    assert tensors_of_size(4 * 32 * 2048**2 * 4, 0, factors, Phase("forward", "the loss")) == [
        "logits: 4,186 tokens × 128256 vocabulary in fp32",
        "logits: 8,372 tokens × 128256 vocabulary in bf16 or fp16",
    ]
    logits = 4 * 2048 * 128256 * 2
    for detail in ("gathering sharded parameters", "the vision tower", "recomputing a checkpointed layer"):
        assert not any(name.startswith("logits") for name in tensors_of_size(logits, 0, factors, Phase("", detail)))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("buf = empty_strided_cuda((65536, 4096), (4096, 1), torch.bfloat16)", "65536 × 4096 of 2 bytes each"),
        ("mask = torch.zeros(32, 2048, 4096)", "32 × 2048 × 4096 of 2 bytes each"),
        ("x = x.new_empty((16, 2048, 4096), dtype=torch.float32)", "16 × 2048 × 4096 of 4 bytes each"),
        ("buf = empty_strided_cuda((65536, 4097), (4097, 1), torch.bfloat16)", ""),
        ("return self.current_callable(inputs)", ""),
    ],
)
def test_the_shape_that_the_failing_line_names_counts_only_where_it_is_the_request(source: str, said: str) -> None:
    assert shape_in(source, 512 * MIB, 5242) == said


def test_an_embedding_or_head_is_named_by_its_model_and_advice_begins_with_it() -> None:
    """A gradient that a compiled backward makes: by the source's own sides, the model's, and a larger vocabulary."""
    text = """  File "/x/torch/_inductor/output_code.py", line 465, in __call__
    return self.current_callable(inputs)
  File "/tmp/torchinductor_u/ab/cabc.py", line 2391, in call
    {source}
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {size} GiB. GPU 0 has a total capacity of 14.74 GiB of \
which 1.31 GiB is free.
"""
    made = explained(text.format(source="b = empty_strided_cuda((262208, 2560), (1, 1), torch.float32)", size="2.50"))
    assert any("262208 × 2560 of 4 bytes each, the shape of gemma-3-4b's embedding or head" in line for line in made)
    rows = explained(text.format(source="b = empty_strided_cuda((65536, 2560), (2560, 1), torch.float32)", size="0.62"))
    assert not any("embedding or head" in line for line in rows)  # as many tokens as a batch may have
    for model, size, said in (
        ("gemma-3-4b", "2.50", "embed_tokens (262208 × 2560) in fp32"),
        ("gemma-3-4b", "2.56", "an embedding or head of 267,912 to 268,959 tokens × 2560 in fp32"),
        ("qwen3.5-9b", "1.89", "embed_tokens (248320 × 4096) in bf16 or fp16"),
        ("gemma-4-31b", "2.62", "an embedding or head (262144 × 5376) in bf16 or fp16"),
    ):
        lines = explained(text.format(source="return f(x)", size=size), model=model)
        assert any(said in line for line in lines), lines
        assert any(line.startswith("try: 1. train neither embeddings nor head") for line in lines)
    assert not any("embedding" in line for line in explained(text.format(source="", size="2.80"), model="gemma-3-4b"))


def block(size: int, state: str, line: int) -> dict[str, Any]:
    frames = [
        {"filename": "??", "line": 0, "name": "at::empty"},
        {"filename": "/env/site-packages/torch/nn/functional.py", "line": 9, "name": "linear"},
        {"filename": "/home/joe/model.py", "line": line, "name": "forward"},
    ]
    return {"size": size, "requested_size": size, "state": state, "frames": frames}


def segment(address: int, size: int, *blocks: dict[str, Any]) -> dict[str, Any]:
    own = {"device": 0, "address": address, "total_size": size, "stream": 0, "segment_type": "large"}
    return own | {"blocks": list(blocks)}


def snapshot(**changes: Any) -> dict[str, Any]:
    blocks = [block(5 * MIB, "active_allocated", 3), block(7 * MIB, "inactive", 4)]
    used = segment(0, 20 * MIB, *blocks, block(8 * MIB, "active_allocated", 3))
    segments = [used, segment(64 * MIB, 4 * MIB, block(4 * MIB, "inactive", 5))]
    frames = [{"filename": "/env/site-packages/torch/optim/adam.py", "line": 9, "name": "_init_group"}]
    oom = {"action": "oom", "size": 10 * MIB, "device_free": 1 * MIB, "stream": 0, "frames": frames}
    return {"segments": segments, "device_traces": [[oom]]} | changes


def test_a_snapshot_names_its_lines_and_what_is_unused() -> None:
    lines = explained(pickle.dumps(snapshot()))
    assert lines == [
        "GPU 0 ran out of memory: 10.00 MiB requested, 1.00 MiB free",
        "     13.00 MiB  allocated by PyTorch",
        "     11.00 MiB  reserved but unused",
        "phase: optimizer step, creating the optimizer state (torch/optim/adam.py:9 in _init_group)",
        "cause: fragmentation: 11.00 MiB are reserved but unused, enough for the request, but in pieces that "
        "are too small",
        "     13.00 MiB  model.py:3 in forward",
        "note: 2 live blocks; the largest unused one has 7.00 MiB",
        "note: 4.00 MiB are in unused segments, which torch.cuda.empty_cache() returns",
        "try: 1. set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (PYTORCH_ALLOC_CONF since PyTorch 2.9) "
        "(at most 11.00 MiB)",
        "     2. an 8-bit or paged optimizer (optim=adamw_bnb_8bit, paged_adamw_8bit)",
        "     3. shard the optimizer state (ZeRO, FSDP) over more GPUs, or offload it",
    ]


def entry(action: str, address: int, size: int, line: int = 1) -> dict[str, Any]:
    frames = [{"filename": "/home/joe/model.py", "line": line, "name": "forward"}]
    return {"action": action, "addr": address, "size": size, "frames": frames}


def test_a_snapshot_without_an_error_shows_the_highest_moment_of_its_history() -> None:
    trace = [
        entry("free_requested", 1, 2 * MIB),  # allocated before the history begins
        entry("alloc", 2, 9 * MIB, 4),
        entry("segment_alloc", 2, 20 * MIB),
        entry("alloc", 3, 1 * MIB, 5),
        entry("free_requested", 2, 9 * MIB),
        entry("free_completed", 2, 9 * MIB),
        entry("alloc", 4, 3 * MIB, 6),
    ]
    blocks = [
        block(1 * MIB, "active_allocated", 5) | {"address": 3},
        block(3 * MIB, "active_allocated", 6) | {"address": 4},
        block(5 * MIB, "active_allocated", 7) | {"address": 5},  # since before the history
        block(2 * MIB, "inactive", 8) | {"address": 6},
    ]
    segments = [segment(3, 11 * MIB, *blocks), segment(90, 4 * MIB, block(4 * MIB, "inactive", 9))]
    lines = explained(pickle.dumps(snapshot(segments=segments, device_traces=[trace])))
    assert lines == [
        "GPU 0 at the snapshot, which records no out-of-memory error",
        "      9.00 MiB  allocated by PyTorch",
        "      6.00 MiB  reserved but unused",
        "cause: unknown: no failed request is recorded",
        "      9.00 MiB  model.py:4 in forward",
        "      5.00 MiB  model.py:7 in forward",
        "      1.00 MiB  model.py:5 in forward",
        "note: the lines are those of the history's highest moment, 15.00 MiB requested after 4 of 7 entries",
        "note: 3 live blocks; the largest unused one has 4.00 MiB",
        "note: 4.00 MiB are in unused segments, which torch.cuda.empty_cache() returns",
        "note: 2.00 MiB are unused pieces of segments in use: fragmentation",
    ]
    before = explained(pickle.dumps(snapshot(segments=segments, device_traces=[trace[:1]])))
    assert "      2.00 MiB  allocated before the history begins" in before
    assert any("11.00 MiB requested after 0 of 1 entries" in line for line in before)


def test_a_block_of_autograds_thread_is_named() -> None:
    given = snapshot(device_traces=[])
    frames = [{"filename": "??", "line": 0, "name": "torch::autograd::Engine::evaluate_function"}]
    given["segments"][0]["blocks"][0]["frames"] = frames
    assert "      5.00 MiB  autograd's thread, in backward" in explained(pickle.dumps(given))


def test_snapshots_of_other_releases() -> None:
    old = snapshot()
    for one in old["segments"]:
        for part in one["blocks"]:
            part["history"] = [{"addr": 0, "real_size": part["size"], "frames": part.pop("frames")}]
    assert "     13.00 MiB  model.py:3 in forward" in explained(pickle.dumps(old))
    assert explained(pickle.dumps(old["segments"]))[0] == "GPU 0 at the snapshot, which records no out-of-memory error"
    with pytest.raises(VramprobeError, match="unknown format: KeyError"):
        explained(pickle.dumps(snapshot(segments=[{"device": 0, "length": 3}])))
    with pytest.raises(VramprobeError, match="empty"):
        explained(pickle.dumps({"segments": [], "device_traces": []}))


def test_a_history_of_an_unknown_format_leaves_the_rest() -> None:
    odd = snapshot(device_traces=[[{"action": "alloc", "address": 1, "bytes": 5}]])
    lines = explained(pickle.dumps(odd))
    assert "     13.00 MiB  allocated by PyTorch" in lines
    assert "note: its recorded history is of an unknown format: this is the end of it alone" in lines


def test_no_folder_and_no_value_of_a_snapshot_is_repeated() -> None:
    secret = "/home/joe/hf_abcdef"
    given = snapshot()
    for part in given["segments"][0]["blocks"]:
        part["frames"][2]["filename"] = f"{secret}/train.py"
    given["allocator_settings"] = {"PYTORCH_CUDA_ALLOC_CONF": secret, "user": secret}
    report = report_of(io.BytesIO(pickle.dumps(given)))
    said = "\n".join(in_words(report)) + json.dumps(report.as_json())
    assert "train.py:3" in said
    assert "hf_abcdef" not in said
    given["segments"][0]["blocks"][0]["frames"][2]["line"] = secret
    with pytest.raises(VramprobeError, match=r"unknown format: ValueError$"):
        explained(pickle.dumps(given))


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(MARK),)


MARK = Path(HERE) / "a-pickle-was-run"


def test_a_pickle_runs_no_code() -> None:
    with pytest.raises(VramprobeError, match="refused"):
        explained(pickle.dumps(snapshot(extra=Harmful())))
    assert not MARK.exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (b"", "empty"),
        (b"\n \n", "empty"),
        (b"all went well\n" * 3, "no out-of-memory error and no nvidia-smi table in 3 lines"),
        (gzip.compress(b"x", mtime=0), "compressed"),
        (b"PK\x03\x04rest", "archive"),
        (b"GIF\0\0\0", "binary"),
        (pickle.dumps(snapshot())[:-40], "cut or damaged"),
        (pickle.dumps([1, 2]), "snapshot"),
        (pickle.dumps({"weights": 3}), "no memory snapshot"),
    ],
)
def test_wrong_input_is_one_clear_error(given: bytes, said: str) -> None:
    with pytest.raises(VramprobeError, match=said) as raised:
        explained(given)
    assert "\n" not in str(raised.value)


def test_partial_answers_say_so() -> None:
    lines = explained(LOG[: LOG.index("Including")])
    assert "note: the message is cut: some figures are missing" in lines
    lines = explained("RuntimeError: CUDA error: out of memory\n")
    assert any("does not say how much" in line for line in lines)
    assert "note: there is no traceback before the error: the phase is unknown" in lines
    (host, *_) = explained("srun: error: node3: task 0: oom-kill event\n")
    assert host == "the host ran out of memory"


@pytest.mark.parametrize(
    ("text", "headline"),
    [
        ("Killed", "the host probably ran out of memory"),
        ("Reason: OOMKilled", "the host ran out of memory"),
        (
            "ValueError: To serve at least one request with the model's max seq len (9), 2.0 GiB KV cache is needed, "
            "which is larger than the available KV cache memory (1.0 GiB).",
            "vLLM found too little memory on the GPU: 2.00 GiB requested, 1.00 GiB free",
        ),
        (
            "CUDA out of memory. Tried to allocate more than 1EB memory.",
            "the GPU refused a request that no GPU could hold",
        ),
        ("MPS backend out of memory (MPS allocated: 1.00 GB", "the Mac's GPU ran out of memory"),
    ],
)
def test_the_headline_says_what_was_full_and_how_sure_that_is(text: str, headline: str) -> None:
    assert explained(text)[0] == headline


def test_a_step_that_fails_after_others_points_to_its_batch() -> None:
    bar = " 18%|##    | {}/494 [04:04<18:48,  2.78s/it]\n"
    assert any(line.startswith("note: 88 steps went well before") for line in explained(bar.format(88) + LOG))
    assert not any("steps went well" in line for line in explained(bar.format(0) + LOG))
    loading = failing_in("transformers/modeling_utils.py", "from_pretrained")
    assert not any("steps went well" in line for line in explained(bar.format(88) + loading))


def test_expandable_segments_are_no_advice_where_the_log_has_them() -> None:
    text = LOG.replace("74.10 GiB is allocated", "64.10 GiB is allocated").replace("503.92 MiB", "10.40 GiB")
    assert any("expandable_segments:True (" in line for line in explained(text))
    command = "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64,expandable_segments:True python train.py\n"
    assert not any("expandable_segments:True (" in line for line in explained(command + text))
    hint = " reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True\n"
    assert any("expandable_segments:True (" in line for line in explained(text.rstrip() + hint))


def test_a_model_that_cannot_be_used_is_a_note_and_never_the_end() -> None:
    lines = explained(LOG.replace("meta-llama/Llama-3.1-8B", "google/gemma-4-31B"))
    assert lines[0].startswith("GPU 1 ran out of memory")
    notes = [line for line in lines if line.startswith("note: ")]
    assert any("only logits, embedding and head can be named" in line for line in notes)
    lines = explained(LOG, model="no/such.json")
    assert any(line.startswith("note: the request's tensor cannot be named: ") for line in lines)
    assert lines[-1] == "     3. a shorter max_length"
    named = explained(LOG.replace("meta-llama/Llama-3.1-8B", "/data/models/Llama-3.1-8B-Instruct"))
    assert any("size of logits" in line for line in named)


def test_logits_of_a_model_without_arithmetic() -> None:
    text = LOG.replace("3.91 GiB", f"{8192 * 248320 * 4 / GIB:.2f} GiB")
    named = "the request has the size of logits: 4 × 2048 tokens × 248320 vocabulary in fp32"
    assert named in explained(text, model="qwen3.5-27b")
    unsaid = explained(text.replace("--per_device_train_batch_size 4", ""), model="qwen3.5-27b")
    assert any("logits: 8,18" in line and "× 248320 vocabulary in fp32" in line for line in unsaid)


def test_logits_in_backward_are_cured_by_the_loss_first() -> None:
    backward = failing_in("torch/autograd/graph.py", "_engine_run_backward")
    assert any(line.startswith("the request has the size of logits") for line in explained(backward))
    assert any(line.startswith("try: 1. a chunked or fused loss") for line in explained(backward))
    other = explained(backward.replace("3.91", "3.81"))
    assert any(line.startswith("try: 1. gradient checkpointing") for line in other)


def test_an_engine_adds_its_own_advice_to_the_message_of_pytorch() -> None:
    warm_up = "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests.\n"
    lines = explained(LOG + warm_up)
    assert lines[0].startswith("GPU 1 ran out of memory: 3.91 GiB requested")
    assert lines[-2].startswith("try: 1. a lower gpu_memory_utilization")


def test_a_memory_summary_is_a_report_of_its_own() -> None:
    table = SUMMARY.format(device=2)
    lines = explained(table)
    assert lines[0] == "GPU 2 at the memory_summary, which records no out-of-memory error"
    assert "     48.16 GiB  allocated at the peak" in lines
    assert any("1 out-of-memory error, 3 cudaMalloc retries" in line for line in lines)
    assert any("expandable_segments" in line for line in lines)  # 60 reserved for 48 GiB
    assert any("memory_summary() of GPU 2" in line for line in explained(table + LOG))


def test_weights_that_are_larger_than_the_gpu_are_said_to_be() -> None:
    assert not any("all parameters" in line for line in explained(LOG, model="llama-3.1-8b"))
    # 70,553,706,496 parameters of 2 bytes
    said = "note: all parameters of llama-3.1-70b take 131.42 GiB in bf16, more than one such GPU has (about 32.85 GiB "
    over = "in 4 bits); device_map, FSDP or ZeRO-3 spread them over 2 GPUs or more"
    assert said + over in explained(LOG, model="llama-3.1-70b")


def test_a_gpu_error_counts_before_the_kills_that_follow_it() -> None:
    lines = explained("  exitcode  : -9 (pid: 3)\n" + LOG + "  exitcode  : -9 (pid: 4)\n")
    assert lines[0].startswith("GPU 1 ran out of memory")


def test_memory_beyond_the_card_is_the_windows_driver() -> None:
    text = (
        "CUDA out of memory. Tried to allocate 172.00 MiB (GPU 0; 8.00 GiB total capacity; 22.35 GiB already "
        "allocated; 0 bytes free; 22.35 GiB reserved in total by PyTorch)"
    )
    assert any("Windows" in line for line in explained(text))


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text(LOG)
    from_file = vramprobe("explain", str(tmp_path / "run.log"))
    assert from_file.returncode == 0, from_file.stderr
    assert json.loads(vramprobe("explain", str(tmp_path / "run.log"), "--json").stdout)["kind"] == "log"
    for wrong in (str(tmp_path / "nothing.log"), str(tmp_path)):
        done = vramprobe("explain", wrong)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    empty = "vramprobe: the input is empty: nothing to explain\n"
    for words, given, expected in (((), LOG, (0, from_file.stdout, "")), (("-",), "", (1, "", empty))):
        command = [sys.executable, "-m", "vramprobe", "explain", *words]
        done = subprocess.run(command, input=given, capture_output=True, text=True, cwd=HERE)
        assert (done.returncode, done.stdout, done.stderr) == expected


def test_it_loads_no_torch(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text(LOG)
    code = (
        "import sys; from vramprobe.explain.report import report_of\n"
        f"report_of(open({str(tmp_path / 'run.log')!r}, 'rb'))\n"
        "assert not {'torch', 'numpy', 'pandas'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=HERE)
    assert done.returncode == 0, done.stderr


def test_an_exception_a_text_and_a_file_are_explained_alike_from_python(tmp_path: Path) -> None:
    message = LOG.splitlines()[-1].partition(": ")[2]
    try:
        raise MemoryError(message)
    except MemoryError as error:
        raised = api.explain(error)
    assert raised.oom.requested == api.explain(f"MemoryError: {message}").oom.requested
    (tmp_path / "a.log").write_text(LOG)
    said = str(api.explain(tmp_path / "a.log", batch_size=4))
    assert said == str(api.explain(LOG, batch_size=4))
    assert said.splitlines()[0].startswith("GPU 1 ran out of memory")
    assert "explain" in dir(api)


def test_the_model_at_hand_names_the_requests_tensor() -> None:
    """An exception is caught where the model is an object, not a name."""
    logits = "CUDA out of memory. Tried to allocate 392.63 MiB. GPU 0 has a total capacity of 23.65 GiB"
    config = find_model("gpt2").config
    named = api.explain(logits, "gpt2", batch_size=4, seq_len=512).tensors
    assert any(one.startswith("logits") for one in named)
    at_hand = SimpleNamespace(model_type="gpt2", to_dict=lambda: config)
    module = SimpleNamespace(config=at_hand, named_parameters=lambda: iter(()))
    for model in (config, at_hand, module):
        assert api.explain(logits, model, batch_size=4, seq_len=512).tensors == named
    with pytest.raises(SpecError, match="model: int given"):
        api.explain(logits, 7)
