"""Hold the speed model against what others measured: ``python benchmarks/speed/speed_model.py`` (minutes).

Each source of vramprobe/data/published_speed.csv is left out of a fit in turn and predicted by it; so is each card. The
80 % intervals are made from what is left out of fits that have not seen the source either. Beside it two rules: one
utilisation for each card and method, the median of the other sources in the same conditions (with recomputation
counted, HFU, and without, MFU), and the utilisation of 40 % that guides quote. Repeats of one configuration count once.
Written: benchmarks/speed/speed_model.md and .csv, and vramprobe/data/rates/speed.json, which ships; ``--check`` writes
nothing and fails where one of the tables is not what the rows give.
"""

from __future__ import annotations

import hashlib
import math
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.speed.published_steps import (
    NoCase,
    SpeedCase,
    SpeedRow,
    case_of,
    list_published_speed,
    observations,
)
from benchmarks.speed.rates_fit import (
    StepObservation,
    card_of,
    fit_speed,
    inside_intervals,
    left_out_errors,
    source_of,
)
from benchmarks.tables import as_csv, as_markdown, filled, write_or_check
from vramprobe.catalog.shipped import data_file
from vramprobe.speed.rates import Condition, SpeedFit

OUT = Path(__file__).resolve().with_suffix(".md")
ROWS = OUT.with_suffix(".csv")
GUIDES_UTILISATION = 0.4
Found = tuple[SpeedRow, SpeedCase, StepObservation]
Errors = dict[int, float]  # id of an observation → log(predicted / published)


def utilisation(one: StepObservation, case: SpeedCase, *, recomputed: bool) -> float:
    """What the published rate is of the peak, by the rule: 6 or 4 operations per parameter and token, 2 more where the
    forward is repeated."""
    each = 6 if case.spec.method == "full" else 4
    each += 2 if recomputed and case.spec.gradient_checkpointing else 0
    return one.tokens_per_second * each * case.spec.num_params / ((one.gpu.half_dense_tflops or 0) * 1e12)


def rule_errors(found: Sequence[Found], *, recomputed: bool, constant: float | None = None) -> Errors:
    """Of one utilisation for each kind of card and method, the median of the other sources in the same conditions; of
    the method, where no other source has the card, and of all where none has the method."""
    used = {id(one): utilisation(one, case, recomputed=recomputed) for _, case, one in found}
    errors = {}
    for _, case, one in found:
        others = [(c, o) for _, c, o in found if o.source != one.source]
        others = [pair for pair in others if pair[0].is_well_conditioned == case.is_well_conditioned] or others
        of_method = [(c, o) for c, o in others if c.spec.method == case.spec.method]
        of_card = [(c, o) for c, o in of_method if card_of(o) == card_of(one)]
        usual = statistics.median(used[id(o)] for _, o in of_card or of_method or others)
        errors[id(one)] = math.log((constant or usual) / used[id(one)])
    return errors


def summary(errors: Errors, which: Iterable[StepObservation]) -> tuple[int, float, float]:
    """(configurations, median, 90 % below) of |predicted / published - 1|."""
    return spread(math.exp(errors[id(one)]) - 1 for one in which)[:3]


def spread(errors: Iterable[float]) -> tuple[int, float, float, float]:
    """(number, median, 90 % below, worst) of what predictions are off, as shares, whatever their sign."""
    sizes = sorted(map(abs, errors))
    return len(sizes), statistics.median(sizes), sizes[min(len(sizes) - 1, math.ceil(0.9 * len(sizes)) - 1)], sizes[-1]


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def coverage_table(inside: Iterable[tuple[Condition, bool]]) -> str:
    """How many steps lie in their interval, by whether the card was seen and by what the interval goes by."""
    found = list(inside)
    kinds: dict[str, list[bool]] = {"all": [is_inside for _, is_inside in found]}
    kinds["card seen"] = [is_inside for condition, is_inside in found if condition != "card never seen"]
    for name in ("usual", "short steps", "several machines", "card never seen"):
        kinds[name] = [is_inside for condition, is_inside in found if condition == name]
    lines = [[name, str(len(held)), percent(sum(held) / len(held))] for name, held in kinds.items() if held]
    return table(["steps", "number", "in the interval"], lines)


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join(as_markdown(head, "l" + "r" * (len(head) - 1), lines)) + "\n"


def page() -> tuple[str, str, str]:
    """The table as Markdown, every configuration as CSV, and the fit as JSON."""
    found = observations()
    everything = [one for *_, one in found]
    good = [one for _, case, one in found if case.is_well_conditioned]
    by_source, by_card, by_name = (
        {id(one): error for pairs in left_out_errors(everything, by).values() for one, error in pairs}
        for by in (source_of, card_of, lambda one: one.gpu.short_name)
    )
    conditions = {id(one): (condition, is_inside) for one, condition, is_inside in inside_intervals(everything)}
    inside = {at: is_inside for at, (_, is_inside) in conditions.items()}
    median_error = summary(by_source, good)[1]
    digest = hashlib.sha256(data_file("published_speed.csv").read_bytes()).hexdigest()[:16]
    fit = fit_speed(everything, f"published_speed.csv, sha256 {digest}", median_error)

    hfu = rule_errors(found, recomputed=True)
    rules: list[tuple[str, Errors]] = [
        ("this model, source left out", by_source),
        ("this model, card left out", by_card),
        ("this model, card left out by its name", by_name),
        ("one HFU per card and method", hfu),
        ("one MFU per card and method", rule_errors(found, recomputed=False)),
        (
            f"MFU {GUIDES_UTILISATION:.0%}, as guides say",
            rule_errors(found, recomputed=False, constant=GUIDES_UTILISATION),
        ),
    ]

    def line(name: str, errors: Errors, sets: Sequence[Sequence[StepObservation]]) -> list[str]:
        return [name, *(percent(value) for which in sets for value in summary(errors, which)[1:])]

    grouped = ["n", "median", "90 % below", "in the interval", "one HFU: median", "90 % below"]
    by_card_and_method = _card_and_method({id(one): case for _, case, one in found})
    text = filled(
        OUT,
        number=len(everything),
        sources=len(fit.sources),
        good=len(good),
        left_out=table(
            ["rule", "good conditions: median", "90 % below", "all: median", "90 % below"],
            [line(name, errors, (good, everything)) for name, errors in rules],
        ),
        coverage=coverage_table(conditions.values()),
        by_source=table(
            ["source left out", *grouped], _groups(everything, by_source, hfu, inside, lambda one: one.source)
        ),
        by_card=table(
            ["card, method (source left out)", *grouped],
            _groups(everything, by_source, hfu, inside, by_card_and_method),
        ),
        rates=table(["rate", "value", "expected"], _rates(fit)),
        reasons=table(["reason", "rows", "most from"], _reasons()),
    )
    rows = [
        {
            "line": row.line,
            "source": one.source,
            "card": one.gpu.short_name,
            "num_gpus": one.num_gpus,
            "method": case.spec.method,
            "model": row.model,
            "batch_size": case.spec.batch_size,
            "seq_len": case.spec.seq_len,
            "sharding": one.sharding,
            "published_tokens_per_s_per_gpu": f"{one.tokens_per_second:.4g}",
            "error_source_left_out": f"{math.exp(by_source[id(one)]) - 1:+.4f}",
            "error_card_left_out": f"{math.exp(by_card[id(one)]) - 1:+.4f}",
            "in_interval": "yes" if inside[id(one)] else "no",
            "good_conditions": "yes" if case.is_well_conditioned else "no",
        }
        for row, case, one in found
    ]
    return text, as_csv(rows), fit.model_dump_json(indent=1) + "\n"


def _card_and_method(cases: dict[int, SpeedCase]) -> Callable[[StepObservation], str]:
    return lambda one: f"{one.gpu.short_name}, {cases[id(one)].spec.method}"


def _groups(
    which: Sequence[StepObservation],
    errors: Errors,
    rule: Errors,
    inside: dict[int, bool],
    name: Callable[[StepObservation], str],
) -> list[list[str]]:
    groups: dict[str, list[StepObservation]] = {}
    for one in which:
        groups.setdefault(name(one), []).append(one)
    lines = []
    for group, members in sorted(groups.items()):
        count, median, most = summary(errors, members)
        lines.append(
            [
                group,
                str(count),
                percent(median),
                percent(most),
                percent(sum(inside[id(one)] for one in members) / count),
                *map(percent, summary(rule, members)[1:]),
            ]
        )
    return lines


def _rates(fit: SpeedFit) -> list[list[str]]:
    expected = StepObservation.expected
    lines = [[name, f"{value:g}", f"{expected[name][0]:g}"] for name, value in fit.rates.model_dump().items()]
    return lines + [
        [f"half-width, {name}", f"× or ÷ {math.exp(width):.2f}", "-"] for name, width in fit.half_widths.items()
    ]


def _reasons() -> list[list[str]]:
    reasons: dict[str, Counter[str]] = {}
    for row in list_published_speed():
        if isinstance(case := case_of(row), NoCase):
            reasons.setdefault(case.reason, Counter())[row.family] += 1
    counted = sorted(reasons.items(), key=lambda item: (-item[1].total(), item[0]))
    return [
        [reason, str(sources.total()), ", ".join(f"{name} {n}" for name, n in sources.most_common(3))]
        for reason, sources in counted
    ]


def main() -> None:
    texts = dict(zip((OUT, ROWS, data_file("rates/speed.json")), page(), strict=True))
    write_or_check(texts, "speed/speed_model.py", check="--check" in sys.argv)


if __name__ == "__main__":
    main()
