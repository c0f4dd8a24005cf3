"""The help: every verb in a group, every option in its verb's help, short enough to be read, examples that parse."""

import shlex

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from vramprobe.cli import help as help_page
from vramprobe.cli.options import CELL_OPTIONS
from vramprobe.cli.verbs import app

ROOT = get_command(app)
VERBS = {name: verb for name, verb in ROOT.commands.items() if not hasattr(verb, "commands")}
#: Two screens.
MOST_LINES = 125


def shown(*words: str, columns: int = 100) -> str:
    done = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": str(columns)})
    assert done.exit_code == 0, done.output
    return done.output


def test_every_verb_is_in_one_group_and_in_the_help() -> None:
    grouped = [name for names in help_page.VERBS.values() for name in names]
    assert sorted(grouped) == sorted(ROOT.commands)
    lines = [line.split()[0] for line in shown().splitlines() if line.startswith("  ") and line[2] != " "]
    assert lines == grouped


def test_every_option_of_a_panel_is_some_verbs_and_every_option_of_a_cell_has_a_panel() -> None:
    listed = [name for names in help_page.PANELS.values() for name in names]
    assert len(listed) == len(set(listed))
    assert set(CELL_OPTIONS) <= set(listed)
    assert set(listed) <= {one.name for verb in VERBS.values() for one in verb.params}


@pytest.mark.parametrize("verb", VERBS)
def test_a_verbs_help_has_each_of_its_options_once_and_is_short(verb: str) -> None:
    text = shown(verb)
    flags = {max(one.opts, key=len) for one in VERBS[verb].params if one.param_type_name == "option"}
    words = [word.strip(",") for line in text.splitlines() if line.startswith("  -") for word in line.split()[:2]]
    assert flags <= set(words), verb
    assert len(text.splitlines()) <= MOST_LINES
    assert max(map(len, text.splitlines())) <= 100


def test_the_short_flag_and_a_narrow_terminal() -> None:
    assert CliRunner().invoke(app, ["predict", "-h"]).output == CliRunner().invoke(app, ["predict", "--help"]).output
    assert max(map(len, shown("plan", columns=70).splitlines())) <= 70


@pytest.mark.parametrize("verb", help_page.EXAMPLES)
def test_an_example_is_of_its_verb_and_its_options(verb: str) -> None:
    name, *words = shlex.split(help_page.EXAMPLES[verb])
    assert name == verb
    assert help_page.EXAMPLES[verb] in shown(verb)
    VERBS[verb].make_context(verb, words)
