"""The exception that came first, of whichever process, before what its launcher says of it."""

import json
from pathlib import Path

import pytest
from profile_factory import FIRST_NS, analysed, training
from run_command import require_emulation
from run_verb import Verb

from vramprobe.records.profile import ProfileRecord


def test_the_first_to_fail_is_named_whoever_wrote_first(tmp_path: Path) -> None:
    training(101, rank=1, world_size=2).write(tmp_path)
    said = [
        {"pid": 9, "rank": None, "time_ns": FIRST_NS + 3, "error": "ChildFailedError: \n====", "stack": []},
        {
            "pid": 101,
            "rank": 1,
            "time_ns": FIRST_NS + 1,
            "error": "AssertionError: no data",
            "stack": [["/env/site-packages/torch/a.py", 7, "b"], ["/env/site-packages/mine/train.py", 12, "main"]],
        },
    ]
    (tmp_path / "uncaught").write_text("".join(json.dumps(one) + "\n" for one in said))
    outcome = ProfileRecord.model_validate_json(
        analysed(tmp_path, exit_status=1, tail=["====", "FAILED"]).to_json_line()
    ).outcome
    assert outcome.kind == "error"
    assert (outcome.rank, outcome.exception) == (1, "AssertionError: no data")
    assert (outcome.line, outcome.function) == ("mine/train.py:12", "main")
    assert outcome.last_lines == ["====", "FAILED"]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("torch.distributed.elastic.multiprocessing.api.SignalException: Process 12 got signal: 2", "interrupted"),
        ("mine.SignalException: no signal on the line", "error"),
    ],
)
def test_a_launcher_that_raises_what_interrupted_it_is_interrupted(tmp_path: Path, error: str, kind: str) -> None:
    """As torchrun does of Ctrl-C, with status 1."""
    training(101).write(tmp_path)
    said = {"pid": 9, "rank": None, "time_ns": FIRST_NS, "error": error, "stack": []}
    (tmp_path / "uncaught").write_text(json.dumps(said) + "\n")
    assert analysed(tmp_path, exit_status=1).outcome.kind == kind


def test_a_rank_that_fails_before_it_has_used_a_gpu_is_heard_of(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os\nraise AssertionError('not supported by rank ' + os.environ['RANK'])\n")
    words = [str(require_emulation()), "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    left = Verb(tmp_path, words, "--emulate", "H100-SXM x2").left(240)
    left.check(1)
    said = " ".join(left.out.split())
    assert "the exception that came first: rank" in said
    assert "AssertionError: not supported by rank" in said
    assert "script.py:2 <module>" in said
