"""The calculator in headless Chromium: what it shows of a cell is what Python says of the same recipe.

That its replays are Python's, phase by phase, is tested in test_page_recipes.py.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from grids import exhaustive
from page_browser import waiting, written
from page_example import MODELS, content

from tools import page_book, page_parts
from vramprobe import catalog
from vramprobe.emulate.installation import NotEmulatable
from vramprobe.predict import at_hand, recorded
from vramprobe.predict.prediction import Prediction
from vramprobe.predict.verdict import verdict
from vramprobe.recipe.shipped import LIKE_ALL, Shipped, answers_for
from vramprobe.report.page import page_data
from vramprobe.resolve import resolve
from vramprobe.units import format_bytes

SHAPES = ((1, 2048), (2, 512), (3, 1500), (5, 4096), (16, 8192))

#: In the page: what it says of each question's cell, by card and on each GPU.
ASK = """(questions) => questions.map(([cell, workspace]) => {
  const found = vramprobe.predict(cell, workspace);
  return found && {
    allocated: found.allocated, reserved: found.reserved, label: found.label, terms: Object.fromEntries(found.terms()), notes: found.notes,
    verdicts: Object.fromEntries(vramprobe.gpus.filter((gpu) => gpu.workspace_bytes === workspace && gpu.usable_bytes).map((gpu) => {
      const { verdict, usable_bytes, basis, amounts } = vramprobe.verdict(found, gpu);
      return [gpu.slug, [verdict, usable_bytes, `${basis}: ${amounts}`]];
    })),
  };
})"""  # noqa: E501


@pytest.fixture(scope="session")
def shipped_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the book that ships."""
    return written(tmp_path_factory.mktemp("shipped"), content(book=page_data.BOOK.read_bytes()))


def by_python(entry: page_book.PageRecipe, shape: tuple[int, int], workspace_bytes: int) -> dict[str, Any]:
    """Python's answer from an entry's recipe, for GPUs with these workspaces."""
    cell = resolve(model=entry.model, device="cuda", batch_size=shape[0], seq_len=shape[1], **dict(entry.options))
    a100 = catalog.find_gpu(LIKE_ALL)
    is_other = workspace_bytes != a100.blas_workspace_bytes
    recipe = dataclasses.replace(entry.recipe, workspace_bytes=(a100.blas_workspace_bytes, workspace_bytes))
    replay = at_hand.replayed(recipe, cell, shape)
    shipped = Shipped(recipe, tuple(entry.shapes), recorded_on=a100.name if is_other else "")
    notes = (*replay.notes, *shipped.notes(shape))
    found = recorded._predicted(dataclasses.replace(replay, notes=notes), cell, None, None)
    gpus = [gpu for gpu in catalog.list_gpus() if answers_for(gpu) and gpu.blas_workspace_bytes == workspace_bytes]
    assert len(gpus) > 5
    return {
        "allocated": found.peak_allocated_bytes.model_dump(),
        "reserved": found.reserved_bytes.model_dump(),
        "label": found.peak_label,
        "terms": found.terms,
        "notes": found.warnings,
        "verdicts": {
            gpu.short_name: [judged.verdict, judged.usable_bytes, judged.reason]
            for gpu in gpus
            if gpu.total_bytes
            for judged in [verdict(found, gpu)]
        },
    }


def holds(opened: Any, path: Path, *, most: int) -> None:
    entries = sorted(page_parts.entries(), key=page_book.order)
    workspaces = [catalog.find_gpu(name).blas_workspace_bytes for name in (LIKE_ALL, "H100-SXM")]
    asked = [
        (entry, shape, workspaces[shape[0] % 2])
        for entry in entries[:: max(len(entries) // most, 1)]
        for shape in SHAPES
        if (max(rows for rows, _ in entry.shapes) == 1) == (shape[0] == 1)
        and len({length for _, length in entry.shapes}) > 1
    ]
    assert asked
    questions = [
        [entry.options | {"model": entry.model, "batch_size": rows, "seq_len": length}, workspace]
        for entry, (rows, length), workspace in asked
    ]
    said = opened(path=path).tab.evaluate(ASK, questions)
    for (entry, shape, workspace), answer in zip(asked, said, strict=True):
        assert answer == by_python(entry, shape, workspace), (
            f"{entry.model} {shape}; if the notes differ: python tools/page_parts.py"
        )


def test_the_page_says_what_predict_says_of_a_shipped_recipe(opened: Any, shipped_page: Path) -> None:
    holds(opened, shipped_page, most=6)


@exhaustive
@pytest.mark.timeout(1800)
def test_the_page_says_what_predict_says_of_many_shipped_recipes(opened: Any, shipped_page: Path) -> None:
    holds(opened, shipped_page, most=300)


def without_a_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: Any, **__: Any) -> Any:
        raise NotEmulatable("not here")

    monkeypatch.setattr(recorded, "find_recipe", nothing)


def test_the_command_answers_from_the_same_recipe(
    opened: Any, shipped_page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from vramprobe.cli.verbs import app

    without_a_recorder(monkeypatch)
    one = opened(f"#m={MODELS[0]}&b=3&s=1536&g=L4,RTX-4090", path=shipped_page)
    name, verb, *words = one.text("#command").split()
    assert (name, verb) == ("vramprobe", "predict")
    outcome = CliRunner().invoke(app, ["predict", "--json", *words])
    assert outcome.exit_code == 0, outcome.output
    said = Prediction.model_validate_json(json.dumps(_prediction(json.loads(outcome.output))))
    assert one.text("#peak") == format_bytes(said.peak_allocated_bytes.value)
    assert f"{format_bytes(said.reserved_bytes.value)} reserved" in one.text("#where")
    assert "--gpu L4" in one.text("#command")


def _prediction(said: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in said.items() if name in Prediction.model_fields}


def test_a_click_through_the_calculator(opened: Any) -> None:
    one = opened()
    tab = one.tab
    assert one.fragment == ""
    tab.fill("#search", "granite-4.0-micro")
    assert tab.input_value("#model") == MODELS[1]
    assert "1 of " in one.text("#found")
    tab.fill("#batch_size", "5")
    tab.fill("#seq_len", "1024")
    tab.click("#cards-choice summary")
    tab.check("#card-L4")
    tab.uncheck("#card-H100-SXM")
    assert one.fragment == f"#m={MODELS[1]}&b=5&s=1024&g=RTX-4090,RTX-A6000,L4,A100-80GB-SXM"
    cell = {"model": MODELS[1], "method": "lora", "gradient_checkpointing": True, "batch_size": 5, "seq_len": 1024}
    (said,) = tab.evaluate(ASK, [[cell, catalog.find_gpu(LIKE_ALL).blas_workspace_bytes]])
    assert one.text("#peak") == format_bytes(said["allocated"]["value"])
    assert one.text("#interval") == " to ".join(format_bytes(said["allocated"][end]) for end in ("low", "high"))
    names = [row.split("\n")[0] for row in tab.locator("#terms tbody tr").all_inner_texts()]
    assert names == [*(name.replace("_", " ") for name in said["terms"]), "allocator"]
    for slug in ("RTX-4090", "RTX-A6000", "L4", "A100-80GB-SXM"):
        judged, _, reason = said["verdicts"][slug]
        assert one.text(f"#verdicts [data-gpu={slug}] .verdict")[2:] == judged
        assert reason.endswith(one.text(f"#verdicts [data-gpu={slug}] .reason span >> nth=0"))
        assert one.text(f"#gpus-rows [data-gpu={slug}] .verdict")[2:] == judged
    assert one.text("#basis") in said["verdicts"]["L4"][2]
    assert [note.removeprefix("Note: ") for note in tab.locator("#notes .note").all_inner_texts()] == said["notes"]
    assert tab.locator("#chart svg").get_attribute("aria-label").startswith("Stacked bar: weights ")


def test_the_largest_counts_fit_and_one_more_does_not(opened: Any) -> None:
    one = opened(f"#m={MODELS[1]}&s=1024&g=RTX-4090,A100-80GB-SXM")
    one.settle()
    for slug in ("RTX-4090", "A100-80GB-SXM"):
        batch, length = (
            int(text.replace(",", ""))
            for text in one.tab.locator(f"#verdicts [data-gpu={slug}] .largest button").all_inner_texts()
        )
        verdicts = one.tab.evaluate(
            """([slug, batch, length]) => {
              const gpu = vramprobe.gpus.find((one) => one.slug === slug), cell = { ...form.read().cell };
              const judged = (change) => vramprobe.judge({ ...cell, ...change }, gpu).verdict;
              return [judged({ batch_size: batch }), judged({ batch_size: batch + 1 }), judged({ seq_len: length }),
                      judged({ seq_len: length + 128 })];
            }""",
            [slug, batch, length],
        )
        assert verdicts[::2] == ["fits", "fits"]
        assert "fits" not in verdicts[1::2]
        row = one.tab.locator(f"#gpus-rows [data-gpu={slug}] td")
        assert [row.nth(at).inner_text() for at in (2, 3)] == [f"{batch:,}", f"{length:,}"]
    button = one.tab.locator("#verdicts [data-gpu=RTX-4090] .largest button").first
    largest = button.inner_text()
    button.click()
    assert one.tab.input_value("#batch_size") == largest.replace(",", "")
    assert one.text("#verdicts [data-gpu=RTX-4090] .verdict") == "✓ fits"


def test_a_cell_without_a_recipe_says_so_with_the_command_that_records_it(opened: Any) -> None:
    one = opened("#m=gpt2&b=4&s=512")
    assert one.text("#peak") == "No prediction"
    assert (
        one.text("#no-prediction")
        == "No recipe of gpt2 (with gradient checkpointing, lora, several rows) is in this page."
    )
    assert one.text("#command") == (
        "vramprobe predict --engine recipe --model gpt2 --method lora --batch-size 4 --seq-len 512 "
        "--gradient-checkpointing --gpu RTX-4090"
    )
    assert one.text("#command-title") == "Record it"
    assert one.tab.locator("#verdicts li").count() == 0
    assert set(one.cells("gpus-rows", 2)) == {"no recipe", "memory not known"}
    assert "gpt2 · 0.124 B · not recorded" in one.tab.locator("#model option").all_text_contents()


def test_recipes_of_one_length_answer_for_that_alone(opened: Any) -> None:
    one = opened(f"#m={MODELS[0]}&t=full&gradient_checkpointing=x")
    one.tab.evaluate(f"location.hash = '#m={MODELS[0]}&t=full&gc=false&b=3&s=2048'")
    waiting(one.tab.locator("#no-prediction")).to_have_text(
        "Of this cell, recipes of 1,024 tokens are here, not of 2,048."
    )
    one.tab.fill("#seq_len", "1024")
    assert one.text("#peak").endswith("GiB")
    one.settle()
    assert "largest length 1,024" in one.text("#verdicts [data-gpu=A100-80GB-SXM] .largest")


def test_a_gpu_that_no_recipe_answers_for_is_named(opened: Any) -> None:
    one, unknown = opened("#g=T4,MI300X,RTX-4090"), catalog.find_gpu("T4").name
    assert one.text("#verdicts [data-gpu=T4] .reason") == f"No recipe is recorded for GPUs like {unknown}."
    assert "is not NVIDIA's" in one.text("#verdicts [data-gpu=MI300X] .reason")
    assert "on GPUs like A100-80GB-SXM, in " in one.text("#where")
    assert one.text("#command").endswith("--gpu RTX-4090")


def test_other_options_of_the_model_are_compared_and_taken_over_by_a_click(opened: Any) -> None:
    one = opened(f"#m={MODELS[0]}&s=1024&g=L4")
    one.tab.wait_for_selector("#changes[data-done]")
    rows = [row.replace("\t", "\n").split("\n") for row in one.tab.locator("#changes li").all_inner_texts()]
    assert {row[0] for row in rows} == {"Method: qlora", "Gradient checkpointing: off; Method: full"}
    assert one.text("#changes-basis") == "Reserved memory, and the verdict on L4."
    workspace_bytes = one.tab.evaluate("vramprobe.gpus.find(({ slug }) => slug === 'L4').workspace_bytes")
    now, other = (
        one.tab.evaluate(
            "([method, workspace]) => vramprobe.predict({ ...form.read().cell, method }, workspace).reserved.value",
            [method, workspace_bytes],
        )
        for method in ("lora", "qlora")
    )
    row = next(row for row in rows if row[0] == "Method: qlora")
    word = "less" if other < now else "more"
    assert row[1] == f"{format_bytes(other)}, {format_bytes(abs(now - other))} {word}"
    one.tab.click("#changes button >> text='Method: qlora'")
    assert one.fragment == "#t=qlora&s=1024&g=L4"
    assert one.tab.is_checked("#method-qlora")


def test_no_gpu_is_a_choice_too(opened: Any) -> None:
    one = opened("#g=")
    assert one.text("#verdicts") == "No GPU is chosen."
    assert one.text("#cards-count") == "none chosen"
    one.tab.fill("#batch_size", "3")
    assert one.fragment == "#b=3&g="


def test_amounts_are_written_as_python_writes_them(opened: Any) -> None:
    sizes = [0, 1, 1023, 1024, 1024**2 - 1, 1024**3, 24 * 1024**3, 13619882884]
    sizes += [eighths * 1024**3 // 8 for eighths in range(8, 200)] + [7 * 1024**2 * n // 64 for n in range(1, 300)]
    assert opened().tab.evaluate("sizes => sizes.map(words.bytes)", sizes) == [format_bytes(size) for size in sizes]
