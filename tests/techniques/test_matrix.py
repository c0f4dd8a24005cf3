"""Combinations of techniques: refusals against what ran and cells' own rules, counts by hand."""

import re
from itertools import combinations

from typer.testing import CliRunner

from vramprobe.cli.verbs import app
from vramprobe.errors import VramprobeError
from vramprobe.resolve import resolve
from vramprobe.techniques.matrix import matrix, parts, ran_together, refusal
from vramprobe.techniques.registry import Technique, bases, exclusions, techniques

CELL = {"model": "llama-3.1-8b", "method": "lora", "batch_size": 1, "seq_len": 2048, "device": "cuda"}


def of(name: str) -> Technique:
    return techniques()[name]


def test_one_technique_takes_a_part_at_a_time() -> None:
    assert refusal(of("sgd"), of("lomo")) == "optimizer: one at a time"
    assert refusal(of("liger"), of("liger_loss")) == "loss: one at a time"
    assert refusal(of("nf4"), of("liger")) is None


def test_a_refusal_holds_both_ways() -> None:
    assert refusal(of("pissa"), of("nf4")) == refusal(of("nf4"), of("pissa")) is not None


def test_exclusions_name_what_is_there() -> None:
    for one in exclusions():
        assert set(one.techniques) <= set(techniques())
        assert set(one.others) <= {*techniques(), *parts()}


def test_what_ran_together_includes_what_the_base_has() -> None:
    assert frozenset({"sgd", "gradient_checkpointing"}) in ran_together()
    assert frozenset({"vera", "lora"}) not in ran_together(), "it takes LoRA's place"
    for pair in ran_together():
        assert refusal(*map(of, pair)) is None, pair


def test_the_matrix_counts_each_pair_once() -> None:
    cells = matrix()
    assert len(cells) == len(parts()) * (len(parts()) - 1) // 2
    sizes = {part: sum(one.part == part for one in techniques().values()) for part in parts()}
    for cell in cells:
        assert cell.num_pairs == sizes[cell.part] * sizes[cell.other]
        assert cell.num_ran + cell.num_refused <= cell.num_pairs
    assert sum(cell.num_ran for cell in cells) == len(ran_together())


def test_no_two_options_that_a_cell_refuses_are_said_to_combine() -> None:
    known = [one for one in techniques().values() if one.changes and one.kind != "trainer"]
    for one, other in combinations(known, 2):
        words = CELL | one.changes | other.changes
        if refusal(one, other) is not None or (one.part == "adapter" and other.part == "weights"):
            continue
        try:
            resolve(**words)
        except VramprobeError as error:
            raise AssertionError(f"{one.id} with {other.id}") from error


def test_the_command_prints_the_matrix_and_takes_no_cell_beside_it() -> None:
    shown = CliRunner().invoke(app, ["techniques", "--matrix"])
    assert shown.exit_code == 0
    assert re.search(r"1 optimizer +one", shown.stdout)
    assert "refuses Liger's fused loss" in shown.stdout
    refused = CliRunner().invoke(app, ["techniques", "--matrix", "--kind", "adapter"], env={"COLUMNS": "200"})
    assert refused.exit_code == 2
    assert "leave --kind" in refused.output


def test_bases_have_techniques_that_are_there() -> None:
    for base in bases().values():
        assert set(base.has) <= set(techniques())
