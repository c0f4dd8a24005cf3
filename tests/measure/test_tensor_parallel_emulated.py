"""Tensor parallelism on emulated cards, beside from_pretrained(tp_plan="auto") and Trainer, unchanged."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from emulated import assert_alone_as_among_all, swept
from factories import TINY_LLAMA, TINY_LLAMA_PARAMS, TINY_LLAMA_PATH
from grids import exhaustive

from vramprobe.records.record import RunRecord

pytestmark = pytest.mark.timeout(900)  # whoever is first runs the cells of all

HEAD = """
name: parts
defaults: {{model: {plain}, batch_size: 2, seq_len: 32, num_gpus: 2, sharding: tp, device: cuda}}
cells:
"""
MORE = """
  - {{method: full, autocast: bf16, only_rank: 1}}
  - {{method: lora, lora_targets: q_v}}
  - {{method: lora, lora_targets: q_v, only_rank: 0}}
  - {{model: {tied}, method: full, autocast: bf16}}
"""
TIED = "full, with the embedding for a head"
#: Of the tiny llama: what the plan leaves whole on every rank, five norms of 64, and its weights in bf16.
WHOLE, BUFFERS = 5 * 64, 2 * 8 * 4


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny llama, whose head is its embedding."""
    folder = tmp_path_factory.mktemp("tied")
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA | {"tie_word_embeddings": True}))
    return folder


@pytest.fixture(scope="module")
def records(few_of_each: list[RunRecord]) -> dict[tuple[str, bool], RunRecord]:
    """By what is trained, and whether one rank ran by itself."""
    return by_kind([record for record in few_of_each if record.spec.sharding == "tp"])


@pytest.fixture(scope="module")
def all_records(
    tmp_path_factory: pytest.TempPathFactory, tied: Path, records: dict[tuple[str, bool], RunRecord]
) -> dict[tuple[str, bool], RunRecord]:
    more = (HEAD + MORE).format(plain=TINY_LLAMA_PATH, tied=tied)
    return records | by_kind(swept(tmp_path_factory.mktemp("more"), more, cards="H100-SXM x2"))


def by_kind(found: list[RunRecord]) -> dict[tuple[str, bool], RunRecord]:
    return {
        (
            TIED if record.spec.architecture["tie_word_embeddings"] else record.spec.method,
            record.spec.only_rank is not None,
        ): record
        for record in found
    }


@exhaustive
def test_a_rank_alone_counts_the_bytes_of_that_rank_among_all(all_records: dict[tuple[str, bool], RunRecord]) -> None:
    assert_alone_as_among_all([record for (kind, _), record in all_records.items() if kind != TIED], num_alone=2)


def test_each_rank_has_its_part_of_every_layer_and_norms_are_whole(records: dict[tuple[str, bool], RunRecord]) -> None:
    record = records["full", False]
    assert record.facts.num_params == record.facts.num_trainable_params == TINY_LLAMA_PARAMS
    part = 2 * ((TINY_LLAMA_PARAMS - WHOLE) // 2 + WHOLE)
    embedding = 2 * 256 * 64  # of which DTensor's backward makes the whole gradient on every rank
    for rank in record.ranks:
        assert rank.ledger.weights_bytes == part + BUFFERS
        assert rank.ledger.gradients_bytes == part + embedding // 2
        assert rank.ledger.at_peak is not None


def test_what_a_step_moves(records: dict[tuple[str, bool], RunRecord]) -> None:
    """In forward a sum after the embedding, and after attention and MLP of both layers; the logits of all tokens are
    brought together. In backward a sum before each of these and before the head, and each norm's gradient."""
    for rank in records["full", False].ranks:
        moved = {(one.phase, one.kind): (one.num_calls, one.payload_bytes) for one in rank.traffic}
        assert moved["forward", "all_reduce"][0] == 5
        assert moved["forward", "all_gather"] == (1, 2 * 32 * 256 * 2)
        assert moved["backward", "all_reduce"][0] >= 5 + 5
        assert set(moved) == {("forward", "all_reduce"), ("forward", "all_gather"), ("backward", "all_reduce")}


@exhaustive
def test_a_tied_head_is_the_embedding_s_part(all_records: dict[tuple[str, bool], RunRecord]) -> None:
    head = 2 * 256 * 64 // 2
    for plain, tied in zip(all_records["full", False].ranks, all_records[TIED, False].ranks, strict=True):
        assert tied.ledger.weights_bytes == plain.ledger.weights_bytes - head
        assert tied.ledger.gradients_bytes == tied.ledger.weights_bytes - BUFFERS  # where its gradient ends as a part


@exhaustive
@pytest.mark.parametrize("kind", ["full", "lora", TIED])
def test_as_from_pretrained_divides_it_and_as_trainer_trains_it(
    kind: str, all_records: dict[tuple[str, bool], RunRecord], tied: Path, trained_by_user: Callable
) -> None:
    """The second and third step, which repeat. Trainer has a count of tokens beside the batch."""
    method, config = ("full", tied) if kind == TIED else (kind, TINY_LLAMA_PATH)
    seen, _ = trained_by_user(config, method, "parts")
    phases = all_records[kind, False].ranks[0].phases
    ours = max(phase.requested_peak_bytes for phase in phases if phase.step == 3)
    for (theirs,) in seen["steps"][1:]:
        assert 0 <= theirs - ours <= 32
