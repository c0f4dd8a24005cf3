"""Questions: a user's words -> a Recommendation, or the most that a budget or a deadline pays for.

In: a cell's words (resolve.option_names()) with the method and the batch left open if you like, tokens, limits, prices.
Out: what answer.py and inverse.py make of them. Reads prices and records where they are named.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from vramprobe import catalog
from vramprobe.choices import Sharding, meant
from vramprobe.errors import SpecError
from vramprobe.recommend import inverse
from vramprobe.recommend.answer import Recommendation, recommended
from vramprobe.recommend.changes import effects
from vramprobe.recommend.options import GLOBAL_BATCH, METHODS, Question, nearest
from vramprobe.recommend.prices import SKYPILOT, Offer, chosen, offers_from_skypilot, read_offers, shipped_offers
from vramprobe.rules.sharding import ONE_GROUP
from vramprobe.speed.measured import Measured, measured_speeds
from vramprobe.speed.rates import GPUS_PER_MACHINE
from vramprobe.units import parse_count, parse_duration

#: What can be left open beside the tokens.
Asked = Literal["tokens", "seq_len", "model"]
_CHANGES = "vramprobe predict --changes makes them, for a setting"
_NOT_ASKED = ("device", "limit_vram", "weights", "steps", "timing_steps", "seed", "alloc_conf")


def recommend(
    *,
    tokens: int | str | None = None,
    deadline: float | str | None = None,
    budget: float | None = None,
    method: str | Sequence[str] | None = None,
    gpus: Sequence[str] = (),
    max_gpus: int = 8,
    global_batch: int = GLOBAL_BATCH,
    sharding: Sharding | None = None,
    provider: str | None = None,
    region: str | None = None,
    terms: str = "on-demand",
    prices: str | Path | None = None,
    records: str | Path | None = None,
    most: Asked | None = None,
    today: date | None = None,
    say: Callable[[str], None] = lambda words: None,
    **options: Any,
) -> Recommendation | inverse.Most:
    """Recommend cards, their number, hours and cost; ``options`` are a cell's, ``method`` None compares all three.

    ``tokens`` are 50_000_000 or ``"50M"``, ``deadline`` seconds or ``"12h"``, ``budget`` US dollars. ``most``: what the
    budget and the deadline are to pay for, in place of that option; of ``seq_len`` and ``model`` by recipes at hand
    alone. ``prices``: a CSV file, or ``skypilot``. A method without a recipe is recorded in a few settings, of which
    ``say`` hears. Raises SpecError for what cannot be, and what a recording raises where there is one of no method.
    """
    if most is not None and most not in get_args(Asked):
        raise SpecError(f"most: {most!r} given; allowed: {', '.join(get_args(Asked))}")
    named = {"tokens": tokens, **{name: options.get(name) for name in ("model", "seq_len")}}
    if missing := [name for name, value in named.items() if value is None and name != most]:
        raise SpecError(
            f"{', '.join(missing)}: missing; give each, or ask for the most of one within a budget or a deadline"
        )
    if most is not None and named[most] is not None:
        raise SpecError(f"the most {most} is asked for, so do not give it")
    if unknown := [name for name in _NOT_ASKED if options.get(name) is not None]:
        raise SpecError(f"{', '.join(unknown)}: a recommendation is about CUDA cards as they are; leave it out")
    if options.get("loop") is not None:
        raise SpecError("loop: a recommendation is of a Trainer's loop; leave it out, or ask predict about one GPU")
    for name in ("batch_size", "grad_accum"):  # 0 is not "any"
        _within(name, options.get(name), 1)
    offers = chosen(offers_from(prices), terms=terms, provider=provider, region=region)
    question = Question(
        words={name: value for name, value in options.items() if value is not None},
        methods=_methods(method),
        tokens=inverse.SOME_TOKENS if tokens is None else parse_count(str(tokens)),
        deadline_seconds=None if deadline is None else parse_duration(str(deadline)),
        budget_usd=_within("budget", budget, 0.01),
        global_batch=int(_within("global_batch", global_batch, 1, 1_000_000) or 1),
        max_gpus=int(_within("max_gpus", max_gpus, 1, GPUS_PER_MACHINE) or 1),
        sharding=_sharding(sharding),
        gpus=tuple(catalog.find_gpu(name).short_name for name in gpus),
    )
    more = {"offers": offers, "today": today or date.today(), "measured": _measured(records)}
    match most:
        case "tokens":
            return inverse.most_tokens(question, partial(recommended, say=say, **more))
        case "seq_len":
            return inverse.longest(question, partial(recommended, records=False, **more))
        case "model":
            return inverse.largest(question, partial(recommended, records=False, **more))
        case None:
            pass
    found = recommended(question, say=say, **more)
    option = next((answer.option for answer in found.answers if answer.option is not None), None)
    if option is None and found.options:
        option = nearest(found.options)
    left_out: list[Any] = []
    changes = [] if option is None else effects(question, option, offers, measured=more["measured"], left_out=left_out)
    said = [f"{len(left_out)} other options would each take a recording: {_CHANGES}"] if left_out else []
    return found.model_copy(update={"changes": changes, "changes_of": option, "notes": [*found.notes, *said]})


def offers_from(prices: str | Path | None) -> Sequence[Offer]:
    """Those that ship, those of a CSV file, or SkyPilot's."""
    if prices is None:
        return shipped_offers()
    return offers_from_skypilot() if str(prices) == SKYPILOT else read_offers(Path(prices))


def _measured(records: str | Path | None) -> Mapping[str, Measured]:
    if records is None:
        return {}
    from vramprobe.recommend.step_cost import speed_at_hand
    from vramprobe.records.whole import read_whole

    found = measured_speeds(read_whole(records).records, speed_at_hand)
    if not found:
        raise SpecError(
            f"{records} holds no step time that was measured on a GPU of the catalog, of a cell with a recipe at hand"
        )
    return found


def _methods(method: str | Sequence[str] | None) -> tuple[str, ...]:
    wanted = METHODS if method is None else (method,) if isinstance(method, str) else tuple(method)
    wanted = tuple(meant("method", name) for name in wanted)
    if wrong := [name for name in wanted if name not in METHODS]:
        raise SpecError(f"method: {', '.join(map(repr, wrong))} given; allowed: {', '.join(METHODS)}")
    return wanted


def _sharding(sharding: str | None) -> Sharding | None:
    found = meant("sharding", sharding)
    if found is not None and found not in ONE_GROUP:
        raise SpecError(f"sharding: {sharding!r} given; allowed: {', '.join(ONE_GROUP)}")
    return found


def _within(name: str, value: float | None, least: float, most: float = 1e12) -> float | None:
    if value is not None and not least <= value <= most:
        raise SpecError(f"{name}: {value} given; must be from {least:g} to {most:,.0f}")
    return value
