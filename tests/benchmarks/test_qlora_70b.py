"""QLoRA of a 70B by recipe: the page is the journal's, and what is run with fewer layers lies on a line."""

import subprocess
import sys
from pathlib import Path

from scripts import script

FOLDER = Path(__file__).parents[2] / "benchmarks" / "truth"


def test_the_committed_page_is_what_the_committed_journal_says() -> None:
    command = [sys.executable, str(FOLDER / "qlora_70b.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_two_depths_make_a_line_and_one_that_failed_makes_none() -> None:
    module = script("truth.qlora_70b")
    recipe = module.Recipe(name="r", model="llama-2-70b", cards="c", command="x", layers=(8, 16))
    entries = [
        {"fingerprint": recipe.fingerprint(layers), "outcome": "ok", "phases": {"load": 3 * layers, "forward": 9}}
        for layers in (8, 16)
    ]
    assert module.phases_of(recipe, entries) == {"load": 3 * 80, "forward": 9}
    entries[1]["outcome"] = "oom"
    assert module.phases_of(recipe, entries) is None


def test_a_change_of_a_recipes_command_or_depth_is_another_run() -> None:
    recipes = script("truth.qlora_70b").recipes()
    prints = {one.fingerprint(layers) for one in recipes for layers in (*one.layers, None)}
    assert len(prints) == sum(len(one.layers) + 1 for one in recipes)
