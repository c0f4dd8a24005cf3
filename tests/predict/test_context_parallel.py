"""Ranks that share each sequence, by arithmetic: what a part of the tokens is, the mask, the ring's buffers."""

from __future__ import annotations

import pytest
from command_line import vramprobe
from factories import TINY_LLAMA_PATH

from vramprobe.errors import SpecError
from vramprobe.predict.predict import predict as predict_cell
from vramprobe.predict.questions import predict
from vramprobe.predict.ranks import part_moments
from vramprobe.predict.what_fits import max_seq_len
from vramprobe.spec import CellSpec, resolve
from vramprobe.terms import Moment


def shared(**words: object) -> CellSpec:
    """A cell of ranks that share each sequence."""
    ranks = {"device": "cuda", "num_gpus": 4, "sharding": "fsdp", "cp_size": 4}
    cell = {"model": str(TINY_LLAMA_PATH), "method": "full", "recipe": "mixed", "batch_size": 2, "seq_len": 4096}
    return resolve(**cell | ranks | words)


def highest(moments: list[Moment], phase: str) -> int:
    return max(one.total_bytes for one in moments if one.phase == phase)


@pytest.mark.parametrize(
    ("index", "forward", "backward"),
    [(0, 76_914_012, 78_587_690), (2, 76_914_012, 78_587_690), (3, 74_816_860, 76_228_394)],
)
def test_as_emulated(index: int, forward: int, backward: int) -> None:
    """What tensors asked for in ranks 0, 2 and 3 of these on emulated H100s, less the loss of 2 bytes in backward."""
    workspaces = 2 * 32 * 2**20
    moments = part_moments(shared(gradient_checkpointing=True), index, all_buffers=False)
    asked = {
        phase: max(one.total_bytes - one.terms.get("block_remainders", 0) for one in moments if one.phase == phase)
        for phase in ("forward", "backward")
    }
    assert asked["forward"] + workspaces == forward
    assert 0 <= backward - asked["backward"] - workspaces <= 2


def test_all_ranks_but_the_last_hold_a_mask_of_their_tokens() -> None:
    first, last = (part_moments(shared(), index, all_buffers=False) for index in (0, 3))
    assert highest(first, "forward") - highest(last, "forward") == 2 * 1024**2 // 4
    assert highest(first, "optimizer_step") == highest(last, "optimizer_step")


def test_what_is_gathered_at_once_grows_with_the_ranks_and_what_goes_around_does_not() -> None:
    def backward(size: int, rotation: str) -> int:
        """Of a rank with 1,024 tokens, whatever the world."""
        cell = shared(
            gradient_checkpointing=True,
            batch_size=1,
            seq_len=1024 * size,
            cp_size=size,
            num_gpus=64,
            cp_rotation=rotation,
        )
        moments = part_moments(cell, size - 1, all_buffers=False)
        return highest([one for one in moments if one.label == "first layer"], "backward")

    own = 2 * (2 * 1024 * 2 * 16)  # keys and values in bf16
    batch = 8 * 4 * 1024  # of as many more tokens: ids, labels, shifted labels and positions
    assert backward(64, "allgather") - backward(32, "allgather") == 32 * (own + batch)
    assert backward(64, "alltoall") - backward(32, "alltoall") == 32 * batch


def test_a_prediction_is_the_highest_ranks() -> None:
    cell = shared()
    found = predict_cell(cell)
    tops = [
        max(one.total_bytes for one in part_moments(cell, index, all_buffers=False)) for index in range(cell.cp_size)
    ]
    assert found.peak_allocated_bytes.value == max(tops) + found.terms["workspaces"]
    assert any("one rank of 4 under fsdp, 4 to a sequence" in warning for warning in found.warnings)


def test_shared_sequences_take_less_than_whole_ones() -> None:
    cell = {
        "model": "llama-3.1-8b",
        "method": "full",
        "batch_size": 1,
        "seq_len": 32768,
        "gradient_checkpointing": True,
    }
    whole, part = (
        predict(**cell, sharding="fsdp", num_gpus=8, cp_size=size).peak_allocated_bytes.value for size in (None, 8)
    )
    assert part < whole / 3


def test_a_prediction_is_by_the_rotation_that_is_asked_for() -> None:
    """Two layers of a Llama 2 7B among 16 ranks to a sequence, the highest of 0, 5 and 15, in backward."""
    cell = {
        "model": "llama-2-7b",
        "num_layers": 2,
        "method": "full",
        "recipe": "mixed",
        "batch_size": 1,
        "seq_len": 32768,
        "gradient_checkpointing": True,
        "num_gpus": 32,
        "sharding": "fsdp",
        "cp_size": 16,
        "gpu": "H100-SXM",
    }
    at_once, by_turns = (predict(**cell, cp_rotation=rotation) for rotation in (None, "alltoall"))
    less = at_once.peak_allocated_bytes.value - by_turns.peak_allocated_bytes.value
    assert less == pytest.approx(469_762_048, abs=2**23)  # 14 of 16 ranks' keys and values in bf16
    assert any("16 to a sequence by alltoall" in warning for warning in by_turns.warnings)
    assert at_once == predict(**cell, cp_rotation="allgather")


def test_the_command_line_takes_the_rotation() -> None:
    words = [
        "predict",
        "--model",
        "llama-2-7b",
        "--method",
        "full",
        "--batch-size",
        "1",
        "--seq-len",
        "4096",
        "--num-gpus",
        "4",
        "--sharding",
        "fsdp",
        "--cp-rotation",
        "alltoall",
    ]
    assert "4 to a sequence by alltoall" in " ".join(vramprobe(*words, "--cp-size", "4").stdout.split())
    assert "cp_rotation alltoall is for ranks that share each sequence" in vramprobe(*words).stderr


def test_what_cannot_be_asked() -> None:
    cell = {"model": "llama-3.1-8b", "method": "full", "batch_size": 1}
    ranks = {"seq_len": 4096, "sharding": "fsdp", "num_gpus": 8}
    with pytest.raises(SpecError, match="cp_rotation alltoall is for ranks that share each sequence; set cp_size to 2"):
        predict(**cell, **ranks, cp_rotation="alltoall")
    with pytest.raises(SpecError, match="cp_rotation: 'ring' given; allowed: allgather, alltoall"):
        predict(**cell, **ranks, cp_size=2, cp_rotation="ring")
    with pytest.raises(SpecError, match="cp_rotation alltoall is for several GPUs; give sharding fsdp, num_gpus and"):
        predict(**cell, seq_len=4096, cp_rotation="alltoall")
    with pytest.raises(SpecError, match="cp_size 2 under zero3: accelerate splits sequences beside FSDP2 alone"):
        predict(**cell, seq_len=4096, sharding="zero3", num_gpus=8, cp_size=2)
    with pytest.raises(SpecError, match=r"seq_len 4095 with cp_size 2: .* use 4092 or 4096"):
        predict(**cell, seq_len=4095, sharding="fsdp", num_gpus=8, cp_size=2)
    with pytest.raises(SpecError, match="cp_size 2 is for several GPUs; give sharding fsdp, and num_gpus"):
        predict(**cell, seq_len=4096, cp_size=2)
    with pytest.raises(SpecError, match="cp_size 2: the longest sequence is not looked for"):
        max_seq_len(**cell, gpu="H100-SXM", sharding="fsdp", num_gpus=8, cp_size=2)
