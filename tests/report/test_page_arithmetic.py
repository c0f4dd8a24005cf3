"""The page's arithmetic in headless Chromium: to the byte what `vramprobe predict` says of the same cells."""

import json
import random
import re
from abc import ABC
from bisect import bisect_left, insort
from collections import Counter
from importlib import resources
from itertools import groupby, islice
from typing import get_args

import pytest
from grids import grid
from page_cells import some_of_one_batch, some_options, some_ranks, some_replayed_rank

from vramprobe import api, catalog, spec
from vramprobe.choices import DEVICE_MAP, TENSOR_PARALLEL
from vramprobe.errors import VramprobeError
from vramprobe.model.memory_model import MemoryModel, Spread, shipped_fits
from vramprobe.predict.verdict import verdict
from vramprobe.report.page import engine
from vramprobe.report.page.translation import Module, TranslationError, translate
from vramprobe.report.page.translation.calls import BUILTIN_METHODS
from vramprobe.report.page.translation.expressions import BUILTINS
from vramprobe.rules.sharding import HYBRID, ONE_GROUP

#: make test asks a part of the random questions, make test-all the whole.
PART, WHOLE = 8, 1
pytestmark = pytest.mark.timeout(1200)
NUM_CELLS = 700
NUM_REPLAYS = 240
NUM_SEARCHES = 60
NUM_RANKS = 400
NUM_SPREAD = 200
NUM_DIVIDED = 200
NUM_REPLAYED_RANKS = 160


@pytest.fixture(params=grid([PART, WHOLE], PART), ids={PART: "a part", WHOLE: "all"}.get)
def part(request):
    """By how much the numbers of questions, and what must be among them, are divided."""
    return request.param


def enough(counts, kinds, part, num=5):
    """Whether each of these kinds was among the questions, so often or, of a part of them, once."""
    return min(counts[kind] for kind in kinds) >= max(num // part, 1)


def on_one_gpu(options):
    """A fit is of one GPU, and the page predicts a rank of several by arithmetic alone."""
    of_ranks = ("num_gpus", "sharding", "shard_size", "cp_size", "cp_rotation", "offload")
    return {name: value for name, value in options.items() if name not in of_ranks} | {"device": "cuda"}


def question(options, gpu="RTX-4090", **more):
    return {"options": options, "config": catalog.find_model(options["model"]).config, "gpu": gpu, **more}


def said(prediction):
    """A Prediction as the page gives it."""
    interval = lambda one: None if one is None else one.model_dump()  # noqa: E731
    return {
        "cell_id": prediction.cell_id,
        "peak_allocated_bytes": interval(prediction.peak_allocated_bytes),
        "reserved_bytes": interval(prediction.reserved_bytes),
        "device_bytes": interval(prediction.device_bytes),
        "peak_phase": prediction.peak_phase,
        "peak_place": prediction.peak_label,
        "terms": [list(item) for item in prediction.terms.items()],
        "constant_bytes": prediction.constant_bytes,
        "notes": prediction.warnings,
    }


def expected(options, fit=None):
    if fit is None and options.get("device") != "cpu":
        fit = "none"  # that of several cards is for replays
    try:
        return said(api.predict(engine="formula", fit=fit, gpu="RTX-4090", replays=False, **options))
    except VramprobeError:
        return None


@pytest.mark.parametrize(
    ("trainer", "method"),
    [("dpo", "full"), ("dpo", "qlora"), ("kto", "lora"), ("orpo", "lora"), ("reward", "lora"), ("reward", "full")],
)
def test_the_page_counts_a_trainers_reference_too(answers, trainer, method):
    options = {"model": "qwen3-0.6b", "method": method, "batch_size": 2, "seq_len": 2048, "trainer": trainer}
    asked = [options, options | {"batch_size": 1, "gradient_checkpointing": True, "device": "cuda"}]
    for one, answer in zip(asked, answers([question(one) for one in asked]), strict=True):
        wanted = expected(one | {"device": "cuda"})
        assert wanted is not None
        assert {name: answer.get(name) for name in wanted} == wanted


def test_the_page_counts_what_predict_counts_to_the_byte(answers, part):
    rng = random.Random(0)
    asked = [some_options(rng) for _ in range(2 * NUM_CELLS // part)]
    found = answers([question(options) for options in asked])
    num_predicted = 0
    for options, answer in zip(asked, found, strict=True):
        wanted = expected(options)
        if wanted is None:
            assert "error" in answer or answer["errors"], options
        else:
            num_predicted += 1
            assert {name: answer.get(name) for name in wanted} == wanted, (options, answer.get("error"))
    assert num_predicted >= 500 // part


def test_the_page_counts_groups_shared_sequences_and_what_is_offloaded_as_predict_does(answers, part):
    """To the byte, the host's memory in the notes; what is refused, in the same words."""
    rng = random.Random(6)
    asked = [some_ranks(rng) for _ in range(NUM_RANKS // min(part, 4))]
    counts = Counter()
    for options, _ in predicted_alike(asked, answers([question(options) for options in asked]), counts):
        counts.update([options["sharding"], options.get("cp_rotation")])
        counts.update(name for name in ("shard_size", "cp_size", "offload") if name in options)
    assert enough(counts, (*HYBRID, "shard_size", "cp_size", "alltoall", "offload", "refused"), part), counts


def test_the_page_counts_each_card_of_a_process_as_predict_does(answers, part):
    """By device-map: every card to the byte, the verdict, what is refused in the same words; the largest counts."""
    rng = random.Random(7)
    asked = [some_of_one_batch(rng, DEVICE_MAP) for _ in range(NUM_SPREAD // part)]
    counts = Counter()
    for options, answer in predicted_alike(asked, answers([question(options) for options in asked]), counts):
        predicted = api.predict(engine="formula", fit="none", gpu="RTX-4090", replays=False, **options)
        counts.update([options["method"], f"{len(predicted.cards)} cards"])
        assert answer["cards"] == [card.model_dump() for card in predicted.cards], options
        assert answer["verdict"]["reason"] == verdict(predicted, catalog.find_gpu("RTX-4090")).reason
    assert enough(counts, ("full", "lora", "qlora", "2 cards", "4 cards", "refused"), part), counts
    require_largest(answers, {"model": "mistral-7b-v0.3", "method": "lora", "num_layers": 6, "sharding": DEVICE_MAP})


def test_the_page_counts_divided_layers_as_predict_does(answers, part):
    """By tp: to the byte, the verdict, what is refused in the same words; the largest counts."""
    rng = random.Random(8)
    asked = [some_of_one_batch(rng, TENSOR_PARALLEL) for _ in range(NUM_DIVIDED // part)]
    counts = Counter()
    for options, answer in predicted_alike(asked, answers([question(options) for options in asked]), counts):
        predicted = api.predict(engine="formula", fit="none", gpu="RTX-4090", replays=False, **options)
        counts.update([options["method"], options["num_gpus"]])
        assert answer["verdict"]["reason"] == verdict(predicted, catalog.find_gpu("RTX-4090")).reason
    assert enough(counts, ("full", "lora", 2, 4, 8, "refused"), part), counts
    require_largest(
        answers, {"model": "mistral-7b-v0.3", "method": "full", "num_layers": 6, "sharding": TENSOR_PARALLEL}
    )


def predicted_alike(asked, found, counts):
    """Those that predict predicts, whose answers are its own to the byte; of what it refuses alone because of the
    cards, which are counted, the page has the same words.
    """
    for options, answer in zip(asked, found, strict=True):
        wanted = said_or_refused(options)
        if not isinstance(wanted, str):
            assert {name: answer.get(name) for name in wanted} == wanted, (options, answer.get("error"))
            yield options, answer
        elif expected(on_one_gpu(options)) is not None:
            counts["refused"] += 1
            assert wanted == answer.get("error"), options


def require_largest(answers, cell):
    """Of a cell on two cards, as predict finds them."""
    cell |= {"num_gpus": 2}
    [largest] = answers([question(cell | {"batch_size": 1, "seq_len": 512}, largest=True)])
    for kind, ask, other in (
        ("batch_size", api.max_batch_size, {"seq_len": 512}),
        ("seq_len", api.max_seq_len, {"batch_size": 1}),
    ):
        assert largest[kind] == ask(gpu="RTX-4090", engine="formula", fit="none", **cell, **other).fits.value


def said_or_refused(options):
    try:
        return said(api.predict(engine="formula", fit="none", gpu="RTX-4090", replays=False, **options))
    except VramprobeError as refusal:
        return str(refusal)


def test_the_page_evaluates_a_fit_of_a_gpu(answers, part):
    model = gpu_fit()
    data = engine.data() | {"fits": [{"gpu": "RTX-4090", "model": model.model_dump(mode="json")}]}
    rng = random.Random(1)
    asked = [on_one_gpu(some_options(rng)) for _ in range(300 // part)]
    found = answers([question(options) for options in asked], data)
    num_reserved = 0
    for options, answer in zip(asked, found, strict=True):
        wanted = expected(options, model)
        if wanted is not None:
            num_reserved += 1
            assert wanted["device_bytes"] is not None
            assert {name: answer.get(name) for name in wanted} == wanted, (options, answer.get("error"))
    assert num_reserved >= 20 // part


def test_the_page_replays_what_predict_replays_to_the_byte(answers, part):
    """Both tiers, their intervals, the verdict and its words on any card, also where its end is near."""
    rng = random.Random(4)
    cards = [gpu.short_name for gpu in catalog.list_gpus() if gpu.total_bytes]
    asked = [(some_options(rng) | {"device": "cuda"}, rng.choice(cards)) for _ in range(NUM_REPLAYS // part)]
    near = {"model": "qwen2.5-0.5b", "method": "lora", "batch_size": 1, "gradient_checkpointing": True}
    asked += [(near | {"seq_len": seq_len}, "L4") for seq_len in range(9600, 10401, 160)]
    counts = Counter()
    for _, wanted, answer in replayed_alike(answers, asked):
        if wanted.reserved_bytes is not None and wanted.num_gpus == 1:
            counts.update(["replayed", *given_back(answer)])
            assert any(note.startswith("fitted to emulated runs, which reproduce") for note in answer["notes"])
    assert counts["replayed"] >= NUM_REPLAYS // part // 8
    assert counts["given back"] >= 1


def test_the_page_replays_ranks_as_predict_does(answers, part):
    """Of every kind whose requests are known in their order, also where a rank gets along with less."""
    rng = random.Random(9)
    cards = [gpu.short_name for gpu in catalog.list_gpus() if gpu.total_bytes]
    asked = [(some_replayed_rank(rng), rng.choice(cards)) for _ in range(min(3, part) * NUM_REPLAYED_RANKS // part)]
    near = {
        "model": "llama-3.1-70b",
        "method": "full",
        "batch_size": 1,
        "gradient_checkpointing": True,
        "num_gpus": 8,
        "sharding": "fsdp",
    }
    asked += [(near | {"seq_len": seq_len}, "H100-SXM") for seq_len in (4096, 4608)]
    counts = Counter()
    for options, wanted, answer in replayed_alike(answers, asked):
        assert wanted.reserved_bytes is not None
        counts.update([options["sharding"], options["method"], *given_back(answer)])
        counts["usual group"] += options["sharding"] in HYBRID and "shard_size" not in options
    assert enough(counts, (*ONE_GROUP, *HYBRID, *get_args(spec.Method)), part, 3), counts
    assert enough(counts, ("usual group", "given back"), part, 1), counts


def replayed_alike(answers, asked):
    """Of cells on cards those that predict predicts, with its answer and the page's, which is the same to the byte."""
    found = answers([question(options, gpu=gpu, replays=True) for options, gpu in asked])
    for (options, gpu), answer in zip(asked, found, strict=True):
        try:
            wanted = api.predict(engine="formula", gpu=gpu, **options)
        except VramprobeError:
            assert "error" in answer or answer["errors"], (options, gpu)
            continue
        told = said(wanted)
        assert {name: answer.get(name) for name in told} == told, (options, gpu, answer.get("error"))
        judged = verdict(wanted, catalog.find_gpu(gpu))
        kept = {
            "verdict": judged.verdict,
            "reason": judged.reason,
            "usable_bytes": judged.usable_bytes,
            "needed": judged.needed_bytes.model_dump(),
        }
        assert {name: answer["verdict"][name] for name in kept} == kept, (options, gpu)
        yield options, wanted, answer


def given_back(answer):
    return ["given back"] if "gives its cached blocks back" in answer["verdict"]["reason"] else []


def test_the_page_predicts_under_older_libraries_what_predict_does(answers):
    cells = [
        {"model": model, "method": method, "batch_size": 1, "seq_len": 1024, **more}
        for model, method, more in (
            ("llama-3.1-8b", "lora", {}),
            ("mistral-7b-v0.3", "qlora", {"gradient_checkpointing": True}),
            ("mixtral-8x7b", "qlora", {"gradient_checkpointing": True}),
            ("qwen2.5-0.5b", "full", {}),
            ("gemma-2-2b", "lora", {}),
            ("llama-3.2-1b", "qlora", {"dora": True}),
        )
    ]
    asked = [cell | {"stack": stack} for cell in cells for stack in engine.STACKS]
    found = answers([question(options, gpu="H100-SXM", replays=True) for options in asked])
    for options, answer in zip(asked, found, strict=True):
        if options["model"] == "gemma-2-2b" or "dora" in options:
            with pytest.raises(VramprobeError) as refusal:
                api.predict(gpu="H100-SXM", engine="formula", **options)
            assert [one["message"] for one in answer["errors"]] == [str(refusal.value)]
            continue
        wanted = api.predict(gpu="H100-SXM", engine="formula", **options)
        told = said(wanted)
        assert {name: answer.get(name) for name in told} == told, (options, answer.get("error"))
        assert answer["command"].startswith("vramprobe predict ")
        assert answer["command"].endswith(f" --stack {options['stack']}")


def test_who_wrote_a_pasted_config_is_no_release_that_was_asked_for(answers):
    options = {"model": "llama-3.1-8b", "method": "lora", "batch_size": 1, "seq_len": 512}
    asked = [question(options), question(options)]
    asked[1]["config"] = asked[1]["config"] | {"transformers_version": "4.43.0"}
    one, other = answers(asked)
    assert one == other
    assert one["peak_allocated_bytes"]


def gpu_fit() -> MemoryModel:
    """A fit with coefficients and widths of its own, as records of a card might give it."""
    model = shipped_fits()[0]
    interval = model.interval.model_copy(
        update={
            "half_width": {"full": 0.012, "lora": 0.02, "qlora": 0.031},
            "power": 0.4,
            "growth_per_doubling": 0.25,
        }
    )
    return model.model_copy(
        update={
            "device": "cuda",
            "device_name": "NVIDIA GeForce RTX 4090",
            "interval": interval,
            "constant_bytes": {"full": 12_345_678, "qlora": 999},
            "coefficients": {"weights": 1.001, "saved_activations": 1.02, "logits": 0.987654321},
            "reserved_over_allocated": Spread(value=1.07, low=1.01, high=1.15),
            "device_over_reserved_bytes": Spread(value=531e6, low=498e6, high=602e6),
            "ranges": model.ranges.model_copy(update={"num_params": (10**8, 10**10), "num_tokens": (256, 65536)}),
        }
    )


def test_the_page_finds_the_largest_batch_and_length_that_predict_finds(answers, part):
    rng = random.Random(2)
    asked = [some_options(rng) | {"device": "cuda", "batch_size": 1, "seq_len": 128} for _ in range(40 // part)]
    found = answers([question(options, largest=True) for options in asked])
    num_answered = 0
    for options, answer in zip(asked, found, strict=True):
        if expected(options) is None:
            continue
        num_answered += 1
        for kind, ask in (("batch_size", api.max_batch_size), ("seq_len", api.max_seq_len)):
            words = {name: value for name, value in options.items() if name != kind}
            try:
                wanted = ask(gpu="RTX-4090", engine="formula", fit="none", **words).fits  # the page has no replay
            except VramprobeError:
                wanted = None
            assert answer[kind] == (wanted and wanted.value), options
    assert num_answered >= 10 // part


def test_the_page_replays_the_largest_batch_and_length_that_predict_replays(answers, part):
    """On any card, with what ships; also bit by bit, as the page's worker asks."""
    rng = random.Random(5)
    cards = [gpu.short_name for gpu in catalog.list_gpus() if gpu.total_bytes]
    asked = []
    for _ in range(NUM_SEARCHES // part):
        cell = on_one_gpu(some_options(rng)) | {"batch_size": 1, "seq_len": rng.choice([128, 1000])}
        asked.append((cell | {"num_layers": rng.choice([1, 2, 3, 5])}, rng.choice(cards)))
    how = [rng.choice([True, "bit by bit"]) for _ in asked]
    found = answers(
        [question(options, gpu=gpu, largest=one, replays=True) for (options, gpu), one in zip(asked, how, strict=True)],
    )
    num_answered = num_replayed = num_in_steps = 0
    for (options, gpu), answer in zip(asked, found, strict=True):
        if "errors" in answer or "error" in answer or expected(options) is None:
            continue
        for kind, ask in (("batch_size", api.max_batch_size), ("seq_len", api.max_seq_len)):
            words = {name: value for name, value in options.items() if name != kind}
            try:
                wanted = ask(gpu=gpu, engine="formula", **words).fits
            except VramprobeError:
                wanted = None
            assert answer[kind] == (wanted and wanted.value), (options, gpu)
            num_answered += 1
            num_replayed += wanted is not None and wanted.prediction.reserved_bytes is not None
        num_in_steps += answer.get("steps", 1) > 2
    assert num_answered >= NUM_SEARCHES // part // 2
    assert num_replayed >= num_answered // 3
    assert num_in_steps >= NUM_SEARCHES // part // 10


def test_the_page_says_the_command_that_makes_the_cell(answers):
    from typer.testing import CliRunner

    from vramprobe.cli.verbs import app

    rng = random.Random(3)
    asked = list(islice((one for one in iter(lambda: some_options(rng), None) if expected(one)), 8))
    asked += islice((one for one in iter(lambda: some_ranks(rng), None) if expected(one)), 4)
    for options, answer in zip(asked, answers([question(one) for one in asked]), strict=True):
        vramprobe, verb, *words = answer["command"].split()
        assert (vramprobe, verb) == ("vramprobe", "predict" if "num_gpus" in options else "measure")
        outcome = CliRunner().invoke(app, ["predict", "--json", "--engine", "formula", *words])
        assert outcome.exit_code == 0, outcome.output
        assert json.loads(outcome.output)["cell_id"] == answer["cell_id"]
        assert answer["peak_allocated_bytes"] == expected(options)["peak_allocated_bytes"]  # the command replays


OPERATORS = """
def of_whole_numbers(one, other):
    return [one & other, one & -512, -one & other, one << 3, one >> 7, ~one, one.bit_length(), -(-one // 512) * 512]

def of_tuples(one):
    return [one < (8, 0), one <= (8, 0), one > (8, 0), one >= (8, 0), (8, 9) < one, one == (9, 0)]

class Base:
    number = 1

class Other(Base):
    def __init__(self):
        self.number = 2

def of_attributes():
    one, other = Base(), Other()
    one.number, other.number = other.number, one.number
    return [Base().number, Other().number, one.number, other.number]

class Lowest:
    def __init__(self, first=1, second=2):
        self.given = [first, second]

    def steps(self):
        return ["lowest"]

class Left(Lowest):
    def steps(self):
        return ["left", *super().steps()]

class Right(Lowest):
    def steps(self):
        return ["right", *super().steps()]

class Both(Left, Right):
    def __init__(self):
        super().__init__(second=3)

class All(Both, ABC):
    def steps(self):
        return ["all", *super().steps()]

def of_bases():
    return [Left().steps(), Both().steps(), All().steps(), All().given]

def of_lists(items):
    items = list(items)
    del items[1]
    insort(items, 4)
    runs = [[key, list(run)] for key, run in groupby(items, lambda one: one > 3)]
    popped = [list(items)]
    popped.append(popped[0].pop(0))
    popped.append(popped[0].pop())
    return [bisect_left(items, 4), items, 2 * items, items * 2, runs, popped]
"""


def test_operators_lists_and_classes_are_pythons(answers):
    """Whole numbers of more than 32 bits too, which JavaScript's own operators cut."""
    numbers = [0, 1, 511, 512, 2**31 - 1, 2**31, 2**31 + 513, 2**32 + 1, 3 * 2**33 + 777, 2**49 - 1]
    capabilities = [(7, 5), (8, 0), (8, 9), (9, 0), (10, 3), (12, 0)]
    known: dict = {"ABC": ABC, "bisect_left": bisect_left, "insort": insort, "groupby": groupby}
    exec(OPERATORS, known)
    wanted = [
        [known["of_whole_numbers"](one, other) for one in numbers for other in numbers],
        [known["of_tuples"](one) for one in capabilities],
        known["of_attributes"](),
        known["of_lists"]([1, 2, 3, 5, 6]),
        known["of_bases"](),
    ]
    imports = "from bisect import bisect_left, insort\nfrom itertools import groupby\n"
    given = {name: value for name, value in engine._GIVEN.items() if name.startswith(("bisect", "itertools"))}
    folder = resources.files("vramprobe.report.page")
    runtime = "".join(folder.joinpath(name).read_text() for name in ("runtime.js", "builtins.js"))
    script = f"""{runtime}{translate([Module("vramprobe.some", imports + OPERATORS)], given)}
    const numbers = {json.dumps(numbers)}, of = $some;
    document.body.textContent = JSON.stringify([
      numbers.flatMap((one) => numbers.map((other) => of.of_whole_numbers(one, other))),
      {json.dumps(capabilities)}.map((one) => of.of_tuples(one)), of.of_attributes(), of.of_lists([1, 2, 3, 5, 6]),
      of.of_bases(),
    ]);"""
    assert answers.shown(f"<script>{script}</script>") == wanted


def test_python_that_has_no_rule_is_an_error_and_not_another_number():
    for source in (
        "def f(x):\n  yield from x",
        "def f(x):\n  return x @ x",
        "def f():\n  return unknown",
        "def f(x):\n  return f(*x, one=1)",
        "class A: ...\nclass B: ...\nclass C: ...\nclass D(A, B, C): ...",
    ):
        with pytest.raises(TranslationError):
            translate([Module("vramprobe.some", source)], {})


def test_every_method_and_function_that_may_be_translated_is_in_the_runtime():
    script = engine.javascript()
    for name in BUILTIN_METHODS:
        assert f'$define("{name}"' in script
    for name in BUILTINS - {"isinstance"}:
        assert re.search(rf"^  {name}[:,]", script, re.MULTILINE), name


#: What a page never calls: it has no replay of a recommendation's recipes.
UNCALLED = {"$model$replayed.load_bytes", "$recommend$memory.replayed_on", "$recommend$memory.with_load"}


def test_every_name_of_a_module_that_the_scripts_use_is_there():
    """A name that moved would fail only where somebody clicks."""
    script = engine.javascript()
    modules = {
        name: set(names.split(", "))
        for name, names in re.findall(
            r"^const (\$[\w$]+) = \(\(\) => \{\n(?:.*\n)*?  return \{([^}]*)\};\n\}\)\(\);", script, re.MULTILINE
        )
    }
    assert len(modules) > 90
    assert "chosen" in modules["$kernels$attention"]
    package = resources.files("vramprobe")
    missing = set()
    for module, name in set(re.findall(r"(\$[a-z]\w*(?:\$\w+)*)\.([A-Za-z_]\w*)", script)):
        path = module.removeprefix("$").split("$")
        is_ours = (
            package.joinpath(*path[:-1], f"{path[-1]}.py").is_file() or package.joinpath(*path, "__init__.py").is_file()
        )
        if name not in modules.get(module, set()) and (module in modules or is_ours):
            missing.add(f"{module}.{name}")
    assert missing == UNCALLED
