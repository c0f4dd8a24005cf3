"""Recommend: what fits is predict's word, money is hours times an offer, the answers are what they say."""

from datetime import date
from pathlib import Path
from typing import Any

import pytest
from factories import make_environment, make_record, make_spec
from typer.testing import CliRunner

from vramprobe import api, catalog
from vramprobe.cli.display_recommend import limits_of
from vramprobe.cli.verbs import app
from vramprobe.emulate.installation import NotEmulatable
from vramprobe.errors import SpecError, StoreError, UnknownName, VramprobeError
from vramprobe.predict import at_hand, recorded
from vramprobe.predict.questions import cell_on_ranks
from vramprobe.predict.shares import near
from vramprobe.predict.verdict import verdict
from vramprobe.recipe import book
from vramprobe.recommend import inverse
from vramprobe.recommend.answer import Recommendation
from vramprobe.recommend.inverse import Most
from vramprobe.recommend.options import Limits, Option
from vramprobe.recommend.settings import SettingsSearch
from vramprobe.recommend.step_cost import speed_at_hand
from vramprobe.spec import CellSpec
from vramprobe.speed.measured import measured_speeds
from vramprobe.speed.rates import shipped_counted

ASKED: dict[str, Any] = {"model": "llama-3.1-8b", "seq_len": 2048, "tokens": "50M", "today": date(2026, 3, 20)}


#: A few of each size and kind, so that a question takes a second.
GPUS = ["RTX-4090", "A100-80GB-SXM", "H100-SXM"]


def asked(**options: Any) -> Recommendation:
    found = api.recommend(**ASKED | {"method": "qlora", "gpus": GPUS} | options)
    assert isinstance(found, Recommendation)
    return found


def most(**options: Any) -> Most:
    found = api.recommend(**ASKED | {"method": "qlora", "gpus": GPUS} | options)
    assert isinstance(found, Most)
    return found


def cannot_record(spec: CellSpec, *words: Any, **more: Any) -> Any:
    raise NotEmulatable(f"{spec.cell_id} is not recorded here")


@pytest.fixture(autouse=True)
def _nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are of the recipes that ship."""
    monkeypatch.setattr(book, "find_recipe", cannot_record)
    monkeypatch.setattr(recorded, "find_recipe", cannot_record)
    monkeypatch.setattr(at_hand, "kept_for", lambda *words: None)


@pytest.mark.parametrize(
    ("method", "gpu", "num_gpus"),
    [("qlora", "RTX-4090", 1), ("qlora", "RTX-4090", 4), ("full", "H100-SXM", 8), ("full", "L4", 2)],
)
def test_the_best_setting_is_the_best_of_all(method: str, gpu: str, num_gpus: int) -> None:
    """Each setting by itself, as one that is given."""
    words = {"model": "llama-3.1-8b", "seq_len": 2048, "method": method}
    search, card = SettingsSearch(words, global_batch=16, sharding=None), catalog.find_gpu(gpu)
    every = []
    for candidate in search.candidates(num_gpus):
        given = words | candidate._asdict()
        sharding = given.pop("sharding")
        if (one := SettingsSearch(given, global_batch=16, sharding=sharding).best(card, num_gpus)) is not None:
            every.append(one)
    ranked = {word: [one for one in every if one.verdict.verdict == word] for word in ("fits", "tight")}
    able = ranked["fits"] or ranked["tight"]
    fastest = max(able, key=lambda one: one.estimate.tokens_per_second.value, default=None)
    least = min(every, key=lambda one: one.verdict.needed_bytes.value)
    assert search.best(card, num_gpus) == (fastest or least)


@pytest.fixture(scope="module")
def found() -> Recommendation:
    return asked(deadline="12h", budget=40)


def answer(found: Recommendation, question: str) -> Option:
    return next(one.option for one in found.answers if one.question == question)


def test_every_verdict_is_predicts(found: Recommendation) -> None:
    """Under a Trainer's loop, with room for other releases; of several GPUs near."""
    for one in found.options[:8]:
        words = {"model": "llama-3.1-8b", "seq_len": 2048, "method": one.method, **one.setting.words()}
        card = catalog.find_gpu(one.gpu)
        if one.num_gpus > 1:
            said = verdict(near(cell_on_ranks(device="cuda", **words), card), card)
        else:
            said = api.predict(widen=True, gpu=one.gpu, loop="trainer", **words).verdict
        assert said == one.setting.verdict
    assert {one.num_gpus > 1 for one in found.options[:8]} == {True, False}


def test_what_a_ranks_load_needs_is_looked_at_in_every_option() -> None:
    """Quantized weights are whole while they are loaded; where that is less than the steps need, those stay."""
    question = {"model": "llama-3.1-70b", "method": "qlora", "seq_len": 2048, "gpus": ["A100-40GB-SXM", "H100-SXM"]}
    found = {(one.gpu, one.num_gpus): one for one in api.recommend(tokens="50M", **question).options}
    short = found["A100-40GB-SXM", 8].setting
    assert short.verdict.verdict == "does not fit"
    assert any(one.startswith("loading allocates the most, 4") for one in short.warnings)
    assert found["H100-SXM", 8].setting.verdict.verdict == "fits"


def test_where_no_rank_loads_the_model_nothing_answers() -> None:
    """QLoRA of a 70B on eight RTX 4090s: each loads it whole."""
    asked = {"model": "llama-3.1-70b", "method": "qlora", "seq_len": 2048, "tokens": "50M", "gpus": ["RTX-4090"]}
    found = api.recommend(**asked)
    assert [answer.option for answer in found.answers] == [None, None]
    (one,) = [one for one in found.options if one.num_gpus == 8]
    assert one.setting.verdict.verdict == "does not fit"
    assert found.by_method["qlora"].startswith("nothing fits; nearest")


def test_time_is_tokens_over_speed_and_money_is_time_times_the_offer(found: Recommendation) -> None:
    for one in found.options:
        if one.hours is None:
            continue
        setting = one.setting
        assert one.hours.value == pytest.approx(50e6 / setting.estimate.tokens_per_second.value / 3600)
        disk = one.host.disk_bytes / 1e9 * (one.offer.usd_per_gb_month or 0) / 730
        sent = one.host.checkpoint_bytes / 1e9 * (one.offer.usd_per_gb_egress or 0)
        assert one.usd.value == pytest.approx(one.hours.value * (one.offer.hourly(one.num_gpus) + disk) + sent)
        assert one.usd.low < one.usd.value < one.usd.high
        assert setting.batch_size * setting.grad_accum * one.num_gpus == 16


def test_the_estimate_is_that_of_the_cell_s_counted_launches(found: Recommendation) -> None:
    for one in found.options[:8]:
        words = {"model": "llama-3.1-8b", "method": "qlora", "seq_len": 2048, "device": "cuda"} | one.setting.words()
        assert speed_at_hand(cell_on_ranks(**words), catalog.find_gpu(one.gpu)) == one.setting.estimate


def test_the_answers_are_what_they_say(found: Recommendation) -> None:
    fitting = [one for one in found.options if one.fits]
    assert answer(found, "cheapest").usd == min((one.usd for one in fitting), key=lambda usd: usd.value)
    assert answer(found, "fastest").hours == min((one.hours for one in fitting), key=lambda hours: hours.value)
    in_time = answer(found, "within the deadline")
    assert in_time.hours.high <= 12
    assert all(one.usd.value >= in_time.usd.value for one in fitting if one.hours.high <= 12)
    chosen = [one.option for one in found.answers]
    assert all(bool(one.why_not) != (one in chosen) for one in found.options)


def test_a_deadline_that_nothing_meets_says_how_long_the_fastest_takes() -> None:
    found = asked(deadline="1m", max_gpus=1)
    late = found.answers[-1]
    assert late.option is None
    assert late.doubt.startswith("none ends within 1.0 min; the fastest takes ")
    assert "takes longer than the deadline" in found.answers[0].doubt


def test_over_budget_is_said() -> None:
    found = asked(budget=0.1, max_gpus=1)
    assert "costs more than the budget of $0.10" in found.answers[0].doubt
    priced = [one for one in found.options if one.usd is not None]
    assert {limits_of(one) for one in priced if one.fits} == {"too dear"}  # the answers' own rows, too
    assert (found.verdict, asked(max_gpus=1).verdict) == ("does not fit", "fits")


def test_the_verdict_is_that_of_what_keeps_the_limits(found: Recommendation) -> None:
    fits = next(one for one in found.options if one.fits and one.usd is not None)
    verdict = fits.setting.verdict.model_copy(update={"verdict": "tight"})
    tight = fits.model_copy(update={"setting": fits.setting.model_copy(update={"verdict": verdict})})
    assert Limits().verdict_of([tight, fits]) == "fits"
    assert Limits(deadline_seconds=3600 * fits.hours.high).verdict_of([tight]) == "tight"
    assert Limits(deadline_seconds=1).verdict_of([fits]) == "does not fit"


@pytest.mark.parametrize(("words", "code"), [((), 3), (("--exit-zero",), 0)])
def test_the_exit_code_says_that_nothing_keeps_the_budget(words: tuple[str, ...], code: int) -> None:
    of_a_cell = ("--model", "llama-3.1-8b", "--method", "qlora", "--seq-len", "2048", "--tokens", "50M")
    asked = ("recommend", *of_a_cell, "--gpu", "RTX-4090", "--max-gpus", "1", "--budget", "0.01", *words)
    done = CliRunner().invoke(app, asked)
    assert (done.exit_code, "more than the budget" in done.output) == (code, True), done.output


def test_what_does_not_fit_says_how_much_it_lacks_and_what_would_help() -> None:
    found = asked(model="llama-3.1-70b", method="full", gpus=["RTX-4090"], max_gpus=2)
    assert [one.hours for one in found.options] == [None, None]
    assert all(one.why_not.startswith("does not fit: ") for one in found.options)
    assert found.by_method["full"].startswith("nothing fits; nearest 2 × RTX-4090")
    assert found.changes_of.num_gpus == 2
    assert any(one.options == {"method": "lora"} and one.saved_bytes > 0 for one in found.changes)


def test_an_open_method_is_all_three_side_by_side() -> None:
    found = asked(method=None, max_gpus=1, lora_r=8)
    assert set(found.by_method) == {"full", "lora", "qlora"} == {one.method for one in found.options}
    assert any("8 B/param" in note for note in found.notes)


def test_options_that_are_given_stay() -> None:
    found = asked(batch_size=2, gradient_checkpointing=True, max_gpus=2, sharding="zero3", gpus=["H100-SXM"])
    for one in found.options:
        assert (one.setting.batch_size, one.setting.gradient_checkpointing) == (2, True)
    assert [one.setting.sharding for one in sorted(found.options, key=lambda one: one.num_gpus)] == [None, "zero3"]


def test_a_steps_sequences_are_divided_without_a_rest() -> None:
    for one in asked(global_batch=24, gpus=["RTX-4090", "H100-SXM"]).options:
        assert one.setting.batch_size * one.setting.grad_accum * one.num_gpus == 24
    more = asked(global_batch=2, gpus=["H100-SXM"]).options
    assert {one.num_gpus: one.setting.batch_size * one.setting.grad_accum for one in more} == {1: 2, 2: 1, 4: 1, 8: 1}


def test_a_card_without_a_price_is_judged_and_costs_nothing_known() -> None:
    found = asked(gpus=["RTX-A5000", "RTX-3060"], max_gpus=1)
    assert {one.gpu for one in found.options} == {"RTX-A5000", "RTX-3060"}
    assert all(one.usd is None and one.offer is None for one in found.options)
    assert found.answers[0].option is None
    assert answer(found, "fastest").gpu == "RTX-A5000"
    assert all("no price" in one.why_not for one in found.options if one.gpu == "RTX-3060" and one.hours)


def test_a_card_that_cannot_be_recorded_is_left_out_and_named() -> None:
    """A T4 has recipes of its own alone, of which none ships; AMD's cards are answered for by an A100's."""
    found = asked(gpus=["MI300X", "T4"], max_gpus=1)
    assert {one.gpu for one in found.options} == {"MI300X"}
    assert any(note.startswith("left out: T4: ") and "is not recorded here" in note for note in found.notes)
    with pytest.raises(NotEmulatable, match="is not recorded here"):
        asked(gpus=["T4"])


def test_changes_add_up_and_are_the_estimates_of_their_own_cells() -> None:
    """Those of a recipe at hand; what would be recorded is counted."""
    found = asked(method="lora", gpus=["H100-SXM", "RTX-A5000"])
    now = found.changes_of
    own = {"model": "llama-3.1-8b", "seq_len": 2048, "method": "lora", "device": "cuda"} | now.setting.words()
    for one in found.changes:
        assert one.hours + one.saved_hours == pytest.approx(now.hours.value)
        assert one.usd + one.saved_usd == pytest.approx(now.usd.value)
        assert one.verdict.needed_bytes.value + one.saved_bytes == now.setting.verdict.needed_bytes.value
        made = speed_at_hand(cell_on_ranks(**own | one.options), catalog.find_gpu(now.gpu), near=True)
        assert one.hours == pytest.approx(50e6 / made.tokens_per_second.value / 3600), one.options
    assert {name for one in found.changes for name in one.options} >= {"lora_r", "gradient_checkpointing", "method"}
    assert any("other options would each take a recording" in note for note in found.notes)


def test_of_several_gpus_it_is_said_that_predict_records_them() -> None:
    found = asked(model="llama-3.1-70b", gpus=["A100-80GB-SXM"])
    several = [one for one in found.options if one.num_gpus > 1]
    assert all("near, " in one.setting.verdict.reason for one in several)
    said = "vramprobe predict --num-gpus N --sharding KIND --gpu GPU records one rank"
    assert any(said in one for one in found.notes)
    assert not any(note.startswith("one rank of") for note in found.notes)


def test_old_prices_are_said_to_be_old() -> None:
    young, old = (asked(max_gpus=1, gpus=[*GPUS, "A10"], today=day) for day in (date(2026, 11, 1), date(2027, 3, 1)))
    said = "prices on-demand, of 2026-09 to 2026-10, from vramprobe/data/prices.csv"
    assert said in young.notes
    assert young.old_prices == []
    assert any(note.startswith(f"{said}; those of 2026-09, 2026-10 are more than 3 months old") for note in old.notes)
    offers = [one.option.offer for one in old.answers if one.option and one.option.offer]
    assert old.old_prices == sorted({offer.date for offer in offers}) != []


def test_storage_and_egress_are_counted_where_their_price_is_known(tmp_path: Path) -> None:
    file, head = tmp_path / "mine.csv", "provider,date,terms,gpu,n_gpus,usd_per_hour"
    row = "Mine,2026-03,on-demand,H100-SXM,1,2"
    costs = []
    for columns, values in (
        ("", ""),
        (",usd_per_gb_month", ",7.3"),
        (",usd_per_gb_egress", ",1"),
        (",usd_per_gb_month,usd_per_gb_egress", ",0,0"),
    ):
        file.write_text(f"{head}{columns}\n{row}{values}\n")
        made = asked(prices=file, max_gpus=1)
        costs.append(made.options[0].usd.value)
        assert any("storage and egress of Mine" in note for note in made.notes) is (values != ",0,0")
    host, hours = made.options[0].host, made.options[0].hours.value
    assert costs[1] - costs[0] == pytest.approx(hours * host.disk_bytes / 1e9 * 0.01)
    assert costs[2] - costs[0] == pytest.approx(host.checkpoint_bytes / 1e9)
    assert costs[3] == costs[0]
    file.write_text(f"{head},usd_per_gb_egress\n{row},9\n{row.replace(',1,2', ',1,2.1')},0\n")
    assert asked(prices=file, max_gpus=1).options[0].offer.usd_per_hour == 2.1  # dearer by the hour, cheaper in all


def test_a_budget_pays_for_tokens() -> None:
    found = most(tokens=None, budget=40, most="tokens")
    assert found.option.usd.value == pytest.approx(40, rel=1e-6)
    assert found.value > 10**8
    both = most(tokens=None, budget=40, deadline="1h", most="tokens")
    assert both.option.hours.value <= 1 + 1e-6
    assert both.value < found.value


def test_the_longest_sequences_meet_the_limits() -> None:
    long = most(seq_len=None, most="seq_len", budget=10, gpus=["RTX-4090"], max_gpus=1)
    assert long.value % 256 == 0
    assert long.option.fits
    assert long.option.usd.value <= 10


def test_the_largest_model_meets_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A 4090 holds, in 4 bit, no 70B of these three, and no 8B within a tenth of the dollars."""
    names = ("llama-3.1-70b", "llama-3.1-8b", "qwen3-0.6b")
    monkeypatch.setattr(inverse, "list_models", lambda: [catalog.find_model(name) for name in names])
    asked = {"model": None, "most": "model", "gpus": ["RTX-4090"], "max_gpus": 1}
    large, small = most(budget=10, **asked), most(budget=1, **asked)
    assert (large.value, small.value) == names[1:]
    assert large.option.usd.value <= 10
    assert small.option.usd.value <= 1
    with pytest.raises(VramprobeError, match="no model of the catalog"):
        most(budget=0.01, **asked)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"tokens": None}, SpecError, "tokens: missing"),
        ({"tokens": "many"}, SpecError, "write for instance 50M"),
        ({"tokens": "0"}, SpecError, "not a number of tokens"),
        ({"model": None}, SpecError, "model: missing"),
        ({"seq_len": None}, SpecError, "seq_len: missing"),
        ({"deadline": "soon"}, SpecError, "not a duration"),
        ({"budget": 0.0}, SpecError, "budget: 0.0 given; must be from 0.01 to"),
        ({"global_batch": 0}, SpecError, "global_batch: 0 given"),
        ({"max_gpus": 16}, SpecError, "max_gpus: 16 given; must be from 1 to 8"),
        ({"method": "dreambooth"}, SpecError, "allowed: full, lora, qlora"),
        ({"sharding": "magic"}, SpecError, "allowed: ddp"),
        ({"terms": "free"}, SpecError, "allowed: on-demand, spot, reserved"),
        ({"terms": "spot", "provider": "RunPod"}, SpecError, "no spot price is known of RunPod"),
        ({"provider": "Nobody"}, UnknownName, "Prices are known of CoreWeave"),
        ({"region": "eu"}, SpecError, "no price at hand names its region"),
        ({"gpus": ["RTX-9090"]}, UnknownName, "unknown GPU"),
        ({"device": "cpu"}, SpecError, "about CUDA cards"),
        ({"lora_r": 0}, SpecError, "lora_r"),
        ({"most": "money"}, SpecError, "allowed: tokens, seq_len, model"),
        ({"most": "tokens"}, SpecError, "do not give it"),
        ({"tokens": None, "most": "tokens"}, SpecError, "give a budget in dollars"),
        ({"records": "nowhere"}, StoreError, "nowhere"),
    ],
)
def test_what_cannot_be_is_said(options: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        asked(**options)


def record_of(gpu: str, seconds: float, **changes: Any) -> Any:
    spec = make_spec(model="smollm2-360m", method="lora", device="cuda", batch_size=8, seq_len=1024)
    record = make_record(spec, instrument="cuda", environment=make_environment(device_name=gpu))
    timing = record.timing.model_copy(update={"step_seconds": [seconds, seconds]})
    return record.model_copy(update={"timing": timing, **changes})


def test_records_of_a_card_replace_its_estimate(tmp_path: Path) -> None:
    one = record_of("NVIDIA A100-SXM4-80GB", 1.0)
    made = speed_at_hand(one.spec, catalog.find_gpu("A100-80GB-SXM"))
    told = made.seconds
    known = measured_speeds([record_of("NVIDIA A100-SXM4-80GB", told / 1.5)], speed_at_hand)
    assert known["A100-80GB-SXM"].factor == pytest.approx(1.5)
    assert known["A100-80GB-SXM"].half_width == max(0.1, shipped_counted().half_widths["usual"])
    others = [record_of("NVIDIA A100-SXM4-80GB", 1.0, **own) for own in ({"instrument": "emulated"}, {"timing": None})]
    assert measured_speeds([record_of("Some CPU", 1.0), *others], speed_at_hand) == {}
    file = tmp_path / "mine.jsonl"
    file.write_text(record_of("NVIDIA A100-SXM4-80GB", told / 1.5).to_json_line() + "\n")
    plain, mine = (asked(gpus=["A100-80GB-SXM"], max_gpus=1, records=records) for records in (None, file))
    speeds = [found.options[0].setting.estimate.tokens_per_second.value for found in (plain, mine)]
    assert speeds[1] / speeds[0] == pytest.approx(1.5)
    assert any("your records" in note for note in mine.notes)
    on_it = {"gpus": ["A100-80GB-SXM"], "max_gpus": 1, "deadline": "24h"}
    paid = [most(tokens=None, most="tokens", records=records, **on_it).value for records in (None, file)]
    assert paid[1] / paid[0] == pytest.approx(1.5)
    for asked_for in ("seq_len", "model"):
        made = most(**{asked_for: None}, most=asked_for, records=file, **on_it)
        assert made.option.setting.estimate.condition == "measured"
    file.write_text(record_of("Some CPU", 1.0).to_json_line() + "\n")
    with pytest.raises(SpecError, match="no step time that was measured on a GPU"):
        asked(records=file)
