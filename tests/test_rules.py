"""The table of shardings: a row for each kind, and its two modules; what the command line and recommend offer."""

from importlib.util import find_spec
from typing import get_args

import pytest
from factories import make_spec, on_ranks

from vramprobe.choices import Offload, Optim, Quant, Sharding
from vramprobe.predict.shares import near
from vramprobe.resolve import resolve
from vramprobe.rules.not_sharded import cannot_offload, cannot_quantize, cannot_step
from vramprobe.rules.sharding import ONE_GROUP, SHARDINGS


def test_each_kind_has_a_row() -> None:
    assert tuple(SHARDINGS) == get_args(Sharding)


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_a_row_names_values_that_there_are_and_says_why_others_are_not_run(sharding: str) -> None:
    rules = SHARDINGS[sharding]
    assert {*rules.optimizers, *rules.offload_optimizers} <= set(get_args(Optim))
    assert {*rules.quants, "none"} <= set(get_args(Quant))
    assert {*rules.offloads, "none"} <= set(get_args(Offload))
    assert {*rules.quants, "none"} == set(get_args(Quant)) or rules.no_quant
    assert {*rules.offloads, "none"} == set(get_args(Offload)) or rules.no_offload
    assert rules.within is None or SHARDINGS[rules.within].module == rules.module
    assert find_spec(f"vramprobe.workload.sharding.{rules.module}") is not None


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_a_row_is_what_the_judges_go_by(sharding: str) -> None:
    rules = SHARDINGS[sharding]
    for name, judge, allowed in (
        ("quant", cannot_quantize, rules.quants),
        ("offload", cannot_offload, rules.offloads),
        ("optim", cannot_step, rules.optimizers or get_args(Optim)),
    ):
        for value in get_args({"quant": Quant, "offload": Offload, "optim": Optim}[name]):
            reason = judge(on_ranks(make_spec(device="cuda"), 2, sharding, **{name: value}))
            assert (reason is None) == (value in (*allowed, "none")), (name, value, reason)


@pytest.mark.parametrize("sharding", [kind for kind in SHARDINGS if kind not in ("tp", "device-map")])
def test_each_kind_is_composed_and_divides_what_its_row_says(sharding: str) -> None:
    rules = SHARDINGS[sharding]
    groups = {} if rules.within is None else {"shard_size": 2}
    recipe, width = ("all-bf16", 2) if sharding == "ddp" else ("mixed", 4)  # whose step on one GPU ships
    words = {"model": "smollm2-135m", "method": "full", "recipe": recipe, "batch_size": 2, "seq_len": 2048}
    spec = on_ranks(resolve(**words, device="cuda"), 4 if groups else 2, sharding, **groups)
    found, moments_bytes = near(spec), 2 * width * 134_515_008
    assert (found.sharding, found.num_gpus, found.cell_id) == (sharding, spec.num_gpus, spec.cell_id)
    assert (found.terms["optimizer_state"] < moments_bytes) == rules.divides_state


def test_recommend_tries_what_it_takes() -> None:
    tried = {kind for kind, rules in SHARDINGS.items() if rules.recommended_for}
    assert tried == {"ddp", "zero2", "fsdp"}
    assert tried <= set(ONE_GROUP)
