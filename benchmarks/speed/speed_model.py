"""Hold the speed model against what others measured: ``python benchmarks/speed/speed_model.py`` (minutes).

Each source of vramprobe/data/published_speed.csv is left out of a fit in turn and predicted by it; so is each card. The
80 % intervals are made from what is left out of fits that have not seen the source either. Beside it rules: one
utilisation for each card and method, the median of the other sources in the same conditions (with recomputation
counted, HFU, and without, MFU), and the 40 % that guides quote. Repeats of one configuration count once. Written:
benchmarks/speed/speed_model.md and .csv, and vramprobe/data/rates/speed.json, which ships; ``--check`` writes nothing
and fails where one of the tables is not what the rows give.
"""

from __future__ import annotations

import hashlib
import math
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
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
from benchmarks.speed.speed_tables import Grouped, coverage_table, groups_table, rates_table, spread, table, told
from benchmarks.tables import as_csv, filled, write_or_check
from vramprobe.catalog.shipped import data_file

OUT = Path(__file__).resolve().with_suffix(".md")
ROWS = OUT.with_suffix(".csv")
GUIDES_UTILISATION = 0.4
Found = tuple[SpeedRow, SpeedCase, StepObservation]
Errors = dict[int, float]  # id of an observation → log(predicted / published)


def utilisation(one: StepObservation, case: SpeedCase, *, recomputed: bool = False) -> float:
    """What the published rate is of the peak, by the rule: 6 operations per parameter and token, of adapters 4, and 2
    more where the forward is repeated and counted."""
    each = 6 if case.spec.method == "full" else 4
    each += 2 if recomputed and case.spec.gradient_checkpointing else 0
    return one.tokens_per_second * each * case.spec.num_params / ((one.gpu.half_dense_tflops or 0) * 1e12)


def rule_errors(found: Sequence[Found], constant: float | None = None, *, recomputed: bool = False) -> Errors:
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


def page() -> tuple[str, str, str]:
    """The table as Markdown, every configuration as CSV, and the fit as JSON."""
    found = observations()
    everything = [one for *_, one in found]
    good = [one for _, case, one in found if case.is_well_conditioned]
    by_source, by_card = (
        {id(one): error for pairs in left_out_errors(everything, by).values() for one, error in pairs}
        for by in (source_of, card_of)
    )
    conditions = {id(one): (condition, is_inside) for one, condition, is_inside in inside_intervals(everything)}
    digest = hashlib.sha256(data_file("published_speed.csv").read_bytes()).hexdigest()[:16]
    median_error = spread(by_source[id(one)] for one in good)[1]
    fit = fit_speed(everything, f"published_speed.csv, sha256 {digest}", median_error)
    ways: dict[str, Errors] = {
        "this model, source left out": by_source,
        "this model, card left out": by_card,
        "one HFU per card and method": rule_errors(found, recomputed=True),
        "one MFU per card and method": rule_errors(found),
        f"MFU {GUIDES_UTILISATION:.0%}, as guides say": rule_errors(found, GUIDES_UTILISATION),
    }
    left_out = [
        [name, *(cell for which in (good, everything) for cell in told(errors[id(one)] for one in which)[1:3])]
        for name, errors in ways.items()
    ]
    seen = [(case, one, by_source[id(one)], conditions[id(one)][1]) for _, case, one in found]
    by_method = [Grouped(f"{one.gpu.short_name}, {case.spec.method}", *more) for case, one, *more in seen]
    text = filled(
        OUT,
        number=len(everything),
        sources=len(fit.sources),
        good=len(good),
        left_out=table(["rule", "good conditions: median", "90 % below", "all: median", "90 % below"], left_out),
        coverage=coverage_table(conditions.values()),
        by_source=groups_table("source left out", [Grouped(one.source, *more) for _, one, *more in seen]),
        by_card=groups_table("card, method (source left out)", by_method),
        rates=rates_table(fit, StepObservation.expected),
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
            "in_interval": "yes" if conditions[id(one)][1] else "no",
            "good_conditions": "yes" if case.is_well_conditioned else "no",
        }
        for row, case, one in found
    ]
    return text, as_csv(rows), fit.model_dump_json(indent=1) + "\n"


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
