"""No option is ignored: of every verb, each mode refuses every option that it does not read."""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from vramprobe.cli import predict, profile, recommend
from vramprobe.cli.modes import Mode, answer, flags_of
from vramprobe.cli.verbs import app
from vramprobe.options import MEASURED_OPTIONS

#: Verbs with modes → (the verb, its modes, values that ask for each mode).
VERBS: dict[str, tuple[Callable[..., None], Sequence[Mode], Sequence[Mapping[str, Any]]]] = {
    "predict": (
        predict.predict,
        predict._MODES,
        (
            {"from_run": "run", "max_batch": True},
            {"from_run": "run"},
            {"min_gpus": True},
            {"max_batch": True},
            {"lengths": "rows.txt"},
            {},
        ),
    ),
    "recommend": (recommend.recommend, recommend._MODES, ({"from_folder": "out"}, {"command": ["python"]}, {})),
}
#: Groups of options → how their names are found in the verb's own signature.
GROUPS = ("cell", "ranks")


def options_of(verb: Callable[..., None]) -> dict[str, str | None]:
    """Option of a verb → the group that the verb's body gets it in; None: by its own name."""
    found: dict[str, str | None] = {}
    own = inspect.signature(inspect.unwrap(verb)).parameters
    layers = [verb]
    while hasattr(layers[-1], "__wrapped__"):
        layers.append(layers[-1].__wrapped__)
    for outer, inner in pairwise(layers):
        before, after = inspect.signature(outer).parameters, inspect.signature(inner).parameters
        group = next(name for name in after if name not in before)
        found |= {name: group for name in before if name not in after}
    return found | {name: None for name in own if name not in GROUPS}


def values_of(verb: Callable[..., None], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that the verb's body gets where only ``given`` was typed."""
    own = inspect.signature(inspect.unwrap(verb)).parameters
    values = {name: {} if name in GROUPS else one.default for name, one in own.items()}
    return values | dict(given)


CASES = [(name, number) for name, (_, _, asks) in VERBS.items() for number in range(len(asks))]


@pytest.mark.parametrize(("name", "number"), CASES)
def test_every_option_is_read_or_refused(name: str, number: int) -> None:
    for option, group in options_of(VERBS[name][0]).items():
        require_read_or_refused(name, number, option, group)


def require_read_or_refused(name: str, number: int, option: str, group: str | None) -> None:
    """By the very values: an answer that reads it gets it, any other mode names it, and what would read it."""
    verb, modes, asks = VERBS[name]
    told: dict[str, Any] = {}
    seen = [one._replace(answer=_recorder(one.answer, told)) for one in modes]
    values, mark = values_of(verb, asks[number]), "a value of its own"
    mode = next(one for one in seen if one.is_asked(values))
    if group is None:
        values[option] = mark
    else:
        values[group] = dict(values[group]) | {option: mark}
    if next(one for one in seen if one.is_asked(values)) is not mode or option in asks[number]:
        return  # it asks for another mode itself
    reads = mode.reads
    if option in reads or group in reads:
        answer(seen, verb, values)
        assert mark in (told.get(option), (told.get(group) or {}).get(option))
    else:
        with pytest.raises(typer.BadParameter) as refused:
            answer(seen, verb, values)
        said = f"{flags_of(verb)[option]} {mark}: not an option of {mode.said}, but of"
        assert refused.value.message.startswith(said)
        assert not told


def _recorder(function: Callable[..., None], told: dict[str, Any]) -> Callable[..., None]:
    def record(**words: Any) -> None:
        inspect.signature(function).bind(**words)
        told.update(words)

    record.__signature__ = inspect.signature(function)
    return record


def test_every_verb_with_modes_is_tried() -> None:
    modules = {sys.modules[command.callback.__module__] for command in app.registered_commands}
    with_modes = {module.__name__.rpartition(".")[2] for module in modules if hasattr(module, "_MODES")}
    assert with_modes == set(VERBS)


@pytest.mark.parametrize("name", VERBS)
def test_modes_read_the_verbs_options_all_of_them_and_no_others(name: str) -> None:
    verb, modes, asks = VERBS[name]
    known = set(options_of(verb)) | set(GROUPS)
    read = {one for mode in modes for one in mode.reads}
    assert read <= known
    assert {option for option, group in options_of(verb).items() if option not in read and group not in read} == set()
    said = {next(one.said for one in modes if one.is_asked(values_of(verb, ask))) for ask in asks}
    assert said == {one.said for one in modes}


def test_a_run_that_has_ended_takes_no_options_of_a_command() -> None:
    of_a_command = set(inspect.signature(profile.profile).parameters) - set(profile._OF_A_FOLDER) - {"command"}
    assert {"emulate", "empty_weights", "steps", "trace", "folder", "speed"} <= of_a_command
    for option in of_a_command:
        default = inspect.signature(profile.profile).parameters[option].default
        said = f"^{flags_of(profile.profile)[option]}.*: not an option of --from"
        with pytest.raises(typer.BadParameter, match=said):
            profile.profile(from_folder="nowhere", **{option: 7 if default is not True else False})


def test_only_measure_has_the_options_that_no_prediction_reads() -> None:
    verbs = {command.callback.__name__: inspect.signature(command.callback) for command in app.registered_commands}
    assert {"predict", "grpo", "recommend", "techniques", "measure"} <= set(verbs)
    for option in MEASURED_OPTIONS:
        assert {name for name, signature in verbs.items() if option in signature.parameters} == {"measure"}


def test_no_verb_has_an_option_that_its_body_does_not_name() -> None:
    """An option that a body never names would be ignored whatever the mode."""
    groups = [one for group in app.registered_groups for one in group.typer_instance.registered_commands]
    of_groups = {"setup", "status", "remove"} | {"list_all", "export", "merge"}  # of emulate, and of recipes
    assert {command.callback.__name__ for command in groups} == of_groups
    for command in [*app.registered_commands, *groups]:
        body = inspect.unwrap(command.callback)
        code = body.__code__
        if "locals" in code.co_names:
            continue  # above
        source = inspect.getsource(body).partition(") -> None:")[2]
        for name in inspect.signature(body).parameters:
            assert name in source, f"{command.callback.__name__} ignores {name}"


LAUNCH = ("launch", "--gpu", "L4", "--bucket", "b")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*LAUNCH, "small", "--first-steps", "7"), "--first-steps 7: not an option of a"),
        ((*LAUNCH, "small", "--max-slowdown", "7"), "--max-slowdown 7.0: not an option"),
        (
            (*LAUNCH, "x.py", "--predicted", "p.jsonl", "--budget", "3"),
            "--budget 3.0: not an option of a command, but of",
        ),
        (("report", "out", "--dataset", "d", "--fit", "fit.json"), "--fit fit.json: not an option of --dataset"),
        (("report", "out", "--dataset", "d", "--claims", "c.csv"), "--claims c.csv: not an option of --dataset"),
        (("run", "small", "--dry-run", "--jobs", "3"), "drop --jobs 3"),
        (("run", "small", "--dry-run", "--gpu", "L4"), "drop --gpu L4"),
    ],
)
def test_other_verbs_refuse_what_they_would_not_read(words: tuple[str, ...], said: str) -> None:
    done = CliRunner().invoke(app, words)
    told = " ".join(done.output.replace("│", " ").split()) + str(done.exception)
    assert (done.exit_code != 0, said in told) == (True, True), told
