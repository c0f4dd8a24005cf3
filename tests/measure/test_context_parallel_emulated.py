"""Context parallelism on emulated cards, beside Trainer with accelerate's ParallelismConfig, unchanged."""

from collections.abc import Callable

import pytest
from emulated import assert_alone_as_among_all, swept
from factories import TINY_LLAMA_PARAMS, TINY_LLAMA_PATH
from grids import exhaustive

from vramprobe.records.record import RankRecord, RunRecord

pytestmark = pytest.mark.timeout(900)  # whoever is first runs the cells of all

HEAD = f"""
name: shared
defaults: {{model: {TINY_LLAMA_PATH}, batch_size: 2, seq_len: 1024, num_gpus: 2, sharding: fsdp, cp_size: 2,
           device: cuda}}
cells:
"""
MORE = """
  - {method: full, autocast: bf16, only_rank: 1}
  - {method: full, autocast: bf16, only_rank: 0}
  - {method: lora, lora_targets: q_v, gradient_checkpointing: true}
  - {method: full, autocast: bf16, cp_rotation: alltoall}
  - {method: full, autocast: bf16, num_gpus: 8, sharding: fsdp-hybrid, shard_size: 4, grad_accum: 2, only_rank: 3}
"""
#: Keys and values that a rank has of a layer in bf16: both, batch, heads, tokens, width.
OWN = 2 * (2 * 2 * 2 * 512 * 16)


@pytest.fixture(scope="module")
def records(few_of_each: list[RunRecord]) -> list[RunRecord]:
    return [record for record in few_of_each if record.spec.cp_size > 1]


@pytest.fixture(scope="module")
def all_records(tmp_path_factory: pytest.TempPathFactory, records: list[RunRecord]) -> list[RunRecord]:
    return [*records, *swept(tmp_path_factory.mktemp("more"), HEAD + MORE, cards="H100-SXM x2")]


def one(records: list[RunRecord], method: str = "full", **words: object) -> RunRecord:
    """The cell of two ranks that is so, all of them run and gathering at once unless told otherwise."""
    words = {"num_gpus": 2, "only_rank": None, "cp_rotation": "allgather", "method": method} | words
    (found,) = [
        record for record in records if all(getattr(record.spec, name) == value for name, value in words.items())
    ]
    return found


def moved(rank: RankRecord) -> dict[tuple[str, str], int]:
    return {(part.phase, part.kind): part.payload_bytes for part in rank.traffic}


@exhaustive
def test_a_rank_alone_counts_the_bytes_of_that_rank_among_all(all_records: list[RunRecord]) -> None:
    assert_alone_as_among_all([record for record in all_records if record.spec.num_gpus == 2], num_alone=2)


def test_the_model_is_shared_out_and_so_is_each_sequence(records: list[RunRecord]) -> None:
    """Half of the weights, in fp32 under autocast; the batch's parts lie where the whole lay."""
    record = one(records)
    assert record.facts.num_params == TINY_LLAMA_PARAMS
    for rank in record.ranks:
        assert 0 < rank.ledger.weights_bytes - 4 * TINY_LLAMA_PARAMS // 2 <= 64
        assert rank.ledger.batch_bytes == 2 * 2 * 1024 * 8
        assert rank.ledger.at_peak is not None


@exhaustive
def test_ranks_before_the_last_build_a_mask_that_nobody_reads(all_records: list[RunRecord]) -> None:
    """Their positions leap from the front's part to the back's, which transformers takes for packed sequences."""
    first, last = one(all_records, "lora").ranks
    kept = [rank.ledger.saved_activations_bytes for rank in (first, last)]
    assert kept[0] - kept[1] == 2 * 512 * 512


def test_what_a_step_moves(records: list[RunRecord]) -> None:
    """Beside FSDP's, in forward and in backward every layer's keys and values once; in backward their gradients in fp32
    once for each rank."""
    weights, root = 2 * TINY_LLAMA_PARAMS, 2 * (64 + 256 * 64)
    for rank in one(records).ranks:
        assert moved(rank) == {
            ("forward", "all_gather"): weights + 2 * 2 * OWN,
            ("backward", "all_gather"): weights - root + 2 * 2 * OWN,
            ("backward", "reduce_scatter"): weights,
            ("backward", "send"): 2 * 2 * 2 * OWN,
            ("backward", "receive"): 2 * 2 * 2 * OWN,
        }


@exhaustive
def test_what_a_step_moves_from_rank_to_rank(all_records: list[RunRecord]) -> None:
    """With ``alltoall`` each rank sends its keys and values on instead of gathering all of them."""
    weights = 2 * TINY_LLAMA_PARAMS
    for rank in one(all_records, cp_rotation="alltoall").ranks:
        assert moved(rank)["forward", "all_gather"] == weights
        assert moved(rank)["forward", "send"] == 2 * OWN
        assert moved(rank)["backward", "send"] == (2 * 2 + 1) * 2 * OWN


@exhaustive
def test_groups_of_groups_run_and_accumulate(all_records: list[RunRecord]) -> None:
    (rank,) = one(all_records, num_gpus=8, only_rank=3).ranks
    assert {part.num_ranks for part in rank.traffic} == {2, 4}


@exhaustive
@pytest.mark.parametrize("method", ["full", "lora"])
def test_as_trainer_trains_it(method: str, all_records: list[RunRecord], trained_by_user: Callable) -> None:
    """The second and third step of both ranks, which repeat. Trainer has a count of tokens beside the batch."""
    seen = trained_by_user(TINY_LLAMA_PATH, method, "sequences")
    for theirs, rank in zip(seen, one(all_records, method).ranks, strict=True):
        ours = max(phase.requested_peak_bytes for phase in rank.phases if phase.step == 3)
        assert [0 <= peak - ours <= 32 for (peak,) in theirs["steps"][1:]] == [True, True], (theirs, ours)
