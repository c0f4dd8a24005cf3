"""A counted step with more micro-steps and on several GPUs, against counts and seconds by hand."""

from pathlib import Path

import pytest
from factories import on_ranks as cell_on_ranks

from vramprobe.catalog import find_gpu, list_gpus
from vramprobe.errors import FitError, SpecError
from vramprobe.resolve import resolve
from vramprobe.spec import CellSpec
from vramprobe.speed import rates as rates_module
from vramprobe.speed.counted import Count, CountRow
from vramprobe.speed.rates import shipped_counted
from vramprobe.speed.scaled import Exchanged, estimate, whole_step
from vramprobe.speed.shapes import sent_bytes_per_second

GB = 1_000_000_000
SHARED = Exchanged(weights_bytes=16 * GB, gradients_bytes=4 * GB)


def cell(**options: object) -> CellSpec:
    usual = {"model": "llama-2-7b", "method": "full", "device": "cuda", "batch_size": 2, "seq_len": 1024}
    return resolve(**{**usual, **options})


def row(phase: str, num_bytes: int, launches: int) -> CountRow:
    return CountRow(phase=phase, what="other", name="aten::mul", read=num_bytes, launches=launches)


#: One micro-step, and the optimizer's; ten launches of each, and ten that nobody claims.
COUNT = Count(step=2, num_launches=30, num_claimed=20, rows=(row("forward", 8 * GB, 10), row("optimizer", GB, 10)))


def test_more_micro_steps_are_as_many_times_the_forward_and_one_optimizer_step() -> None:
    found = whole_step(cell(grad_accum=4), COUNT, 1, SHARED)
    rows = [(one.phase, one.read, one.launches) for one in found.rows]
    assert rows == [("forward", 32 * GB, 40), ("optimizer", GB, 10)]
    assert (found.num_claimed, found.num_launches) == (50, 90)
    assert found.link_bytes == ()
    assert whole_step(cell(grad_accum=4), COUNT, 2, SHARED).rows[0].read == 16 * GB


@pytest.mark.parametrize(
    ("sharding", "sent", "optimizer_bytes"),
    [
        ("ddp", [("all_reduce", 2 * 4 * 7 / 8)], GB),  # once a step, of every gradient
        ("zero2", [("all_reduce", 2 * 4 * 7 / 8)], GB // 8),
        ("fsdp", [("all_gather", 2 * 2 * 16 * 7 / 8), ("reduce_scatter", 2 * 4 * 7 / 8)], GB // 8),
        ("fsdp1", [("all_gather", 2 * 2 * 16 * 7 / 8), ("reduce_scatter", 2 * 4 * 7 / 8)], GB // 8),
        ("fsdp-shard-grad-op", [("all_gather", 2 * 16 * 7 / 8), ("reduce_scatter", 2 * 4 * 7 / 8)], GB // 8),
    ],
)
def test_ranks_send_what_their_sharding_gathers_and_reduces(
    sharding: str, sent: list[tuple[str, float]], optimizer_bytes: int
) -> None:
    """Each of 8 ranks with two micro-steps sends 7/8 of 16 GB of weights and of 4 GB of gradients around a ring."""
    found = whole_step(cell_on_ranks(cell(grad_accum=2), 8, sharding), COUNT, 1, SHARED)
    assert found.link_bytes == tuple((kind, round(size * GB), 8) for kind, size in sent)
    assert [one.read for one in found.rows] == [16 * GB, optimizer_bytes]


def test_what_is_sent_takes_its_time_beside_the_kernels() -> None:
    gpu = find_gpu("H100-SXM")
    spec = cell_on_ranks(cell(), 8, "ddp")
    made = estimate(spec, whole_step(spec, COUNT, 1, SHARED), gpu)
    rate = sent_bytes_per_second(gpu, "all_reduce", 8) * shipped_counted().rates.link
    assert made.parts["collectives"] == pytest.approx(2 * 4 * GB * 7 / 8 / rate)
    assert made.seconds > made.parts["collectives"]
    assert made.tokens_per_second.value == pytest.approx(8 * 2 * 1024 / made.seconds)


def test_cards_over_pcie_take_longer_the_more_they_are() -> None:
    def collectives(num: int) -> float:
        spec = cell_on_ranks(cell(), num, "fsdp")
        return estimate(spec, whole_step(spec, COUNT, 1, SHARED), find_gpu("L40S")).parts["collectives"]

    assert collectives(8) > 10 * collectives(2)  # eight share the host's


def test_several_machines_are_not_predicted() -> None:
    spec = cell_on_ranks(cell(), 16, "fsdp")
    with pytest.raises(SpecError, match="16 ranks share a collective"):
        estimate(spec, whole_step(spec, COUNT, 1, SHARED), find_gpu("H100-SXM"))


def test_every_card_with_a_peak_has_an_estimate_and_an_unseen_one_a_wider_interval() -> None:
    fit, spec = shipped_counted(), cell(seq_len=4096)
    shapes = "bf16[32000, 4096] i[2, 4096] -> bf16[2, 4096]"
    embedding = CountRow(phase="forward", what="other", name="aten::embedding", shapes=shapes)
    product = CountRow(phase="forward", what="product", name="aten::mm", flops=10**15, launches=10)
    count = Count(step=2, num_launches=10, num_claimed=10, rows=(embedding, product))
    found = {gpu.short_name: estimate(spec, count, gpu) for gpu in list_gpus()}
    for name, made in found.items():
        assert 0 < made.mfu < 1
        assert made.tokens_per_second.low < made.tokens_per_second.value < made.tokens_per_second.high
        assert (made.condition == "card never seen") == (name not in fit.cards)
    spread = {name: made.tokens_per_second.high / made.tokens_per_second.value for name, made in found.items()}
    assert spread["B200"] > spread["A100-80GB-SXM"]
    speeds = [found[name].tokens_per_second.value for name in ("T4", "L4", "RTX-4090", "H100-SXM", "B200")]
    assert speeds == sorted(speeds)


def test_a_damaged_fit_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "counted.json").write_text("{")
    monkeypatch.setattr(rates_module, "data_file", lambda name: tmp_path / "counted.json")
    with pytest.raises(FitError, match="install it anew"):
        shipped_counted.__wrapped__()
