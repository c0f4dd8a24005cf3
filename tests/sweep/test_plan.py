"""The plan: what is run in which order, what certainly does not fit, and what it takes and costs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from factories import make_oom, make_record, make_spec, specs, synthetic

from vramprobe import api
from vramprobe.cli.display_plan import plan_as_json, plan_in_words
from vramprobe.errors import SpecError, UnknownName
from vramprobe.model.card_fit import save_fit
from vramprobe.predict import questions, recorded
from vramprobe.predict.expected import fit_records
from vramprobe.records import store, writing
from vramprobe.records.outcomes import Skipped
from vramprobe.records.record import Timing
from vramprobe.spec import CellSpec
from vramprobe.sweep.card import Card, Rate, card_named, card_seen, hourly_rate
from vramprobe.sweep.definition import Sweep
from vramprobe.sweep.duration import Pace, account_seconds, pace_of
from vramprobe.sweep.plan import NOT_AT_HAND, START_SECONDS, Plan, SweepPolicy, make_plan, plan_sweep, with_evidence
from vramprobe.sweep.resume import ResumedCell, open_journal
from vramprobe.units import GIB

CARD_24 = Card(name="Test GPU", total_bytes=24 * GIB, gpu=None)
EMULATED = Path(__file__).parents[2] / "configs" / "sweeps" / "emulated.yaml"
RESULTS = Path(__file__).parents[2] / "results" / "cpu" / "quickstart"


def cell(model: str = "llama-3.1-8b", **options: Any) -> CellSpec:
    words = {"method": "qlora", "device": "cuda", "batch_size": 1, "seq_len": 1024, "gradient_checkpointing": True}
    return make_spec(model=model, **(words | options))


def planned(*specs: CellSpec, **options: Any) -> Plan:
    cells = [ResumedCell(spec, "run", "no attempt yet") for spec in specs]
    return make_plan(cells, **({"card": CARD_24} | options))


def test_verdicts_come_from_the_interval_and_the_card() -> None:
    plan = planned(
        cell(),  # 8B in 4 bits, a few GiB
        cell(method="full", seq_len=4096),  # 8 bytes for each of 8 billion parameters
        cell(method="lora", seq_len=4096),  # 16 GB of weights, logits, and what else there is
        cell("t5-large"),  # no recipe ships
        policy=SweepPolicy(audit_share=0.0),
    )
    found = {(row.spec.method, row.spec.model): (row.action, row.verdict) for row in plan.rows}
    assert found[("qlora", "llama-3.1-8b")] == ("run", "fits")
    assert found[("full", "llama-3.1-8b")] == ("skip", "certain oom")
    assert found[("lora", "llama-3.1-8b")] == ("run", "risky")
    assert found[("qlora", "t5-large")] == ("run", "unknown")
    assert next(row.note for row in plan.rows if row.spec.model == "t5-large") == NOT_AT_HAND
    assert plan.verdicts() == {"fits": 1, "certain oom": 1, "risky": 1, "unknown": 1}


def test_an_oom_of_other_libraries_is_stale_and_no_evidence(tmp_path: Path) -> None:
    """Or the cell that is to be measured again would be skipped for what it did before."""
    oom = make_oom(cell("t5-large"))
    writing.append(tmp_path / "records.jsonl", oom)
    newer = oom.environment.model_copy(update={"versions": oom.environment.versions | {"torch": "2.14.0"}})
    sweep = Sweep(
        name="s", description="", cells=(oom.spec, cell("t5-large", seq_len=2048)), held_out=frozenset(), notes=()
    )
    actions = [
        [
            row.action
            for row in plan_sweep(
                sweep,
                open_journal(tmp_path / "records.jsonl"),
                card=CARD_24,
                context_of=lambda spec, here=here: here,
                policy=SweepPolicy(audit_share=0.0),
            ).rows
        ]
        for here in (oom.environment, newer)
    ]
    assert actions == [["kept", "skip"], ["stale", "run"]]


def test_small_weights_come_first_and_the_same_weights_together() -> None:
    specs = [
        cell("llama-3.1-70b", num_layers=20),
        cell("smollm2-135m", seq_len=2048),
        cell(method="lora", seq_len=256),
        cell("smollm2-135m"),
        cell(),
        cell(method="lora", seq_len=128),
        cell(seq_len=128),
    ]
    rows = planned(*specs, card=card_named("H200")).rows
    assert [(row.spec.model, row.spec.method, row.spec.seq_len) for row in rows] == [
        ("smollm2-135m", "qlora", 1024),
        ("smollm2-135m", "qlora", 2048),
        ("llama-3.1-8b", "qlora", 128),
        ("llama-3.1-8b", "qlora", 1024),
        ("llama-3.1-8b", "lora", 128),
        ("llama-3.1-8b", "lora", 256),
        ("llama-3.1-70b", "qlora", 1024),
    ]


def test_a_few_cells_at_the_boundary_come_before_all_others() -> None:
    small = [cell("smollm2-135m", seq_len=64 * number) for number in range(1, 20)]
    risky = cell(method="lora", seq_len=4096)
    plan = planned(*small, risky)
    assert plan.rows[0].spec == risky
    assert plan.rows[0].verdict == "risky"


def test_an_observed_oom_skips_what_it_dominates_and_the_record_says_so() -> None:
    smaller, larger = cell("t5-large"), cell("t5-large", seq_len=2048)
    (row,) = planned(larger, ooms=[make_oom(smaller)], policy=SweepPolicy(audit_share=0.0)).rows
    assert (row.action, row.verdict, row.skipped.why) == ("skip", "certain oom", "dominated")
    assert row.seconds == 0
    (row,) = planned(larger, ooms=[make_oom(smaller)], policy=SweepPolicy(skip=False)).rows
    assert (row.action, row.verdict) == ("run", "certain oom")
    (row,) = planned(larger, ooms=[make_oom(smaller)], policy=SweepPolicy(audit_share=1.0)).rows
    assert (row.action, row.verdict) == ("run", "certain oom")
    assert "audits a skip" in row.reason


def test_a_skip_that_still_holds_is_kept_and_not_written_again() -> None:
    spec = cell(method="full", seq_len=4096)
    skipped = make_record(spec, outcome=Skipped(why="predicted", evidence="too large"))
    policy = SweepPolicy(audit_share=0.0)
    resumed = ResumedCell(spec, "run", "the last attempt ended as skipped", skipped)
    (row,) = make_plan([resumed], card=CARD_24, policy=policy).rows
    assert (row.action, row.skipped) == ("kept", None)
    assert row.reason.startswith("skipped at 2026-03-01")
    (row,) = make_plan([resumed], card=card_named("H200"), policy=policy).rows  # on a larger card it is run
    assert (row.action, row.verdict) == ("run", "fits")


def test_a_limited_card_is_a_smaller_card() -> None:
    spec = cell(method="full", seq_len=4096, limit_vram="24GiB")
    (row,) = planned(spec, card=card_named("H200"), policy=SweepPolicy(audit_share=0.0)).rows
    assert row.action == "skip"


def test_audits_are_as_many_as_asked_and_the_same_each_time() -> None:
    specs = [make_spec(seed=seed) for seed in range(1000)]
    policy = SweepPolicy(audit_share=0.05)
    audited = [spec.seed for spec in specs if policy.audits(spec)]
    assert 30 < len(audited) < 70
    assert audited == [spec.seed for spec in specs if policy.audits(spec)]
    assert not any(SweepPolicy(audit_share=0.0).audits(spec) for spec in specs)


def test_evidence_that_comes_later_skips_a_row_when_its_turn_comes() -> None:
    (row,) = planned(cell("t5-large", seq_len=2048)).rows
    policy = SweepPolicy(audit_share=0.0)
    assert with_evidence(row, [], CARD_24, policy) is row
    assert with_evidence(row, [make_oom(cell("t5-large"))], CARD_24, policy).action == "skip"


def test_what_is_done_with_comes_first_and_costs_nothing() -> None:
    record = make_record(cell())
    cells = [
        ResumedCell(cell("smollm2-135m"), "run", "no attempt yet"),
        ResumedCell(cell(), "kept", "ok", record),
        ResumedCell(cell(seq_len=64), "quarantined", "never ended"),
    ]
    plan = make_plan(cells, card=CARD_24, rate=Rate(3.6, "test"))
    assert [row.action for row in plan.rows] == ["kept", "quarantined", "run"]
    assert plan.actions() == {"kept": 1, "quarantined": 1, "run": 1}
    assert [row.seconds > 0 for row in plan.rows] == [False, False, True]
    assert plan.seconds == plan.rows[2].seconds + START_SECONDS
    assert plan.dollars == pytest.approx(plan.seconds * 0.001)
    assert make_plan(cells[1:], card=None).seconds == 0


# Time


def test_durations_of_the_committed_cells_are_within_a_factor_of_two() -> None:
    records = store.read(RESULTS).records
    expected = [account_seconds(one.spec, one.spec.num_params, None) for one in records]
    taken = [one.timing.total_seconds for one in records]
    assert sum(expected) == pytest.approx(sum(taken), rel=0.5)
    ratios = [here / there for here, there in zip(taken, expected, strict=True)]
    assert min(ratios) > 0.4
    assert max(ratios) < 2.5


def test_a_pace_is_the_median_of_comparable_models_else_of_all() -> None:
    pace = Pace()
    assert pace.correct(10**9, 7.0) == 7.0
    for taken in (2.0, 3.0, 40.0):
        pace.learn(10**9, 1.0, taken)
    pace.learn(10**8, 1.0, 0.5)
    assert pace.correct(2 * 10**9, 7.0) == 21.0
    assert pace.correct(2 * 10**8, 7.0) == 3.5
    assert pace.correct(10**12, 7.0) == 7.0 * 2.5  # nothing comparable: the median of all four
    records = store.read(RESULTS).records
    learnt = pace_of(records, None)
    sizes = [one.spec.num_params for one in records]
    expected = [
        learnt.correct(size, account_seconds(one.spec, size, None)) for size, one in zip(sizes, records, strict=True)
    ]
    assert sum(expected) == pytest.approx(sum(one.timing.total_seconds for one in records), rel=0.25)


def test_more_work_takes_longer_and_a_better_card_takes_less() -> None:
    def seconds(gpu: str = "H200", **options: Any) -> float:
        spec = cell(**options)
        return account_seconds(spec, spec.num_params, card_named(gpu).gpu)

    assert seconds(seq_len=4096) > seconds(seq_len=512)
    assert seconds(method="full", seq_len=4096) > seconds(method="lora", seq_len=4096)
    assert seconds(gradient_checkpointing=True, seq_len=8192) > seconds(gradient_checkpointing=False, seq_len=8192)
    assert seconds("L4", seq_len=4096) > seconds(seq_len=4096)
    assert seconds(torch_compile=True) == pytest.approx(seconds() + 60)


@pytest.mark.parametrize(
    ("model", "layers", "low", "high"),
    [
        ("llama-3.1-8b", None, 8.0e9, 8.1e9),
        ("t5-large", None, 7.0e8, 7.8e8),  # not in the arithmetic: the catalog's count
        ("t5-large", 12, 3.7e8, 4.3e8),  # half its layers and all of its embedding
    ],
)
def test_parameters_of_any_model(model: str, layers: int | None, low: float, high: float) -> None:
    assert low < cell(model, num_layers=layers).num_params < high


# Money and cards


def test_prices_come_from_the_user_the_provider_or_the_cheapest() -> None:
    card = card_named("H100-SXM")
    assert hourly_rate(card, 2.5).usd_per_hour == 2.5
    assert hourly_rate(card, provider="lambda") == Rate(4.29, "Lambda on demand, 2026-09")
    assert hourly_rate(card).source == "RunPod on demand, 2026-10"
    assert hourly_rate(None) is None
    assert hourly_rate(card_seen("Unheard-of GPU", GIB)) is None
    with pytest.raises(SpecError, match="the CPU has no price"):
        hourly_rate(None, provider="Lambda")
    with pytest.raises(UnknownName, match=r"unknown provider 'Lambada'\. Nearest: Lambda"):
        hourly_rate(card, provider="Lambada")
    with pytest.raises(SpecError, match="more than 0 dollars"):
        hourly_rate(card, -1)


def test_a_card_that_nvml_names_is_found_in_the_catalog() -> None:
    assert card_seen("NVIDIA H200", 143771 * 2**20).gpu.short_name == "H200"
    assert card_seen("NVIDIA GeForce RTX 4090", 24 * GIB).gpu.short_name == "RTX-4090"
    assert card_seen("Unheard-of GPU", GIB).gpu is None


def test_a_plan_for_a_card_that_is_not_here() -> None:
    words = {"only": ["llama-3.1-8b_qlora"], "usd_per_hour": 0.34}
    plan = api.plan(EMULATED, gpu="RTX-4090", out="nowhere", **words)
    assert (len(plan.rows), plan.card.name) == (2, "GeForce RTX 4090")
    assert {row.verdict for row in plan.rows} == {"fits"}
    assert plan.rate == Rate(0.34, "as given")


def test_it_predicts_what_predict_does() -> None:
    (row,) = api.plan(EMULATED, gpu="RTX-4090", out="nowhere", only=["llama-3.1-8b_qlora*s1024*"]).rows
    told = questions.predict(
        model="llama-3.1-8b",
        method="qlora",
        batch_size=1,
        seq_len=1024,
        gradient_checkpointing=True,
        gpu="RTX-4090",
        device="cuda",
        loop="trainer",  # told, so without the note on other loops
    )
    assert row.prediction == told
    assert told.reserved_bytes is not None


def test_the_fit_of_the_folder_predicts(tmp_path: Path) -> None:
    save_fit(fit_records(map(synthetic, specs()[:4])), tmp_path / "fit.json")
    words = {"gpu": "H100-SXM", "only": ["llama-3.1-8b_qlora"]}
    plan, bare = (api.plan(EMULATED, out=out, **words) for out in (tmp_path, "nowhere"))
    assert [row.prediction.fit is not None for row in (*plan.rows, *bare.rows)] == [True, True, False, False]
    assert plan_in_words(plan).endswith("; 2 predicted by recipes and a fit of 4 records; estimated, not measured")
    assert plan_in_words(bare).endswith("; 2 predicted by recipes; estimated, not measured")


@pytest.mark.usefixtures("shipped_alone")
def test_what_no_recipe_is_at_hand_of_is_recorded_where_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one go, after the others; a cell of the CPU is measured and not predicted."""
    asked = []

    def record(specs: Sequence[CellSpec], stop: object, **words: object) -> list[str]:
        asked.append([spec.method for spec in specs])
        return ["recorded"] * len(specs)

    monkeypatch.setattr(recorded, "predict_many", record)
    words = {"gpu": "H200", "only": ["qwen2.5-1.5b*s2048"], "out": "nowhere"}
    assert {row.note for row in api.plan(EMULATED, records=True, **words).rows} == {"recorded", ""}
    assert asked == [["full"]]
    (near,) = (row.prediction for row in api.plan(EMULATED, **words).rows if row.spec.method == "full")
    assert near is not None
    assert any(note.endswith("near, not exact") for note in near.warnings)
    assert {row.note for row in planned(cell(device="cpu"), card=None, recording=record).rows} == {""}


def test_an_emulated_cell_takes_this_machines_time_and_no_money() -> None:
    def seconds(gpu: str = "H200", **options: Any) -> float:
        spec = cell(**options)
        return account_seconds(spec, spec.num_params, card_named(gpu).gpu, is_emulated=True)

    assert seconds(seq_len=4096) == seconds(seq_len=512) == seconds("L4")  # tokens and the card compute nothing
    assert seconds(gradient_checkpointing=True) > seconds(gradient_checkpointing=False)
    big = {"steps": 4}
    step = seconds(**big) - seconds(**(big | {"steps": 3}))
    assert 1 < step < 2
    assert seconds(**(big | {"timing_steps": 50})) == seconds(**(big | {"timing_steps": 0}))  # none is timed there
    assert 2 < seconds(**big) - 5 * step < 7  # five steps, as one more is under the history; the rest is loading
    card = card_seen("NVIDIA H200", 141 * GIB, is_emulated=True)
    assert hourly_rate(card) is None
    assert [row.seconds for row in planned(cell(), card=card).rows] == [seconds()]


def test_a_pace_learns_from_emulated_records_by_their_own_account() -> None:
    spec = cell()
    expected = account_seconds(spec, spec.num_params, None, is_emulated=True)
    record = make_record(spec, instrument="emulated", timing=Timing(total_seconds=3 * expected))
    assert pace_of([record], None).correct(spec.num_params, 1.0) == pytest.approx(3)


def test_a_plan_for_an_emulated_card_says_so() -> None:
    card = card_seen("NVIDIA H200", 141 * GIB, is_emulated=True)
    assert "; on emulated NVIDIA H200 (141.00 GiB): 1 fits" in plan_in_words(planned(cell(), card=card))
    assert plan_as_json(planned(cell(), card=card), with_cells=False)["card"]["is_emulated"]
    assert "; on Test GPU (" in plan_in_words(planned(cell()))
