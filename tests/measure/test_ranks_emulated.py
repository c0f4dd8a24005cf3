"""Ranks on emulated cards: each way of sharding, and one rank by itself against the same rank among all of them."""

from pathlib import Path

import pytest
from emulated import assert_alone_as_among_all, measured, require_emulation, swept
from factories import TINY_LLAMA_PARAMS, TINY_LLAMA_PATH
from grids import exhaustive, grid

from vramprobe.catalog import find_gpu
from vramprobe.predict import recorded
from vramprobe.predict.host_memory import of_rank_bytes
from vramprobe.records.record import RankRecord, RunRecord

pytestmark = pytest.mark.timeout(900)  # whoever is first runs the cells of all

HEAD = f"""
name: ranks
defaults: {{model: {TINY_LLAMA_PATH}, batch_size: 2, seq_len: 32, device: cuda}}
cells:
"""
NUM_FEW = 5
ALL = """
  - {method: full, num_gpus: 2, sharding: [ddp, fsdp, fsdp1]}
  - {method: full, num_gpus: 2, sharding: [ddp, fsdp, fsdp1], only_rank: 1}
  - {method: lora, num_gpus: 2, sharding: [fsdp, fsdp1]}
  - {method: lora, num_gpus: 2, sharding: [fsdp, fsdp1], only_rank: 0}
  - {method: full, num_gpus: 4, sharding: [fsdp, fsdp1]}
  - {method: full, num_gpus: 4, sharding: [fsdp, fsdp1], only_rank: 3}
  - {method: full, num_gpus: 8, sharding: [ddp, fsdp, fsdp1]}
  - {method: full, num_gpus: 8, sharding: [ddp, fsdp, fsdp1], only_rank: 0}
  - {method: qlora, kbit_prep: none, num_gpus: 2, sharding: [fsdp, fsdp1]}
  - {method: full, num_gpus: 2, sharding: [fsdp, fsdp1], offload: params}
  - {method: full, num_gpus: 2, sharding: fsdp, offload: params, only_rank: 1}
  - {method: qlora, kbit_prep: none, num_gpus: 2, sharding: fsdp1, offload: params}
  - {method: full, recipe: mixed, num_gpus: 4, sharding: [fsdp-hybrid, fsdp1-hybrid], shard_size: 2}
  - {method: full, recipe: mixed, num_gpus: 4, sharding: [fsdp-hybrid, fsdp1-hybrid], shard_size: 2, only_rank: 3}
  - {method: lora, num_gpus: 4, sharding: fsdp1-hybrid, shard_size: 2}
  - {method: lora, dtype: fp16, autocast: fp16, lora_dtype: fp32, num_gpus: 2, sharding: [ddp, fsdp, fsdp1]}
  - {method: lora, dtype: fp16, autocast: fp16, lora_dtype: fp32, num_gpus: 2, sharding: [ddp, fsdp1], only_rank: 1}
  - {method: lora, dtype: fp16, autocast: fp16, lora_dtype: fp32, num_gpus: 2, sharding: fsdp, only_rank: 1}
"""


@pytest.fixture(scope="module", params=grid(["few", "all"], "few"))
def records(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[RunRecord]:
    if request.param == "all":
        return swept(tmp_path_factory.mktemp("ranks"), HEAD + ALL, cards="H100-SXM x8")
    few = request.getfixturevalue("few_of_each")
    return [one for one in few if one.spec.sharding not in ("tp", "device-map") and one.spec.cp_size == 1]


def test_every_cell_ends_well_with_each_rank_that_ran(records: list[RunRecord]) -> None:
    assert len(records) in (NUM_FEW, 37)
    for record in records:
        assert record.outcome.kind == "ok", (record.cell_id, record.outcome)
        ranks = list(range(record.spec.num_gpus)) if record.spec.only_rank is None else [record.spec.only_rank]
        assert [rank.rank for rank in record.ranks] == ranks
        assert record.ledger.at_peak is not None


def test_one_rank_alone_counts_the_bytes_of_that_rank_among_all(records: list[RunRecord]) -> None:
    assert_alone_as_among_all(records, num_alone={NUM_FEW: 1, 37: 16}[len(records)])


def fully_trained(records: list[RunRecord], num_gpus: int) -> dict[str, RunRecord]:
    """Sharding → the cell of all parameters on so many cards, of which all ran and nothing is offloaded."""
    wanted = ("full", num_gpus, None, "none")
    found = [(one.spec, one) for one in records]
    return {
        spec.sharding: one
        for spec, one in found
        if (spec.method, spec.num_gpus, spec.only_rank, spec.offload) == wanted
    }


def test_shards_are_smaller_than_replicas_and_rank_0_loads_for_all(records: list[RunRecord]) -> None:
    full = fully_trained(records, 2)
    for sharding in {"fsdp", "fsdp1"} & set(full):
        assert full[sharding].ledger.weights_bytes < 0.51 * full["ddp"].ledger.weights_bytes
        first, second = full[sharding].ranks
        assert first.host_tensors_bytes == pytest.approx(full["ddp"].ledger.weights_bytes, rel=0.01)
        assert second.host_tensors_bytes == 0


def test_offloaded_params_gradients_and_state_are_the_hosts(records: list[RunRecord]) -> None:
    """Half the weights, gradients and two states of bf16, and torch's fp32 step counters, a number each; the card keeps
    the buffers."""
    of = [record for record in records if record.spec.offload == "params" and record.spec.method == "full"]
    assert {record.spec.sharding for record in of} == ({"fsdp", "fsdp1"} if len(records) == 37 else {"fsdp"})
    for record in of:
        for rank in record.ranks:
            counters = rank.host_tensors_bytes - 4 * 2 * TINY_LLAMA_PARAMS // 2
            assert 0 < counters <= 4 * 21, record.cell_id
            assert (rank.ledger.gradients_bytes, rank.ledger.optimizer_state_bytes) == (0, 0), record.cell_id
            assert rank.ledger.weights_bytes <= 64, record.cell_id
            assert rank.host_peak_bytes > rank.host_tensors_bytes


def asked(rank: RankRecord) -> dict[tuple[str, str], int]:
    """Payload bytes of a step by phase and kind, without flags of a few numbers."""
    return {(one.phase, one.kind): one.payload_bytes for one in rank.traffic if one.payload_bytes > 4096}


@pytest.mark.parametrize("num_gpus", [2, 4, 8])
def test_what_a_step_moves(records: list[RunRecord], num_gpus: int) -> None:
    """DDP all-reduces the gradients once; full shard gathers the weights twice and scatters the gradients once.

    The root stays gathered from forward to backward: FSDP2's with the last norm and the head, FSDP1's with the
    embedding, too.
    """
    weights = gradients = 2 * TINY_LLAMA_PARAMS  # bf16; no dimension needs padding
    root = 2 * (64 + 256 * 64)  # norm and head
    full = {sharding: record.ranks for sharding, record in fully_trained(records, num_gpus).items()}
    for rank in full.get("ddp", []):
        assert asked(rank) == {("backward", "all_reduce"): gradients}
    if num_gpus > 2 and len(records) == NUM_FEW:
        pytest.skip("these are of two ranks")
    for rank in full["fsdp"]:
        assert asked(rank) == {
            ("forward", "all_gather"): weights,
            ("backward", "all_gather"): weights - root,
            ("backward", "reduce_scatter"): gradients,
        }
        link = sum(one.link_bytes for one in rank.traffic)
        assert link == (3 * weights - root) * (num_gpus - 1) // num_gpus
    for rank in full.get("fsdp1", []):
        assert asked(rank) == {
            ("forward", "all_gather"): weights,
            ("backward", "all_gather"): weights - root - 2 * 256 * 64,
            ("backward", "reduce_scatter"): gradients,
        }


def test_a_hybrid_shares_in_its_group_and_adds_up_among_groups(records: list[RunRecord]) -> None:
    """Two groups of two: a group moves what two ranks move, then each rank all-reduces its half of the gradients."""
    of = [record for record in records if record.spec.shard_size == 2 and record.spec.only_rank is None]
    of_all = ["fsdp-hybrid", "fsdp1-hybrid", "fsdp1-hybrid"]
    assert sorted(record.spec.sharding for record in of) == (of_all if len(records) == 37 else ["fsdp-hybrid"])
    whole = 2 * TINY_LLAMA_PARAMS  # bf16
    for record in of:
        if record.spec.method != "full":
            continue
        for rank in record.ranks:
            moved = asked(rank)
            assert moved["forward", "all_gather"] == moved["backward", "reduce_scatter"] == whole
            assert moved["backward", "all_reduce"] == whole // 2
            assert rank.ledger.gradients_bytes == 4 * TINY_LLAMA_PARAMS // 2
            assert 0 < rank.ledger.weights_bytes - rank.ledger.gradients_bytes <= 64  # buffers
            within = (moved["forward", "all_gather"] + moved["backward", "all_gather"] + whole) // 2
            assert sum(one.link_bytes for one in rank.traffic) == pytest.approx(within + whole // 2, abs=4096)


@exhaustive
def test_a_single_cell_on_as_many_cards_as_it_needs_and_64_ranks_on_one(tmp_path: Path) -> None:
    words = {"model": TINY_LLAMA_PATH, "method": "full", "batch_size": 2, "seq_len": 32}
    record = measured(tmp_path, "H100-SXM", **words, num_gpus=64, sharding="fsdp", only_rank=0)
    assert record.outcome.kind == "ok", record.outcome
    assert (record.emulation.num_cards, len(record.ranks)) == (1, 1)


#: Two layers of a model that ships, a head of 49,152 words tied to its embedding.
TWO_LAYERS = {"model": "smollm2-135m", "num_layers": 2, "method": "full", "num_gpus": 2}


@exhaustive
def test_out_of_memory_of_a_rank_is_the_cells(tmp_path: Path) -> None:
    words = {"batch_size": 2, "seq_len": 64, "sharding": "ddp", "limit_vram": "700MiB"}
    record = measured(tmp_path, "RTX-4090", **TWO_LAYERS, **words)
    assert record.outcome.kind == "oom", record.outcome
    assert record.emulation.num_cards == 2


#: smollm2-135m's first two layers, tied embedding: what ZeRO-3 divides (not the norms), and all, in elements.
DIVIDED = 49152 * 576 + 2 * (2 * 576 * 576 + 2 * 192 * 576 + 3 * 1536 * 576)
NORMS = 5 * 576


def require_deepspeed() -> None:
    if not list(require_emulation().parents[1].glob("lib/python3*/site-packages/deepspeed")):
        pytest.skip("the emulated environment has no DeepSpeed; docs/ranks.md says how to add it")


@exhaustive
def test_one_of_deepspeed_s_eight_ranks_alone_counts_the_bytes_of_that_rank_among_all(tmp_path: Path) -> None:
    require_deepspeed()
    sweep = f"""
name: eight
defaults: {{model: {TINY_LLAMA_PATH}, method: full, batch_size: 2, seq_len: 32, device: cuda, num_gpus: 8}}
cells:
  - {{sharding: [zero2, zero3]}}
  - {{sharding: [zero2, zero3], only_rank: 0}}
"""
    records = swept(tmp_path, sweep, cards="H100-SXM x8")
    assert [record.outcome.kind for record in records] == ["ok"] * 4
    assert_alone_as_among_all(records, num_alone=2)


@pytest.mark.parametrize("sharding", grid(["zero2", "zero3"], "zero3"))
def test_what_a_step_of_deepspeed_s_moves(tmp_path: Path, sharding: str) -> None:
    """ZeRO-2 all-reduces gradients and gathers the stepped weights; ZeRO-3 gathers in forward those that it divides,
    which stay in a model so small, and the others as they are stepped.
    """
    require_deepspeed()
    words = {"recipe": "mixed", "seq_len": 64, "batch_size": 1}
    first, second = measured(tmp_path, "H100-SXM", **TWO_LAYERS, **words, sharding=sharding).ranks
    all_of_them = 2 * (DIVIDED + NORMS)  # bf16
    expected = {("backward", "all_reduce"): all_of_them, ("optimizer_step", "all_gather"): all_of_them}
    if sharding == "zero3":
        expected = {
            ("forward", "all_gather"): 2 * DIVIDED,
            ("backward", "reduce_scatter"): all_of_them,
            ("optimizer_step", "all_gather"): 2 * NORMS,
        }
    assert asked(first) == asked(second) == expected


@exhaustive
def test_one_gpu_that_offloads_is_a_rank(tmp_path: Path) -> None:
    """The formula counts a step's counter, which CPUAdam has not."""
    require_deepspeed()
    words = {**TWO_LAYERS, "recipe": "mixed", "seq_len": 64, "batch_size": 1, "sharding": "zero3", "num_gpus": 1}
    record = measured(tmp_path, "H100-SXM", **words, offload="params")
    [rank] = record.ranks
    assert record.ledger.optimizer_state_bytes == 0
    assert rank.host_tensors_bytes + 4 == of_rank_bytes(record.spec) > 20 * DIVIDED


@exhaustive
def test_4_bit_weights_are_loaded_whole_under_zero_3_and_divided_as_training_begins(tmp_path: Path) -> None:
    require_deepspeed()
    words = {"model": TINY_LLAMA_PATH, "method": "qlora", "kbit_prep": "none", "batch_size": 2, "seq_len": 32}
    record = measured(tmp_path, "H100-SXM", **words, num_gpus=2, sharding="zero3")
    assert record.outcome.kind == "ok", record.outcome
    assert record.facts.num_quantised_params > 0
    for rank in record.ranks:
        assert ("optimizer_step", "all_gather") in asked(rank)
        assert rank.ledger.optimizer_state_bytes < 2 * 4 * record.facts.num_trainable_params


@pytest.mark.parametrize(
    ("sharding", "offload", "beside"),
    grid(
        [("zero2", "optimizer", 2 * 49152 * 576), ("zero3", "optimizer", 0), ("zero3", "params", DIVIDED + NORMS)],
        ("zero3", "params", DIVIDED + NORMS),
    ),
)
def test_what_deepspeed_steps_on_the_host(tmp_path: Path, sharding: str, offload: str, beside: int) -> None:
    """The host has a half of fp32 weights, gradients, two states, and 16 bits to or from the card. Beside it ZeRO-2
    has a buffer of the largest gradient's size, and offloaded parameters are there in bf16.
    """
    require_deepspeed()
    if not list(Path.home().glob(".cache/torch_extensions/*/cpu_adam/cpu_adam.so")):
        pytest.skip("DeepSpeed's CPUAdam is not compiled here yet, which takes minutes; docs/ranks.md says how")
    words = {"recipe": "mixed", "seq_len": 64, "batch_size": 1, "sharding": sharding, "offload": offload}
    record = measured(tmp_path, "H100-SXM", **TWO_LAYERS, **words)
    assert record.outcome.kind == "ok", record.outcome
    for rank in record.ranks:
        assert rank.host_tensors_bytes == 18 * (DIVIDED + NORMS) // 2 + beside
        assert rank.ledger.optimizer_state_bytes == 0


@exhaustive
def test_a_fused_loss_under_ddp_is_what_is_predicted(tmp_path: Path) -> None:
    words = {"seq_len": 512, "batch_size": 2, "sharding": "ddp", "fused_linear_cross_entropy": True}
    record = measured(tmp_path, "L40S", **TWO_LAYERS, **words)
    predicted = recorded.predict(record.spec, gpu=find_gpu("L40S")).peak_allocated_bytes.value
    assert record.peak.allocated_bytes == pytest.approx(predicted, rel=0.001)
