"""Results and fits that are not what they should be: one clear message, exit code 1, no traceback."""

import errno
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from command_line import vramprobe, within
from factories import TRUE, make_environment, make_oom, make_record, make_spec, specs, synthetic

from vramprobe.cli import verbs
from vramprobe.model.card_fit import save_fit
from vramprobe.predict.expected import fit_records
from vramprobe.records import writing
from vramprobe.records.record import RunRecord

CELL = ["--method", "lora", "--batch-size", "1", "--seq-len", "64", "--device", "cpu"]
PYTHIA = ["--model", "pythia-70m", *CELL[:-2]]
QUICKSTART = str(Path(__file__).parents[2] / "configs" / "sweeps" / "quickstart.yaml")


def refused(*words: str | Path) -> str:
    """The message with which the command line refuses these words."""
    done = within(verbs.main, ["vramprobe", *map(str, words)], Path.cwd())
    assert (done.returncode, done.stdout) == (1, ""), done
    assert done.stderr.startswith("vramprobe: ")
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
    return done.stderr


def written(folder: Path, records: Iterable[RunRecord], change: Callable[[dict], None] | None = None) -> Path:
    """These records as a sweep leaves them; ``change`` spoils the last."""
    contents = [json.loads(record.to_json_line()) for record in records]
    if change:
        change(contents[-1])
    (folder / "records.jsonl").write_text("".join(f"{json.dumps(content)}\n" for content in contents))
    return folder


def made() -> list[RunRecord]:
    return [synthetic(spec, TRUE) for spec in specs()[:12]]


VERBS = [["fit"], ["evaluate", "--leave-out", "length"]]


@pytest.mark.parametrize("words", [*VERBS, ["report"], ["calibrate"]], ids=lambda words: words[0])
def test_an_empty_folder(words: list[str], tmp_path: Path) -> None:
    assert "no .jsonl file in" in refused(*words, tmp_path)
    (tmp_path / "records.jsonl").write_text("")
    assert "holds no record; run a sweep first" in refused(*words, tmp_path)


@pytest.mark.parametrize("words", VERBS, ids=lambda words: words[0])
@pytest.mark.parametrize(
    ("others", "messages"),
    [
        ({"device_name": "NVIDIA A100"}, ("device_name is 'NVIDIA H100", "'NVIDIA A100'")),
        ({"device_name": "NVIDIA H100 80GB HBM3", "versions": {"torch": "2.11.0"}}, ("torch is '2.13'",)),
    ],
    ids=["two devices", "two releases"],
)
def test_a_mixed_folder(words: list[str], others: dict[str, Any], messages: tuple[str, ...], tmp_path: Path) -> None:
    elsewhere = [synthetic(spec, TRUE, environment=make_environment(**others)) for spec in specs()[12:16]]
    told = refused(*words, written(tmp_path, [*made(), *elsewhere]))
    for message in ("these records must not be mixed", *messages, "keep them in folders of their own"):
        assert message in told


@pytest.mark.parametrize("words", VERBS, ids=lambda words: words[0])
@pytest.mark.parametrize("value", [float("nan"), -5, "many", 1.5, None, 10**30])
def test_a_record_with_bytes_that_cannot_be(words: list[str], value: Any, tmp_path: Path) -> None:
    def spoil(content: dict) -> None:
        content["peak"]["allocated_bytes"] = value

    told = refused(*words, written(tmp_path, made(), spoil))
    assert "records.jsonl, line 12" in told
    assert "peak.allocated_bytes" in told


def test_peaks_of_no_bytes_are_left_out_by_name(tmp_path: Path) -> None:
    nothing = [one.model_copy(update={"peak": one.peak.model_copy(update={"allocated_bytes": 0})}) for one in made()]
    assert "of 12 given, 0 are; 12 left out: a peak of 0 bytes" in refused("fit", written(tmp_path, nothing))


def test_records_that_all_ran_out_of_memory(tmp_path: Path) -> None:
    folder = written(tmp_path, [make_oom(make_spec(seq_len=length), instrument="cuda") for length in range(8, 16)])
    said = "of 8 given, 0 are; 8 left out: ran out of memory, which only bounds its peak from below. Measure more"
    assert said in refused("fit", folder)
    assert "needs at least 4 usable records" in refused("evaluate", folder, "--leave-out", "length")
    assert "nothing is held out" in refused("evaluate", folder)


def test_one_record_alone(tmp_path: Path) -> None:
    folder = written(tmp_path, made()[:1])
    assert "at least 4 usable records; of 1 given, 1 are" in refused("fit", folder)
    assert "every record is of one model" in refused("evaluate", folder, "--leave-out", "model")
    assert "nothing is held out" in refused("evaluate", folder)


# -- fits --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def fitted(tmp_path: Path) -> Path:
    save_fit(fit_records(made()), tmp_path / "fit.json")
    return tmp_path / "fit.json"


def test_a_fit_of_another_format(fitted: Path) -> None:
    fitted.write_text(json.dumps(json.loads(fitted.read_text()) | {"format": 1}))
    told = refused("predict", *PYTHIA, "--fit", fitted)
    assert "has format 1, this vramprobe reads 4; fit again: vramprobe fit RESULTS" in told


@pytest.mark.parametrize(
    ("spoilt", "message"),
    [
        (lambda text: text[: len(text) // 2], "is not JSON"),
        (lambda text: "[]", "is JSON but no fit"),
        (lambda text: text.replace('"card"', '"crad"'), "is damaged at card: Field required"),
        (lambda text: text.replace('"value": ', '"value": -'), "is damaged at gaps.allocated"),
    ],
    ids=["half", "no fit", "a missing field", "a number out of range"],
)
def test_a_damaged_fit(spoilt: Callable[[str], str], message: str, fitted: Path, tmp_path: Path) -> None:
    fitted.write_text(spoilt(fitted.read_text()))
    assert message in refused("predict", *PYTHIA, "--fit", fitted)
    folder = written(tmp_path, made())
    assert message in refused("evaluate", folder, "--fit", fitted)


def test_a_folder_where_a_fit_is_asked_for(tmp_path: Path) -> None:
    assert "cannot read the fit" in refused("predict", *PYTHIA, "--fit", tmp_path)


def test_a_fit_that_has_seen_every_record(fitted: Path, tmp_path: Path) -> None:
    told = refused("evaluate", written(tmp_path, made()), "--fit", fitted)
    assert "the fit has seen every record" in told


# -- files and options that cannot be meant ----------------------------------------------------------------------------


def test_a_model_with_a_name_that_no_path_has() -> None:
    told = refused("predict", "--model", "x" * 5000, *CELL)
    assert "no path is so long: xxx" in told
    assert len(told) < 200


@pytest.mark.parametrize("words", [["predict", *PYTHIA], ["plan", QUICKSTART]], ids=lambda words: words[0])
def test_a_gpu_without_a_name(words: list[str]) -> None:
    assert "unknown GPU ''. `vramprobe gpus` lists them" in refused(*words, "--gpu", "")


@pytest.mark.parametrize("words", [["evaluate", "results"], ["claims"]], ids=lambda words: words[0])
def test_a_check_of_no_folder(words: list[str]) -> None:
    done = vramprobe(*words, "--check")
    assert done.returncode == 2
    assert "--check compares the files of a folder: name it with -o" in " ".join(done.stderr.split())


@pytest.mark.parametrize("content", [b"my notes\nwithout an end", b'{\n  "format": 2\n}\n', b"\xff\xfe"])
def test_a_file_of_something_else_takes_no_record(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_bytes(content)
    told = refused("measure", "--model", "pythia-70m", *CELL, "--save", tmp_path / "mine.txt")
    assert "mine.txt is no file of records: it begins with" in told
    assert (tmp_path / "mine.txt").read_bytes() == content
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("content", ["", '{"for', '{"format":1,"line":"started","attempt_id":"3', '{"format": 1}\n'])
def test_a_journal_takes_another_record_however_it_ends(content: str, tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text(content)
    writing.require_journal(tmp_path / "mine.jsonl")
    writing.require_journal(tmp_path / "new.jsonl")


def test_a_fit_that_cannot_be_written_leaves_the_old_one(
    fitted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, results = fitted.read_text(), tmp_path / "results"
    results.mkdir()
    written(results, made())

    def full(path: Path, text: str) -> None:
        path.touch()
        path.write_bytes(text[:100].encode())
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    told = refused("fit", results, "--out", fitted)
    assert "cannot write the fit to" in told
    assert "No space left on device; name another file with --out" in told
    assert fitted.read_text() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fit.json", "results"]


def test_records_are_well_formed_without_being_spoilt(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """That the refusals above are not those of any folder that this file writes."""
    folder = written(tmp_path, [*made(), make_record(specs()[20], outcome={"kind": "timeout", "limit_seconds": 1})])
    verbs.app(["fit", str(folder), "-o", str(tmp_path / "fit.json")], standalone_mode=False)
    assert "12 records of 1 model " in capsys.readouterr().out
