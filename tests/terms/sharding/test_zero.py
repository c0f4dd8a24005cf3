"""ZeRO's buckets and gathering by hand: when a bucket goes, what stays of it, which weights are whole."""

from __future__ import annotations

from typing import Any

import pytest
from factories import TINY_LLAMA_PARAMS as P
from factories import make_spec

from vramprobe.architecture import architecture
from vramprobe.kernels.chip import A100
from vramprobe.spec import CellSpec
from vramprobe.terms.cell import parameters
from vramprobe.terms.sharding.rank import Division
from vramprobe.terms.sharding.ranks import rank_moments
from vramprobe.terms.sharding.zero import course as zero
from vramprobe.terms.sharding.zero.buckets import BucketRank
from vramprobe.terms.sharding.zero3 import course as zero3
from vramprobe.terms.sharding.zero3 import gather

EMBEDDING, MLP, Q, K, NORM = 256 * 64, 64 * 176, 64 * 64, 64 * 32, 64
NORMS = 5 * NORM


def tiny(**overrides: Any) -> CellSpec:
    return make_spec(device="cuda", **overrides)


def first_of_four(stage: int, **overrides: Any) -> BucketRank:
    course = zero.course(tiny(**overrides), Division(f"zero{stage}", 4), A100)
    assert isinstance(course.walk, BucketRank)
    return course.walk


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> int:
    """Of so few elements that a step fills it several times."""
    monkeypatch.setattr(zero, "BUCKET_ELEMENTS", 50_000)
    return 50_000


def test_a_bucket_goes_before_it_is_too_full_and_all_gradients_go_once(bucket: int) -> None:
    """The head, the norm, then layer 1 but for two matrices of its MLP: the third would be too much."""
    reductions = first_of_four(2, recipe="mixed").reductions
    assert sum(one.joined_bytes for one in reductions) == 2 * P
    assert all(one.joined_bytes <= 2 * bucket for one in reductions)
    assert reductions[0].joined_bytes == 2 * (EMBEDDING + NORM + 2 * MLP)
    assert [one.before >= 0 for one in reductions] == [True] * (len(reductions) - 1) + [False]


def test_what_a_rank_keeps_is_made_when_the_first_of_its_own_was_reduced(bucket: int) -> None:
    """The first of four ranks has the embedding and the beginning of layer 0, whose gradients come last."""
    rank = first_of_four(2, recipe="mixed")
    assert [one.has_own for one in rank.reductions] == [False] * (len(rank.reductions) - 1) + [True]
    own = EMBEDDING + 2 * Q + 2 * K + MLP  # the last one is cut, and kept whole
    assert rank.kept_bytes == 2 * own
    assert first_of_four(2, recipe="all-bf16").kept_bytes == 4 * -(-P // 4)  # in fp32, this rank's part alone


def test_a_gradient_larger_than_the_bucket_goes_alone_and_uncopied_where_one_rank_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zero, "BUCKET_ELEMENTS", EMBEDDING - 1)
    first = first_of_four(2, recipe="mixed").reductions[0]
    assert (first.before, first.joined_bytes) == (1, 0)  # when the norm's comes; the head is the last rank's alone
    halves = zero.course(tiny(recipe="mixed"), Division("zero2", 14), A100).walk
    assert isinstance(halves, BucketRank)
    assert halves.reductions[0].joined_bytes == 2 * EMBEDDING


def test_zero_1_keeps_all_gradients_until_backward_has_ended(bucket: int) -> None:
    rank = first_of_four(1, recipe="mixed")
    assert {one.before for one in rank.reductions} == {-1}
    assert rank.reductions[0].gone_bytes == rank.reductions[0].joined_bytes
    assert rank.reductions[-1].gone_bytes == 2 * P
    peak = max(sum(terms.values()) for place, terms in rank.highest(2, 16).items() if place[0] == "backward")
    assert peak >= 2 * P + 2 * bucket


def test_zero_1_holds_gradients_and_bucket_over_its_micro_steps() -> None:
    """As seen on the emulated card: its epilogue, which lets go of them, runs in the last one alone."""
    forward = [
        one.terms
        for one in rank_moments(tiny(recipe="mixed", grad_accum=2), 4, "zero1", all_buffers=False)
        if one.phase == "forward"
    ]
    assert {(terms["gradients"], terms["gradient_buckets"]) for terms in forward} == {(2 * P, 10**9)}


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> Any:
    def count(ahead: int, again: int) -> dict[str, dict[int, int]]:
        monkeypatch.setattr(gather, "PERSISTENT_ELEMENTS", NORM + 1)
        monkeypatch.setattr(gather, "PREFETCHED_ELEMENTS", ahead)
        monkeypatch.setattr(gather, "REUSED_ELEMENTS", again)
        spec = tiny(recipe="all-bf16")
        tensors = parameters.tensors(spec, architecture(spec.architecture))
        names = ["embed", "layernorm", "q_proj", "k_proj", "v_proj", "o_proj", "gate", "up_", "down", "model.norm"]
        used = [tensor for name in [*names, "head"] for tensor in tensors if name in tensor.name]
        assert sorted(tensor.name for tensor in used) == sorted(tensor.name for tensor in tensors)
        return gather.gathered_bytes(used, 2, 4, computes_again=False)

    return count


def test_a_module_is_gathered_as_it_comes_and_goes_when_it_is_done(gathered: Any) -> None:
    assert gathered(0, 0) == {
        "forward": {gather.EMBEDDING: 2 * EMBEDDING, 0: 2 * MLP, 1: 2 * MLP, gather.HEAD: 2 * EMBEDDING},
        "backward": {gather.HEAD: 2 * EMBEDDING, 1: 2 * MLP, 0: 2 * MLP, gather.EMBEDDING: 2 * EMBEDDING},
    }


def test_what_is_used_again_soon_stays(gathered: Any) -> None:
    found = gathered(0, 10**9)
    assert found["forward"][gather.HEAD] == found["backward"][gather.HEAD] == 2 * (P - NORMS)
    assert found["backward"][gather.EMBEDDING] == 2 * EMBEDDING


def test_the_next_modules_come_ahead_and_several_in_one_piece_that_stays_until_the_last_is_asked_for(
    gathered: Any,
) -> None:
    # The model with its head and the one within it come first, and look ahead, too.
    assert gathered(1, 0)["forward"][gather.EMBEDDING] == 2 * (EMBEDDING + Q + K)
    assert gathered(Q + 1, 0)["forward"][gather.EMBEDDING] == 2 * (EMBEDDING + 2 * (Q + K))
    # At layer 0's first product: a piece of the embedding and all of it but the last weight, their copies; on their way
    # a piece of that and layer 1 but for its last, and one of that and the head.
    layer = 2 * Q + 2 * K + 3 * MLP
    first, second, third = EMBEDDING + layer - MLP, layer, MLP + EMBEDDING
    assert gathered(layer, 0)["forward"][0] == 2 * (2 * first + second + third)


def coordinator(monkeypatch: pytest.MonkeyPatch, reused: int, **overrides: Any) -> gather.Coordinator:
    """Of two layers that are computed again; nothing comes ahead. ``reused``: within so many elements."""
    monkeypatch.setattr(gather, "PERSISTENT_ELEMENTS", NORM + 1)
    monkeypatch.setattr(gather, "PREFETCHED_ELEMENTS", 0)
    monkeypatch.setattr(gather, "REUSED_ELEMENTS", reused)
    spec = tiny(gradient_checkpointing=True, **overrides)
    tensors = parameters.tensors(spec, architecture(spec.architecture))
    names = ["embed", "layernorm", "q_proj", "k_proj", "v_proj", "o_proj", "gate", "up_", "down", "model.norm", "head"]
    used = [tensor for name in names for tensor in tensors if name in tensor.name]
    is_quantised = spec.quant != "none"
    if is_quantised:
        used = zero3.gathered_tensors(spec, [tensor.name for tensor in used])
    return gather.Coordinator(used, 2, 4, computes_again=True, is_quantised=is_quantised)


def whole_in_backward(made: gather.Coordinator, layer: int) -> list[tuple[str, int, int]]:
    """Of each module with weights: whether the layer is computed again, bytes as it comes and as it is done."""
    found = []
    for step, use in enumerate(made.uses):
        made.fetch(step)
        came = made.whole_bytes
        made.release(step)
        if (use.phase, use.layer) == ("backward", layer) and use.weights:
            found.append((use.again, came, made.whole_bytes))
    assert made.whole_bytes == 0
    return found


def test_a_layer_is_computed_again_within_its_last_module_and_its_trained_weights_stay_for_their_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As seen of a 405B's layers on the emulated card: down_proj comes, then all of the layer, each weight of which is
    kept by the checkpoint as it goes, and comes once more for its own gradient."""
    found = whole_in_backward(coordinator(monkeypatch, 0, recipe="all-bf16"), 1)
    assert [again for again, _, _ in found] == ["before"] + ["within"] * 8 + ["last"] + [""] * 8
    assert found[1][1:] == found[0][1:]  # the norm before attention
    assert found[0][1:] == (2 * MLP, 2 * MLP)
    attention = 2 * Q + 2 * K
    assert found[8][1:] == (2 * (attention + 3 * MLP),) * 2  # up_proj has come
    assert found[9][1:] == (2 * (attention + 3 * MLP), 2 * (attention + 2 * MLP))  # down_proj is done
    assert found[10][1:] == (2 * (attention + 3 * MLP), 2 * (attention + MLP))  # up_proj came again
    assert found[-3][1:] == (2 * (2 * Q), 0)  # q_proj; norms are always whole


def test_frozen_weights_stay_until_the_last_module_is_done_and_nothing_keeps_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = whole_in_backward(coordinator(monkeypatch, MLP + 1, method="lora", lora_r=16), 1)
    last = next(one for one in found if one[0] == "last")
    frozen = 2 * Q + 2 * K + 3 * MLP
    wide = 16 * (4 * 64 + 2 * 64 + 2 * 32 + 3 * (64 + 176))  # both adapters of q and o, of k and v, of the MLP
    assert last[1:] == (2 * frozen + 4 * wide, 4 * (wide - 16 * 64))


def test_4_bit_weights_of_forward_stay_with_the_graph_until_backward_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes' nodes have them, whatever DeepSpeed lets go of: between forward and backward the whole model."""
    made = coordinator(monkeypatch, MLP + 1, method="qlora", kbit_prep="none")
    four_bits = 2 * (2 * Q + 2 * K + 3 * MLP) // 2
    after = []
    for step, use in enumerate(made.uses):
        made.fetch(step)
        made.release(step)
        after.append((use.phase, use.layer, made.whole_bytes))
    head = 2 * EMBEDDING  # is used again at once
    assert [size for phase, _, size in after if phase == "forward"][-1] == four_bits + head
    assert min(size for phase, _, size in after[:-1] if phase == "backward") >= four_bits
    assert after[-1] == ("backward", gather.EMBEDDING, 0)
