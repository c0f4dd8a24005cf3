"""Any words of the command line end in an answer, one clear line or wrong usage: never in a traceback of ours.

The verbs and their options are the command line's own list; verbs that start processes or the network are tried until
they do (``_STARTS``). Each example runs in this process, in a folder of its own.
"""

import contextlib
import io
import os
import socket
import string
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from grids import exhaustive
from typer.main import get_command

from vramprobe import api
from vramprobe.catalog.own import CACHE_VARIABLE
from vramprobe.choices import ALIASES, WORDS
from vramprobe.cli import mcp, verbs

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402


def verbs_of(group: Any) -> Iterator[tuple[str, Any]]:
    """Each verb by its words: ``predict``, and ``emulate setup`` of a group."""
    for name, command in group.commands.items():
        inner = verbs_of(command) if hasattr(command, "commands") else [("", command)]
        yield from ((f"{name} {word}".strip(), one) for word, one in inner)


COMMAND = get_command(verbs.app)
VERBS = dict(verbs_of(COMMAND))
#: Verbs that start processes, serve, ask the network or judge all records: tried until they do (``stops_before_work``).
_STARTS = {"measure", "profile", "run", "doctor", "calibrate-gpu", "launch", "collect", "status", "claims", "calibrate",
           "evaluate", "fit", "report", "emulate setup", "emulate status", "emulate remove", "mcp"}  # fmt: skip
LIGHT = sorted(set(VERBS) - _STARTS)
#: Options that would load torch or the network, or take minutes.
_NOT_TRIED = {"--engine", "--record", "--push", "--prices", "--emulate", "--from", "--out", "--help", "--largest-model",
              "--min-gpus", "--num-gpus", "--torch-compile"}  # fmt: skip
_WITHOUT_AN_ENGINE = ("--min-gpus",)
_NUMBERS = ["0", "1", "-1", "2", "7", "512", "2k", "99999999999", "99999999999999999999", "1e9", "-0.5", "nan", "inf",
            "x"]  # fmt: skip
_JUNK = ["", " ", "-", "--", "ä", "none", "null", "all", "1,2", "a=b", "*", "x" * 300, "50M", "12GiB", "$(id)", "{}",
         "\t"]  # fmt: skip
_MODELS = ["gpt2", "pythia-70m", "smollm2-135m", "Qwen/Qwen2.5-0.5B-Instruct", "gpt-9", "no/such"]
_GPUS = ["RTX-4090", "T4", "3g.40gb", "24GiB", "MI300X", "H100", "GH200-144GB", "GTX-9"]
_FILES = ["empty", "empty.txt", "bytes.bin", "words.txt", "table.csv", "list.json", "nowhere", "."]


def made_files(folder: Path) -> None:
    """One of each kind that a user may name by mistake."""
    (folder / "empty").mkdir()
    (folder / "empty.txt").touch()
    (folder / "bytes.bin").write_bytes(bytes(range(256)))
    (folder / "words.txt").write_text("no record\nCUDA out of memory\n")
    (folder / "table.csv").write_text("length,count\n5,x\n")
    (folder / "list.json").write_text("[1, {}]")


def kind_of(parameter: Any) -> str:
    """Its type as its verb names it: int, float, str, bool, Path, list[Path] …"""
    return str(parameter.bare_type())


def values_of(parameter: Any) -> st.SearchStrategy[str]:
    """Draw texts that may be typed for a parameter: its own words, other spellings of them, and words that are none."""
    name = parameter.name
    if name == "model":
        return st.sampled_from([*_MODELS, *_JUNK, *_FILES])
    if name in ("gpu", "limit_vram", "gpus"):
        return st.sampled_from([*_GPUS, *_JUNK, *_NUMBERS])
    if name in WORDS:
        return st.sampled_from([*WORDS[name], *(word.upper() for word in WORDS[name]), *ALIASES, *_JUNK])
    kind = kind_of(parameter)
    if "Path" in kind or name in ("lengths", "records", "sweep"):
        return st.sampled_from([*_FILES, *_JUNK, "quickstart", "p50=1 p99=2 max=3"])
    if kind in ("int", "float"):
        return st.sampled_from(_NUMBERS)
    # No path outside the test's folder: what stands there differs from machine to machine, and changes meanwhile.
    text = st.text(string.printable, max_size=8)
    within = text.filter(lambda word: "/" not in word and not word.startswith((".", "~")))
    return st.sampled_from([*_JUNK, *_NUMBERS, *_FILES]) | within


@st.composite
def command_lines(draw: st.DrawFn, verb: str) -> list[str]:
    """The verb with what it needs, mostly, and up to three of its options."""
    words, own = verb.split(), [one for one in VERBS[verb].params if _flag(one) not in _NOT_TRIED]
    extra = draw(st.lists(st.sampled_from(own), max_size=3, unique_by=id)) if own else []
    for parameter in own:
        if parameter.param_type_name == "argument":
            many = 0 if verb == "recommend" else draw(st.integers(0, 2))  # its words are a command to run
            words += [draw(values_of(parameter)) for _ in range(many)]
        elif parameter in extra or (parameter.required and draw(st.integers(0, 9))):
            is_flag = getattr(parameter, "is_flag", False)
            words += [_flag(parameter)] if is_flag else [f"{_flag(parameter)}={draw(values_of(parameter))}"]
    if verb == "predict" and not any(word.startswith(_WITHOUT_AN_ENGINE) for word in words):
        words.append("--engine=formula")  # auto records, on an emulated GPU
    return words


def _flag(parameter: Any) -> str:
    return next((flag for flag in parameter.opts if flag.startswith("--")), "")


_CELL = ["--model=llama-3.2-1b", "--method=lora", "--batch-size=1", "--seq-len=1024"]
_GRPO = ["--model=qwen2.5-1.5b", "--gpu=RTX-4090", "--method=lora", "--gradient-checkpointing"]
_GRPO += ["--num-generations=2", "--max-prompt-length=512", "--max-completion-length=512"]
#: Right by itself, but for what is drawn beside it, so that the options beside it are read.
PLAIN = {
    "predict": ("predict", _CELL),
    "techniques": ("techniques", [*_CELL, "--gpu=RTX-4090"]),
    "recommend": ("recommend", [*_CELL[:2], _CELL[3], "--tokens=1M", "--gpu=RTX-4090", "--max-gpus=1"]),
    "serve": ("serve", ["--model=smollm2-135m", "--gpu=T4", "--max-model-len=512"]),
    "grpo": ("grpo", _GRPO),
    "lengths": ("predict", [*_CELL, "--gpu=RTX-4090", "--lengths=p50=10 p99=20 max=30"]),
}
#: Tried of every numeric option beside a plain cell, in every run of the tests.
_EXTREME = ["99999999999999999999", "0"]


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Runs words as the command line does, in a folder of files that no verb may write to; asserts how they end.

    The cache is the test's own: ``emulate remove`` deletes there.
    """
    made_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))  # whose recipes differ from machine to machine
    monkeypatch.setattr("vramprobe.sweep.signals.signals_that_end", list)
    # Made anew, all verbs' options take ten times as long as an answer about wrong words.
    monkeypatch.setattr(typer.main, "get_command", lambda app: COMMAND if app is verbs.app else get_command(app))

    def run(words: list[str]) -> int:
        monkeypatch.setattr(sys, "argv", ["vramprobe", *words])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"RuntimeError: CUDA out of memory\n")))
        out, err, code = io.StringIO(), io.StringIO(), 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                verbs.main()
            except SystemExit as end:
                code = end.code or 0
            except Exception as error:
                error.add_note(f"vramprobe {' '.join(words)}")
                raise
        assert code in (0, 1, 2, 3, 4), (words, code)  # docs/words.md
        assert "Traceback" not in err.getvalue(), (words, err.getvalue())
        assert code == 0 or out.getvalue() or err.getvalue(), words
        return code

    return run


def fuzzed(ends: Any, verb: str, base: list[str], number: int) -> None:
    """``number`` command lines of the verb."""

    always = {"deadline": None, "database": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}

    @settings(max_examples=number, **always)
    @given(command_lines(verb))
    def each(words: list[str]) -> None:
        name, given_already = verb.split(), tuple(one.split("=")[0] + "=" for one in base)
        ends([*name, *base, *(word for word in words[len(name) :] if not word.startswith(given_already))])

    each()


def numbers_of(verb: str) -> list[Any]:
    return [one for one in VERBS[verb].params if kind_of(one) in ("int", "float") and _flag(one) not in _NOT_TRIED]


def files_of(verb: str) -> list[Any]:
    named = [one for one in VERBS[verb].params if kind_of(one) == "Path" or one.name == "lengths"]
    return [one for one in named if _flag(one) and _flag(one) not in _NOT_TRIED]


def beside(base: list[str], word: str) -> list[str]:
    """The base's words, with the option of ``word`` in place of its own."""
    return [*(one for one in base if one.split("=")[0] != word.split("=")[0]), word]


@pytest.mark.parametrize("verb", LIGHT)
def test_no_words_of_a_verb_end_in_a_traceback(verb: str, ends: Any) -> None:
    fuzzed(ends, verb, [], 12)


@pytest.mark.parametrize(("verb", "base"), PLAIN.values(), ids=PLAIN)
def test_nothing_beside_a_right_cell_ends_in_a_traceback(verb: str, base: list[str], ends: Any) -> None:
    fuzzed(ends, verb, base, 6)


# Rows of real lengths are predict's with one option more, which the tests of words draw from, too.
@pytest.mark.parametrize(
    ("verb", "base"),
    [pytest.param(*case, id=name, marks=[exhaustive] if name == "lengths" else []) for name, case in PLAIN.items()],
)
def test_no_number_and_no_file_ends_in_a_traceback(verb: str, base: list[str], ends: Any) -> None:
    assert ends([verb, *base]) in (0, 4), "a base that is refused tries nothing"
    tried = [*((one, _EXTREME) for one in numbers_of(verb)), *((one, _FILES) for one in files_of(verb))]
    for parameter, values in tried:
        for value in values:
            ends([verb, *beside(base, f"{_flag(parameter)}={value}")])


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("verb", "base"), [*((verb, []) for verb in LIGHT), *PLAIN.values()])
def test_a_thousand_words_of_each_verb(verb: str, base: list[str], ends: Any) -> None:
    fuzzed(ends, verb, base, 1000)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("verb", "base"), PLAIN.values(), ids=PLAIN)
def test_no_odd_number_ends_in_a_traceback(verb: str, base: list[str], ends: Any) -> None:
    for parameter in numbers_of(verb):
        for number in _NUMBERS:
            ends([verb, *beside(base, f"{_flag(parameter)}={number}")])


@pytest.fixture
def stops_before_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verb ends well where it would start a process, connect, or load torch: its words were read by then."""

    def started(*_: Any, **__: Any) -> None:
        raise SystemExit(0)

    for name in ("execv", "execve", "execvp", "execvpe", "fork", "posix_spawn"):
        monkeypatch.setattr(os, name, started)
    monkeypatch.setattr(subprocess.Popen, "__init__", started)
    monkeypatch.setattr(socket.socket, "connect", started)
    monkeypatch.setattr(mcp, "make_server", started)
    for name in ("claims", "evaluate", "calibrate", "fit", "report"):
        monkeypatch.setattr(api, name, started)


@pytest.mark.parametrize("verb", sorted(_STARTS))
def test_no_words_of_a_verb_that_works_long_end_in_a_traceback(verb: str, ends: Any, stops_before_work: None) -> None:
    fuzzed(ends, verb, [], 12)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("verb", sorted(_STARTS))
def test_two_hundred_words_of_a_verb_that_works_long(verb: str, ends: Any, stops_before_work: None) -> None:
    fuzzed(ends, verb, [], 200)


def test_every_verb_is_tried_or_said_why_not() -> None:
    assert set(VERBS) == {*LIGHT, *_STARTS}
    assert len(LIGHT) >= 9


def test_the_verbs_options_have_the_kinds_that_are_drawn() -> None:
    kinds = {verb: {kind_of(one) for one in VERBS[verb].params} for verb in LIGHT}
    assert kinds["predict"] >= {"int", "float", "str", "bool", "Path"}
    assert len(numbers_of("predict")) > 10
    assert {one.name for one in files_of("predict")} >= {"fit", "lengths"}
