"""The fewest cards for a fine-tuning, 7B to 405B, by sharding: ``python benchmarks/ranks/fewest_cards.py``.

By ``vramprobe predict --min-gpus``. ``--run`` has some of the answers decided by emulated runs of
rank 0 alone (DeepSpeed's need it in the emulated environment, docs/ranks.md), and so the guides' claims over several
cards: at the count that arithmetic names, and from there down to one that runs out, or up to one that does not. A cell
that has a record in out/fewest_cards is not run again; ``--kept`` runs none, and takes the records that there are.
Written: fewest_cards.csv (predicted), fewest_cards_runs.csv (emulated) and fewest_cards.md, in some ten minutes;
``--check`` predicts a part of the answers anew, with ``--all`` each of them, and fails where these are stale.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from vramprobe.catalog import find_gpu, list_claims
from vramprobe.choices import Sharding
from vramprobe.predict.fewest import MAX_GPUS, min_gpus
from vramprobe.predict.verdict import NCCL_ALLOWANCE_BYTES, TIGHT_SHARE
from vramprobe.rules.sharding import cannot_quantize
from vramprobe.spec import CellSpec
from vramprobe.units import format_bytes

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.ranks import one_rank
from benchmarks.tables import as_csv, read_csv, write_or_check

TABLE, RUNS = one_rank.FOLDER / "fewest_cards.csv", one_rank.FOLDER / "fewest_cards_runs.csv"
KEPT = one_rank.FOLDER.parents[1] / "out" / "fewest_cards"
MODELS = ("mistral-7b-v0.3", "llama-3.1-8b", "qwen2.5-14b", "qwen2.5-32b", "llama-3.1-70b", "llama-3.1-405b")
#: 24, 48, 80, 141 and 180 GB.
CARDS = ("RTX-4090", "L40S", "H100-SXM", "H200", "B200")
SHARDINGS: tuple[Sharding, ...] = ("fsdp", "fsdp1", "zero2", "zero3")
_FIELDS = ("model", "recipe", "card", "sharding", "fits", "tight")
#: Of so many answers one is predicted anew by ``--check``.
_PART = 19
NONE = f"none to {MAX_GPUS}"


class Question(NamedTuple):
    """An answer of the table to be decided by runs."""

    model: str
    recipe: str
    card: str
    sharding: Sharding


CHECKED = (
    Question("llama-3.1-8b", "full, mixed", "H100-SXM", "fsdp"),
    Question("llama-3.1-8b", "full, mixed", "H100-SXM", "zero3"),
    Question("llama-3.1-8b", "full, mixed", "RTX-4090", "fsdp"),
    Question("llama-3.1-8b", "full, all bf16", "RTX-4090", "fsdp1"),
    Question("qwen2.5-14b", "LoRA", "RTX-4090", "fsdp"),
    Question("mistral-7b-v0.3", "full, mixed", "L40S", "fsdp"),
    Question("mistral-7b-v0.3", "full, mixed", "L40S", "zero3"),
    Question("qwen2.5-14b", "full, mixed", "H100-SXM", "fsdp1"),
    Question("qwen2.5-32b", "LoRA", "L40S", "fsdp"),
    Question("qwen2.5-32b", "full, mixed", "H200", "fsdp"),
    Question("llama-3.1-70b", "LoRA", "H100-SXM", "fsdp"),
    Question("llama-3.1-70b", "QLoRA", "RTX-4090", "fsdp"),
    Question("llama-3.1-70b", "QLoRA", "L40S", "fsdp"),
    Question("llama-3.1-70b", "full, all bf16", "B200", "fsdp"),
)


class Decided(NamedTuple):
    """Claims that the same runs decide: the model that stands for their size, the counts of cards that they name."""

    ids: tuple[str, ...]
    model: str
    card: str
    sharding: Sharding
    counts: dict[str, tuple[int, ...]]  # by recipe, those that decide
    lora_r: int = 16


FULL = ("full, mixed", "full, all bf16")
MIXED, BF16 = FULL
CLAIMS = (
    Decided(("L1-16", "O5-33"), "llama-2-7b", "A100-80GB-SXM", "fsdp", {MIXED: (1, 2), BF16: (1, 2)}),
    Decided(("L1-17",), "llama-2-13b", "A100-80GB-SXM", "fsdp", {MIXED: (2,), BF16: (2,)}),
    Decided(("O5-32",), "qwen2.5-14b", "A100-80GB-SXM", "fsdp", {MIXED: (3, 2), BF16: (2,)}),
    Decided(("O5-31",), "qwen2.5-32b", "A100-80GB-SXM", "fsdp", {MIXED: (5,), BF16: (4,)}),
    Decided(("O5-30",), "llama-3.1-70b", "H100-SXM", "fsdp", {MIXED: (11,), BF16: (10,)}),
    Decided(("L2-03", "L3-04"), "llama-3.1-70b", "H100-SXM", "fsdp", {MIXED: (16, 15, 13), BF16: (10,)}),
    Decided(("O5-38",), "llama-3.1-70b", "H100-SXM", "fsdp", {"LoRA": (1, 2, 3)}, 64),
    Decided(("L3-12",), "llama-3.1-70b", "A100-80GB-SXM", "fsdp", {"LoRA": (4,)}),
    Decided(("L1-18",), "llama-3.1-70b", "H100-SXM", "zero3", {MIXED: (8,), BF16: (8,)}),
    Decided(("L1-19",), "llama-3.1-70b", "B200", "zero3", {MIXED: (8,), BF16: (8,)}),
)


def answer(question: Question) -> dict[str, Any]:
    """A row of the table: the fewest that fit, and fewer that are tight; an empty text where there are none."""
    model, recipe, card, sharding = question
    spec = one_rank.alone(one_rank.cell_of(model, recipe, None, 1))
    row = {"model": model, "recipe": recipe, "card": card, "sharding": sharding}
    ranks = spec.model_copy(update={"sharding": sharding})
    if cannot_quantize(ranks) or (sharding == "zero3" and spec.quant != "none"):  # nobody has run it
        return row | {"fits": "", "tight": ""}
    found = min_gpus(ranks, find_gpu(card))
    return row | {"fits": found.num_gpus or NONE, "tight": found.tight_num_gpus or ""}


def answers(kept: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
    """The whole table; ``kept``: one of which most are taken as they are."""
    questions = [Question(*one) for one in product(MODELS, one_rank.RECIPES, CARDS, SHARDINGS)]
    anew = [number for number in range(len(questions)) if not kept or number % _PART == 0]
    with ProcessPoolExecutor() as pool:
        found = dict(zip(anew, pool.map(answer, [questions[number] for number in anew], chunksize=4), strict=True))
    return [found[number] if number in found else kept[number] for number in range(len(questions))]


class Run(NamedTuple):
    """A cell on a card, and its recipe by name."""

    card: str
    recipe: str
    spec: CellSpec


def first_runs() -> list[Run]:
    """Of each answer the least count that arithmetic does not rule out, and one fewer."""
    found = []
    for model, recipe, card, sharding in CHECKED:
        said = answer(Question(model, recipe, card, sharding))
        least = int(said["tight"] or said["fits"])
        found += [Run(card, recipe, one_rank.cell_of(model, recipe, sharding, count)) for count in (least, least - 1)]
    return found


def claimed_runs() -> list[Run]:
    """Of each claim the counts that decide it."""
    found = []
    for one in CLAIMS:
        for recipe, count in ((recipe, count) for recipe, counts in one.counts.items() for count in counts):
            more = {} if recipe in FULL else {"lora_r": one.lora_r}
            found.append(Run(one.card, recipe, one_rank.cell_of(one.model, recipe, one.sharding, count, **more)))
    return found


def rows_of(asked: list[Run], *, runs: bool) -> list[one_rank.Row]:
    """The rows of those that ran, each cell once."""
    found = []
    for card in dict.fromkeys(one.card for one in asked):
        recipes = {one.spec.fingerprint: one.recipe for one in asked if one.card == card}
        records = one_rank.run([one.spec for one in asked if one.card == card], card, KEPT, runs=runs)
        found += [one_rank.row_of(record, card, recipes[record.fingerprint]) for record in records]
    return found


def all_runs(*, runs: bool) -> list[one_rank.Row]:
    """All that are asked for, or those of them that have a record.

    Where an answer is still open, one card more or fewer follows, until it is not.
    """
    asked = first_runs()
    while True:
        found = rows_of(asked, runs=runs)
        more = [one for question in CHECKED for one in further(question, runs_of(found, *question))]
        known = {(old.card, old.spec.fingerprint) for old in asked}
        more = [one for one in more if (one.card, one.spec.fingerprint) not in known]
        if not more:
            return rows_of([*asked, *claimed_runs()], runs=runs)
        asked += more


def further(question: Question, rows: list[one_rank.Row]) -> list[Run]:
    """The next count to run, where both an end that fits and one that does not are not known yet."""
    fit = [row["num_gpus"] for row in rows if row["outcome"] == "ok"]
    full = [row["num_gpus"] for row in rows if row["outcome"] == "oom"]
    count = min(fit) - 1 if fit else max(full, default=0) + 1
    if count < 1 or count in full or not rows or is_of_loading(rows):
        return []
    model, recipe, card, sharding = question
    return [Run(card, recipe, one_rank.cell_of(model, recipe, sharding, count))]


_ASIDE = format_bytes(NCCL_ALLOWANCE_BYTES)
HEAD = f"""# The fewest cards

Predicted by `vramprobe predict --min-gpus`: one sequence of 2,048 tokens on each card, layers computed again, LoRA of
rank 16 on all linear layers. *Mixed*: fp32 weights and AdamW, bf16 in the step. First the fewest of which each rank
fits with room to spare: its interval's upper end within {TIGHT_SHARE:.0%} of what the card has beside the driver's
part, its CUDA context and {_ASIDE} for NCCL. In brackets fewer, on which the best estimate still runs, if need be with
cached blocks given back. 1 is a single card without ranks. A dash: the libraries do not run it, or nobody tried.
Rebuild: `python benchmarks/ranks/fewest_cards.py`, and with `--run` what was run.
"""
RUN_HEAD = """## Decided by runs

Rank 0 alone on an emulated card, by the real libraries: nothing was measured on a GPU. The emulated CUDA context was
519 MiB, and NCCL's own buffers are not charged. *Really*: the least count that ran; where only one side was run, what
is known of it. 4-bit weights are loaded whole on each card here, and divided there, whatever the count, which what is
said counts at the least that it takes (those who load them on rank 0's host are not covered).

| model | recipe | card | sharding | said: fits (tight) | runs | really |
| --- | --- | --- | --- | ---: | --- | ---: |
"""
CLAIMS_HEAD = """## Claims over several cards

What guides print (`vramprobe claims`) and has been run in the same way, under both recipes where full fine-tuning may
mean either. A claim that so many are needed holds where they fit and one fewer does not. Under ZeRO-3 DeepSpeed
gathers a rank's parts in one buffer on the host, of which this machine of 24 GiB refuses that of a 70B all in bf16
among 8, 35.3 GB (in fp32, as DeepSpeed is not told otherwise); by arithmetic it fits neither card.

| claim | says | model, card, sharding | recipe | runs | so |
| --- | --- | --- | --- | --- | --- |
"""


def as_markdown(predicted: list[dict[str, Any]], found: list[one_rank.Row]) -> str:
    """The table by recipe, what was decided by runs, and the claims."""
    lines = [HEAD]
    names = {card: f"{card}, {(find_gpu(card).nominal_gb or 0):g} GB" for card in CARDS}
    for recipe in one_rank.RECIPES:
        lines += [
            f"## {recipe[0].upper()}{recipe[1:]}",
            "",
            f"| model | sharding | {' | '.join(names.values())} |",
            "| --- | --- |" + " ---: |" * len(CARDS),
        ]
        for model, sharding in product(MODELS, SHARDINGS):
            own = [
                row for row in predicted if (row["recipe"], row["model"], row["sharding"]) == (recipe, model, sharding)
            ]
            lines.append(f"| {model} | {sharding} | {' | '.join(map(shown, own))} |")
        lines.append("")
    lines.append(RUN_HEAD.rstrip("\n"))
    for question in CHECKED:
        said = next(row for row in predicted if tuple(row[name] for name in Question._fields) == question)
        own = runs_of(found, *question)
        if own:
            lines.append(f"| {' | '.join(question)} | {shown(said)} | {in_words(own)} | {really(own)} |")
    lines += ["", CLAIMS_HEAD.rstrip("\n")]
    claims = {claim.id: claim for claim in list_claims()}
    for one, recipe in [(decided, recipe) for decided in CLAIMS for recipe in decided.counts]:
        own = runs_of(found, one.model, recipe, one.card, one.sharding, one.lora_r)
        for claim_id in one.ids if own else ():
            claim = claims[claim_id]
            cells = [claim_id, claim.statement, f"{one.model}, {one.card}, {one.sharding}", recipe, in_words(own)]
            lines.append(f"| {' | '.join([*cells, so(claim, own)])} |")
    return "\n".join(lines) + "\n"


def shown(row: dict[str, Any]) -> str:
    """``12 (9)``."""
    return f"{row['fits'] or '-'}" + (f" ({row['tight']})" if row["tight"] else "")


def runs_of(
    found: Iterable[one_rank.Row], model: str, recipe: str, card: str, sharding: str, lora_r: int = 16
) -> list[one_rank.Row]:
    """Those of one question, the fewest cards first; a single card is any sharding's."""
    words = f"-r{lora_r}-"
    own = [
        row
        for row in found
        if (row["model"], row["recipe"], row["card"]) == (model, recipe, card)
        and row["sharding"] in (sharding, "")
        and (recipe in FULL or words in row["cell"])
    ]
    return sorted(own, key=lambda row: row["num_gpus"])


def in_words(rows: list[one_rank.Row]) -> str:
    """``9 ran out in backward, 10 fits``."""
    said = {"ok": "fits", "oom": "ran out", "oom_host": "not seen: this machine's own memory ended"}
    return ", ".join(
        f"{row['num_gpus']} {said.get(row['outcome'], row['outcome'])}"
        + (f" in {row['phase']}" if row["outcome"] == "oom" else "")
        for row in rows
    )


def is_of_loading(rows: list[one_rank.Row]) -> bool:
    """Whether all ran out as the whole model came or was divided, which more cards hardly change."""
    several = [row for row in rows if row["num_gpus"] > 1]
    return bool(several) and all((row["outcome"] == "oom") and row["phase"] in ("load", "prepare") for row in several)


def really(rows: list[one_rank.Row]) -> str:
    """The least count that fits, where one fewer was seen not to; else what is known of it."""
    fit = [row["num_gpus"] for row in rows if row["outcome"] == "ok"]
    full = [row["num_gpus"] for row in rows if row["outcome"] == "oom"]
    if is_of_loading(rows):
        return "not said: the whole is loaded"
    if not fit:
        return f"above {max(full)}" if full else "not known"
    return str(min(fit)) if min(fit) == 1 or min(fit) - 1 in full else f"at most {min(fit)}"


def so(claim: Any, rows: list[one_rank.Row]) -> str:
    """What the runs say of a claim: that so many fit, or that it takes so many."""
    by_count = {row["num_gpus"]: row["outcome"] for row in rows}
    if "oom_host" in by_count.values():
        return "not decided"
    if claim.quantity == "fits":
        return "holds" if by_count.get(claim.num_gpus) == "ok" else "does not fit"
    low, high = int(claim.low), int(claim.high)
    if by_count.get(high) == "oom":
        return "more are needed"
    if any(outcome == "ok" for count, outcome in by_count.items() if count < low):
        return "fewer do"
    return "holds" if by_count.get(high) == "ok" and by_count.get(low - 1) == "oom" else "not decided"


def main() -> None:
    if "--run" in sys.argv or "--kept" in sys.argv:
        found = all_runs(runs="--run" in sys.argv)
    else:
        found = [
            one_rank.anew(row, **({"lora_r": 64} if "-r64-" in row["cell"] else {})) for row in one_rank.read(RUNS)
        ]
    is_part = "--check" in sys.argv and "--all" not in sys.argv
    predicted = answers(read_csv(TABLE) if is_part else ())
    page = as_markdown(predicted, found)
    made = {TABLE: as_csv(predicted, _FIELDS), RUNS: as_csv(found, one_rank.FIELDS), TABLE.with_suffix(".md"): page}
    write_or_check(made, "ranks/fewest_cards.py", check="--check" in sys.argv)


if __name__ == "__main__":
    main()
