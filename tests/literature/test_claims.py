"""Published claims: each has one verdict, worked out by one rule, from figures that the printed commands reproduce."""

import csv
import dataclasses
import json
import math
import re
import shlex
import tomllib
from contextlib import suppress
from functools import cache
from itertools import islice, product
from pathlib import Path
from typing import Any

import pytest
from factories import make_environment, make_record
from grids import grid
from typer.testing import CliRunner

from benchmarks.truth.recipes import is_a_rank, of_run
from tests.oracles import oracles
from tests.oracles.oracles import Oracle
from vramprobe import api, catalog
from vramprobe.architecture import architecture
from vramprobe.architecture.expressions import ExpressionError, evaluate
from vramprobe.catalog.claims import Claim, list_claims
from vramprobe.catalog.shipped import csv_rows
from vramprobe.cli import verbs
from vramprobe.errors import StoreError, UnknownName
from vramprobe.literature import readings
from vramprobe.literature.claims import TOLERANCE, VERDICTS, Judgement, bounds_of, judge, judge_claims
from vramprobe.literature.figures import Cells, ClaimFigure
from vramprobe.literature.readings import ClaimCase, Reading, reading_of
from vramprobe.predict import recorded
from vramprobe.predict.at_hand import NotAtHand, shipped_alone
from vramprobe.recipe.recipe import CannotRecord
from vramprobe.recommend.step_cost import speed_at_hand
from vramprobe.records.outcomes import Oom
from vramprobe.records.phase_memory import Peak
from vramprobe.report.claims import as_json, says, text_files
from vramprobe.resolve import resolve
from vramprobe.trainers import USUAL_LOOP

ROOT = Path(__file__).parents[2]
HAND = tomllib.loads(Path(__file__).with_name("verdicts.toml").read_text())
CLAIMS = {claim.id: claim for claim in list_claims()}


@cache
def judged() -> dict[str, Judgement]:
    return {one.claim.id: one for one in judge_claims()}


def test_all_135_claims_get_one_verdict_of_the_list_each_in_file_order() -> None:
    found = list(judged().values())
    assert [one.claim.id for one in found] == list(CLAIMS)
    assert len(found) == 135
    assert {one.verdict for one in found} <= set(VERDICTS)
    for one in found:
        assert one.reason.endswith(".")
        assert bool(one.depends_on) == (one.verdict == "depends")
        assert one.figure is not None or one.verdict == "not about memory"


def test_every_rule_is_some_claims_and_every_axis_some_rules() -> None:
    rules, axes = (list(csv_rows(f"claim_{name}.csv")) for name in ("rules", "conditions"))
    assert {row["rule"] for row in rules} == {claim.rule for claim in CLAIMS.values()}
    used = {name.removeprefix("^") for row in rules for name in f"{row['axes']} {row['others']}".split()}
    assert used - {"model", "GPU", "provider"} == {row["axis"] for row in axes}
    assert {row["part"] for row in rules} == {"case", "other", "aside", "floor", "ceiling", "ruled out"}


@pytest.mark.parametrize(
    ("column", "wrong", "said"),
    [
        ("expression", "2 * parameters", "unknown 'parameters'"),
        ("expression", "peak /", "no expression"),
        ("expression", "open('x')", "has no function 'open'"),
        ("axes", "recipee", "unknown 'recipee'"),
        ("expression", "params / usable", "claim L1-10 names no GPU"),
        ("where", "after.peak > 1", "unknown 'after'"),
    ],
)
def test_an_error_names_the_row(monkeypatch: pytest.MonkeyPatch, column: str, wrong: str, said: str) -> None:
    row = {"rule": "peak, full", "part": "case", "expression": "params", "axes": "2048", "note": "Why."}
    row = dict.fromkeys(csv_rows("claim_rules.csv")[0], "") | row | {column: wrong}
    conditions = readings._grouped("claim_conditions.csv", "axis")
    tables = {"rule": {"peak, full": [row]}, "axis": conditions}
    monkeypatch.setattr(readings, "_grouped", lambda file, column: tables[column])
    with pytest.raises(ExpressionError, match=r"claim_rules\.csv, rule 'peak, full', case .*" + re.escape(said)):
        judge_claims(["L1-10"])


def test_a_claim_without_its_rule_is_named() -> None:
    claim = dataclasses.replace(CLAIMS["L1-10"], rule="peek")
    with pytest.raises(ExpressionError, match="claim L1-10 has the rule 'peek'"):
        reading_of(claim, [claim], Cells())


def test_a_speed_is_judged_where_both_cards_have_published_steps() -> None:
    journal = (ROOT / "benchmarks" / "speed" / "counted_steps.jsonl").read_text()
    cards = {json.loads(line)["card"] for line in journal.splitlines()}
    assert {"H100-SXM", "A100-80GB-SXM"} <= cards  # the rule "H100 over A100" judges
    assert "B200" not in cards  # and "B200 over H100" does not


def test_no_verdict_is_stored() -> None:
    for path in (ROOT / "vramprobe" / "data").glob("claim*.csv"):
        header = path.read_text().splitlines()[0]
        assert "verdict" not in header, path


@pytest.mark.parametrize("name", HAND["verdicts"])
def test_verdicts_worked_out_by_hand(name: str) -> None:
    one, by_hand = judged()[name], HAND["verdicts"][name]
    assert one.verdict == by_hand["verdict"]
    if "figure" in by_hand:
        assert one.figure.value == pytest.approx(evaluate(by_hand["figure"]), rel=1e-3, abs=1e-9)


def test_figures_by_hand() -> None:
    one = judged()
    assert one["L1-06"].most.figure.value == 0.5625  # 4 B per block of 64 without double quantisation
    assert one["L2-01"].most.figure.value == pytest.approx(18, rel=1e-3)
    assert one["L2-01"].holds_under.startswith("bf16, fp32 moments and master weights: 16")
    # ZeRO-3 over 8 ranks: 16 B × 70,553,706,496 / 8; DeepSpeed's bucket and live parameters, 1.5e9 in 16 bits; beside
    # them the layers' inputs, and the logits in 16 and twice in 32 bits, with the gradient in 16.
    h100 = catalog.find_gpu("H100-SXM")
    assert h100.cuda_total_bytes is not None
    assert h100.context_bytes is not None
    usable = h100.cuda_total_bytes - h100.context_bytes - 3 * 2**29
    by_hand = 16 * 70_553_706_496 / 8 + 2 * 1.5e9 + 2048 * (2 * 80 * 8192 + 12 * 128_256)
    assert one["L1-18"].figure.value * usable == pytest.approx(by_hand, rel=2e-3)
    # rank 64 on all linear layers of an 80-layer model: q, o 8192+8192; k, v 8192+1024; MLP 8192+28672
    lora_params = 64 * 80 * (2 * 16384 + 2 * 9216 + 3 * 36864)
    assert one["O5-21"].most.figure.value == pytest.approx(4 * lora_params / 1e9)
    assert one["O5-23"].figure.value == pytest.approx(8 * lora_params / 1e9)
    for name in ("G4-22", "G4-23", "G4-33", "G4-35", "G4-37", "G4-39"):  # off by a factor of 1,000
        assert one[name].figure.value / CLAIMS[name].high == pytest.approx(1000, rel=0.02)
        assert one[name].holds_under.startswith("10 million tokens")
        assert "10e9 / " in one[name].reason


def test_rates_are_estimates_of_the_speed_room() -> None:
    one = judged()["G4-32"]
    words = {"model": "llama-2-7b", "method": "lora", "batch_size": 4, "seq_len": 2048, "gradient_checkpointing": True}
    spec = resolve(device="cuda", **words)
    ours = speed_at_hand(spec, catalog.find_gpu("RTX-4090"))
    assert one.figure.engine == "estimate"
    assert one.figure.value == pytest.approx(ours.tokens_per_second.value, rel=1e-3)
    assert (one.figure.low, one.figure.high) == (ours.tokens_per_second.low, ours.tokens_per_second.high)
    assert "checkpointing off" not in str(one.most)  # which does not fit that card
    added = judged()["O5-28"]
    assert added.verdict == "depends"
    assert added.least.conditions["what"] == "full"
    assert judged()["L3-14"].verdict == "holds"  # an H100 is 2 to 3 times an A100


def rank_over_emulated(one: Oracle, rule: str, **sets: Any) -> float:
    """Bytes of a rank by a rule of claims, over those of the emulated one."""
    row, spec = next(row for row in csv_rows("claim_rules.csv") if row["rule"] == rule), one.spec
    sets |= {name: getattr(spec, name) for name in ("num_gpus", "seq_len", "gradient_checkpointing")}
    words = {name: getattr(spec, name) for name in ("method", "batch_size", "lora_r")}
    claim = dataclasses.replace(CLAIMS["L1-16"], models=(spec.model,), **words)
    return readings._Names(claim, [], Cells(), row, sets).value(row["expression"].partition(" /")[0]) / of_run(one)[0]


def test_a_rank_is_within_4_percent_of_an_emulated_one() -> None:
    """FSDP of models of 3B to 70B is within 4 %, as the rules' notes say; ZeRO-3 of 70B on 8 GPUs is within 1 %."""
    usual = {"num_layers": None, "grad_accum": 1, "optim": "adamw_torch_fused", "dora": False, "offload": "none"}
    usual |= {"cp_size": 1, "attn": "sdpa", "lora_targets": "all-linear", "loop": USUAL_LOOP}
    by_fsdp, by_zero = [], []
    for one in oracles.cells():
        spec = one.spec
        if not is_a_rank(one) or any(getattr(spec, name) not in (value, None) for name, value in usual.items()):
            continue
        if of_run(one)[0] is None or not 3e9 < architecture(spec.architecture).num_params < 71e9:
            continue
        full = {"recipe": "mixed", "w": 4} if spec.dtype == "fp32" else {"recipe": "all-bf16", "w": 2}
        adapters = {"kbit_prep": spec.kbit_prep}
        sets = full | {"extra": 0} if spec.method == "full" else adapters
        if spec.sharding == "fsdp":
            with suppress(NotAtHand):
                by_fsdp.append(rank_over_emulated(one, f"fits on several, {spec.method}", **sets))
        elif (spec.sharding, spec.method, spec.model, spec.num_gpus) == ("zero3", "full", "llama-3.1-70b", 8):
            sets = {"recipe": "all-bf16", "optim": "adamw_bnb_32bit", "w": 2, "extra": 4}
            by_zero.append(rank_over_emulated(one, "fits on several, full, ZeRO-3", **sets))
    assert len(by_fsdp) >= 10
    assert all(0.96 < ratio < 1.04 for ratio in by_fsdp)
    assert by_zero == [pytest.approx(1, abs=0.01)]


@pytest.mark.parametrize("row", HAND["changed"], ids=lambda row: f"{row['claim']}-{row['low']}")
def test_a_changed_figure_changes_the_verdict(row: dict[str, Any]) -> None:
    claim = dataclasses.replace(CLAIMS[row["claim"]], low=row["low"], high=row["high"])
    assert judge(claim, reading_of(claim, list(CLAIMS.values()), Cells())).verdict == row["verdict"]


def test_a_changed_rate_changes_the_time_that_is_multiplied_from_it() -> None:
    claims = CLAIMS | {"G4-32": dataclasses.replace(CLAIMS["G4-32"], low=480e3, high=480e3)}
    one = judge(CLAIMS["G4-33"], reading_of(CLAIMS["G4-33"], list(claims.values()), Cells()))
    assert one.figure.value == pytest.approx(10e9 / 480e3 / 3600)


def a_claim(low: float | None, high: float | None, unit: str = "x", statement: str = "") -> Claim:
    return dataclasses.replace(CLAIMS["L1-22"], low=low, high=high, unit=unit, statement=statement)


def figure(unit: str, arithmetic: str) -> ClaimFigure:
    value = evaluate(arithmetic)
    return ClaimFigure(value=value, low=value, high=value, unit=unit, engine="arithmetic", arithmetic=arithmetic)


def cases(*values: float, unit: str = "x") -> tuple[ClaimCase, ...]:
    return tuple(ClaimCase({"size": f"size {value}"}, figure(unit, f"{value}")) for value in values)


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([10.0], "holds"),
        ([10.0, 10.2], "holds"),
        ([10.0, 12.0], "depends"),
        ([12.0, 13.0], "understates"),
        ([7.0, 8.0], "overstates"),
        ([8.0, 12.0], "depends"),
        ([], "not about memory"),
    ],
)
def test_the_rule(values: list[float], verdict: str) -> None:
    assert judge(a_claim(10, 10), Reading(cases=cases(*values), note="Why.")).verdict == verdict


def test_what_nothing_can_be_below_makes_a_claim_impossible() -> None:
    claim = a_claim(10, 10)
    for bound, verdict in ((10.2, "understates"), (10.4, "impossible")):
        reading = Reading(cases=cases(12.0), note="Why.", floor=figure("x", f"{bound}"), floor_is="It takes")
        assert judge(claim, reading).verdict == verdict
    # a minimum must do by itself, whatever more is recommended
    floor = figure("GB", "60")
    for statement, verdict in (("minimum and recommended", "impossible"), ("range", "depends")):
        reading = Reading(cases=cases(62.0, 90.0, unit="GB"), note="Why.", floor=floor, floor_is="It takes")
        assert judge(a_claim(48, 64, "GB", statement), reading).verdict == verdict


def test_bounds_take_gb_as_either_and_round_nothing_that_is_counted() -> None:
    low, high = bounds_of(a_claim(80, 80, "GB"))
    assert low == pytest.approx(80 * (1 - TOLERANCE))
    assert high == pytest.approx(80 * 2**30 / 1e9 * (1 + TOLERANCE))
    assert bounds_of(a_claim(14, 16, "GPUs")) == (14, 16)
    assert bounds_of(a_claim(1, 1, "bool")) == (-math.inf, 1.0)
    assert bounds_of(a_claim(0, 0, "bool"))[0] < 1
    assert bounds_of(a_claim(None, 2, "x"))[0] == -math.inf
    assert 0.5 * (1 + TOLERANCE) < 0.5158  # NF4 never passes for half a byte


@pytest.mark.parametrize(
    ("value_of", "decisive"),
    [
        (lambda length, recipe: 20 if recipe == "b" else 10, ("recipe",)),
        (lambda length, recipe: 20 if recipe == "b" and length == 2 else 10, ("length", "recipe")),
        (lambda length, recipe: 20 if length > 1 else 10, ("length",)),
    ],
)
def test_the_conditions_that_decide_come_from_changing_one_alone(value_of, decisive: tuple[str, ...]) -> None:
    cases = [
        ClaimCase({"length": f"{length} tokens", "recipe": recipe, "seed": seed}, figure("x", str(value)))
        for seed, recipe, length in product(("one", "two"), ("a", "b"), (1, 2, 3))
        for value in [value_of(length, recipe)]
    ]
    found = judge(a_claim(10, 10), Reading(cases=tuple(cases), note="Why."))
    assert tuple(sorted(found.depends_on)) == decisive
    assert found.reason.startswith("Agrees with ")


def test_a_measured_record_goes_before_a_prediction() -> None:
    options = {"model": "llama-2-70b", "method": "qlora", "batch_size": 2, "seq_len": 2048, "device": "cuda"}
    options |= {"gradient_checkpointing": True, "lora_r": 8, "kbit_prep": "peft"}
    spec = resolve(seed=7, steps=4, **options)
    sizes = {"allocated_bytes": 18, "reserved_bytes": 19, "device_bytes": 20, "load_allocated_bytes": 1}
    peak = Peak(**{name: size * 10**9 for name, size in sizes.items()}, phase="backward", step=2)
    environment = make_environment(device_name="Test GPU")
    changes = {"instrument": "cuda", "peak": peak, "environment": environment}
    record = make_record(resolve(**options)).model_copy(update=changes | {"spec": spec})
    (one,) = judge_claims(["G4-20"], records=[record])
    assert (one.figure.engine, one.figure.value) == ("cuda on Test GPU", 18.0)
    assert one.sources[0].command.startswith("vramprobe measure --model llama-2-70b")
    assert (one.figure.low, one.figure.high) == (18.0, 20.0)
    oom = Oom(phase="backward", step=1, requested_bytes=1, allocated_bytes=1, message="CUDA out of memory")
    for unfit in ({"instrument": "cpu"}, {"outcome": oom}, {"spec": spec.model_copy(update={"seq_len": 1024})}):
        other = record.model_copy(update=unfit)
        assert judge_claims(["G4-20"], records=[other])[0].figure.engine == "recipe"


def test_each_number_of_the_arithmetic_that_has_a_command_stands_in_it() -> None:
    for one in judged().values():
        shown = [found for found in (one.figure, *(case.figure for case in (one.least, one.most) if case)) if found]
        for found in shown:
            assert evaluate(found.arithmetic) == found.value
            for source in found.sources:
                assert f"{source.value:_}" in found.arithmetic


def commands() -> dict[tuple[str, str], int]:
    found = {}
    for one in judged().values():
        for source in one.sources:
            key = (source.command, source.reads)
            assert found.setdefault(key, source.value) == source.value
    return found


def printed(command: str) -> str | None:
    """Return what a command prints, run in this process; None where it would have to record and cannot."""
    words = shlex.split(command)
    assert words[0] == "vramprobe"
    done = CliRunner().invoke(verbs.app, words[1:])
    if isinstance(done.exception, CannotRecord):
        return None
    assert done.exit_code == 0, f"{command}: {done.output}"
    return done.stdout  # what it says of a recording is on stderr


@pytest.mark.parametrize("eighth", grid([None, *range(8)], None))
def test_every_command_prints_the_number_in_the_table(eighth: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are within 0.5 %: where a recipe at hand answers, of some; by eighths, each recorded where it must be."""
    found = commands()
    assert len({command for command, _ in found}) > 150
    if eighth is None:
        monkeypatch.setattr(recorded, "predict", not_here)
    outputs: dict[str, str | None] = {}
    for (command, reads), value in islice(found.items(), eighth or 0, None, 8):
        text = outputs.setdefault(command, printed(command))
        if text is None:
            assert eighth is None, command
            continue
        got = json.loads(text)
        for key in reads.split("."):
            got = got.get(key, 0)
        assert got == pytest.approx(value, rel=0.005), f"{command}: {reads}"
    assert sum(text is not None for text in outputs.values()) >= 10


def not_here(*given: Any, **words: Any) -> Any:
    raise CannotRecord("not here")


def test_nothing_is_recorded_for_a_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "predict", lambda *given, **words: pytest.fail("recorded"))
    claim = dataclasses.replace(CLAIMS["L2-04"], models=("falcon-7b",))  # of which nothing is kept
    with shipped_alone(), pytest.raises(NotAtHand, match="no recipe of falcon-7b_"):
        reading_of(claim, [claim], Cells())


def test_every_claim_is_published() -> None:
    """That the tables are fresh is tests/report/test_published.py's."""
    rows = list(csv.DictReader((ROOT / "results" / "claims" / "claims.csv").read_text().splitlines()))
    assert [row["id"] for row in rows] == list(CLAIMS)
    page = (ROOT / "results" / "claims" / "claims.md").read_text()
    assert all(f"### {name}\n" in page and f"| {name} |" in page for name in CLAIMS)


def test_filters_choose_and_bad_names_help() -> None:
    assert [one.claim.id for one in judge_claims(["g4-33", "L1-06"])] == ["L1-06", "G4-33"]
    assert {one.claim.topic for one in judge_claims(topics=["cost", "storage"])} == {"cost", "storage"}
    on_card = judge_claims(gpu="RTX-4090")
    assert on_card
    assert all("RTX-4090" in [gpu.short_name for gpu in one.claim.gpus] for one in on_card)
    with pytest.raises(UnknownName, match=r"unknown claim 'L1-6'\. Nearest: .*L1-06"):
        judge_claims(["L1-6"])
    with pytest.raises(UnknownName, match=r"unknown topic 'memry'\. Nearest: memory"):
        judge_claims(topics=["memry"])
    with pytest.raises(UnknownName, match="unknown GPU"):
        judge_claims(gpu="RTX-9999")
    with pytest.raises(StoreError, match="nowhere"):
        api.claims(["L1-06"], results="nowhere")


def test_the_command_line_prints_a_table_json_and_files(tmp_path: Path) -> None:
    text = CliRunner().invoke(verbs.app, ["claims", "--id", "L1-06", "--id", "G4-33"], env={"COLUMNS": "200"}).output
    assert "understates" in text
    assert "2 claims: 1 understates, 1 impossible" in text
    found = json.loads(CliRunner().invoke(verbs.app, ["claims", "--id", "L1-06", "--json"]).output)
    assert (found[0]["id"], found[0]["verdict"], found[0]["figure"]) == ("L1-06", "understates", 0.515869)
    done = CliRunner().invoke(verbs.app, ["claims", "--topic", "cost", "-o", str(tmp_path)])
    assert done.exit_code == 0
    kinds = sorted(path.name.removeprefix("claims.") for path in tmp_path.iterdir())
    assert kinds == ["csv", "html", "json", "md", "tex"]
    assert f"vramprobe claims --topic cost -o {tmp_path}" in (tmp_path / "claims.md").read_text()


def test_files_are_the_same_each_time_and_json_is_strict() -> None:
    some = [one for one in judged().values() if one.claim.id.startswith("O5")]
    assert text_files(some, "x") == text_files(judge_claims([one.claim.id for one in some]), "x")
    json.loads(as_json(list(judged().values())), parse_constant=lambda word: pytest.fail(word))


def test_says_writes_a_claims_figure() -> None:
    written = {"L1-06": "0.5 B/param", "L3-05": "160 GB to 200 GB", "L1-10": "over 1,100 GB", "L1-25": "up to 1"}
    written |= {"L1-12": "fits", "L3-10": "does not fit", "L1-21": "a definition"}
    assert {name: says(CLAIMS[name]) for name in written} == written
