"""The command line: every verb, the same options everywhere, and errors that say what to do."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from command_line import HERE, flags, vramprobe, within
from factories import MODELS, TINY_LLAMA_PATH, TRUE, make_spec, specs, synthetic
from grids import exhaustive
from processes import is_alive
from typer.main import get_command

from vramprobe.cli import options as cli_options
from vramprobe.cli import verbs
from vramprobe.options import MEASURED_OPTIONS, OPTIONS, RANK_OPTIONS
from vramprobe.records import store, writing
from vramprobe.resolve import option_names
from vramprobe.rules.sharding import SHARD_SIZE

VERBS = {
    f"{name} {part}" if part else name: inner
    for name, verb in get_command(verbs.app).commands.items()
    for part, inner in getattr(verb, "commands", {"": verb}).items()
}
TAKES_A_CELL = ("measure", "predict")
CELL = ["--method", "lora", "--batch-size", "1", "--seq-len", "16", "--device", "cpu"]
TINY = ["--model", str(TINY_LLAMA_PATH), *CELL]
QUICKSTART = str(Path(__file__).parents[2] / "configs" / "sweeps" / "quickstart.yaml")
RECOMMEND = ["recommend", "--model", "smollm2-135m", "--method", "lora", "--seq-len", "64"]
RESULTS = str(Path(__file__).parents[2] / "results" / "cpu" / "quickstart")


def test_cell_options_are_the_specs_words() -> None:
    assert sorted(cli_options.CELL_OPTIONS) == option_names()
    assert f"(default {SHARD_SIZE}: one machine)" in OPTIONS["shard_size"].help


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_json_and_help_for_each_option(verb: str) -> None:
    options = {option for parameter in VERBS[verb].params for option in parameter.opts}
    assert "--json" in options
    assert VERBS[verb].help
    assert all(getattr(parameter, "help", "") for parameter in VERBS[verb].params if parameter.name != "help")


@pytest.mark.parametrize("verb", TAKES_A_CELL)
def test_verbs_with_a_cell_take_every_cell_option(verb: str) -> None:
    options = {option for parameter in VERBS[verb].params for option in parameter.opts}
    own = set(cli_options.CELL_OPTIONS) - (set() if verb == "measure" else {*RANK_OPTIONS, *MEASURED_OPTIONS})
    assert set(flags(dict.fromkeys(own, True))) <= options


def test_what_is_planned_can_be_run_with_the_same_words() -> None:
    options = {verb: {o for parameter in VERBS[verb].params for o in parameter.opts} for verb in ("plan", "run")}
    assert options["plan"] <= options["run"]
    more = {"--timeout", "--max-time", "--budget", "--limit", "--dry-run", "--on", "--jobs"}
    assert options["run"] - options["plan"] == more


def test_measure_prints_a_breakdown_and_saves(tmp_path: Path) -> None:
    journal = tmp_path / "one.jsonl"
    done = vramprobe("measure", *TINY, "--timing-steps", "0", "--save", str(journal))
    assert done.returncode == 0, done.stderr
    for word in ("weights", "saved_activations", "temporaries", "█", "allocated, in", "cpu instrument"):
        assert word in done.stdout
    assert store.read(journal).records[0].outcome.kind == "ok"


@exhaustive
def test_measure_json_is_the_record() -> None:
    done = vramprobe("measure", *TINY, "--timing-steps", "1", "--json")
    record = json.loads(done.stdout)
    assert record["outcome"] == {"kind": "ok"}
    assert record["fingerprint"] == make_spec(method="lora", batch_size=1, timing_steps=1).fingerprint
    assert len(record["timing"]["step_seconds"]) == 1


def test_run_check_report_end_to_end(tmp_path: Path) -> None:
    sweep = {
        "name": "tiny",
        "defaults": {"timing_steps": 0},
        "cells": [
            {"model": str(TINY_LLAMA_PATH), "method": ["full", "lora"], "batch_size": 1, "seq_len": [16, 32]},
            {"model": str(TINY_LLAMA_PATH), "method": "lora", "batch_size": 4, "seq_len": 64, "hold_out": True},
        ],
    }
    (tmp_path / "tiny.yaml").write_text(json.dumps(sweep))
    run = vramprobe("run", "tiny.yaml", "--device", "cpu", "--json", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert [line["kind"] for line in lines] == ["planned", *5 * ["started", "finished"], "summary"]
    assert lines[-1]["outcomes"] == {"ok": 5}
    results = tmp_path / "results" / "cpu" / "tiny"
    assert len(store.read(results).records) == 5

    checked = vramprobe("check", str(results), "--json", cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout
    assert {finding["rule"] for finding in json.loads(checked.stdout)["findings"]} <= {"code"}  # a dirty checkout

    fit = vramprobe("fit", str(results), "--out", "fit.json", cwd=tmp_path)
    assert fit.returncode == 1
    assert "of 5 given, 0 are; 5 left out: of the CPU, which is measured and not predicted" in fit.stderr
    report = vramprobe("report", str(results), "-o", "out", cwd=tmp_path)
    assert report.returncode == 0, report.stderr
    table = (tmp_path / "out" / "measured.md").read_text()
    assert "tiny-llama" in table
    assert "predicted" not in table


def test_fit_evaluate_predict_report_of_what_a_gpu_measured(tmp_path: Path) -> None:
    records = [synthetic(cell, TRUE, held_out=cell.model == MODELS[-1]) for cell in specs()]
    for record in records:
        writing.append(tmp_path / "results" / "records.jsonl", record)
    fit = vramprobe("fit", "results", "--out", "fit.json", "--json", cwd=tmp_path)
    assert fit.returncode == 0, fit.stderr
    assert json.loads(fit.stdout)["gaps"]["num_records"] == 24  # held-out cells stay out
    cell = ["--model", "smollm2-360m", "--method", "qlora", "--batch-size", "2", "--seq-len", "2048"]
    predicted = vramprobe("predict", *cell, "--fit", "fit.json", "--gpu", "H100-SXM", "--json", cwd=tmp_path)
    assert predicted.returncode == 0, predicted.stderr
    prediction = json.loads(predicted.stdout)
    truth = next(one for one in records if (one.spec.model, one.spec.method) == ("smollm2-360m", "qlora"))
    assert prediction["peak_allocated_bytes"]["value"] == pytest.approx(truth.peak.allocated_bytes, rel=1e-6)
    assert "12 " in vramprobe("evaluate", "results", cwd=tmp_path).stdout
    report = vramprobe("report", "results", "--fit", "fit.json", "-o", "out", cwd=tmp_path)
    assert report.returncode == 0, report.stderr
    assert "Held out of the fit" in (tmp_path / "out" / "measured.md").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["predict", "--model", "lama-3.1-8b", *CELL[:-2]], "Nearest: llama-3.1-8b"),
        (["predict", *TINY[:-2], "--quant", "nf4"], "needs method qlora"),
        (["predict", *TINY[:-2], "--gpu", "H1000"], "unknown GPU"),
        (["predict", *TINY[:-2], "--fit", "nowhere.json"], "nowhere.json"),
        (["predict", "--model", "org/model", *CELL[:-2]], "HF_HUB_OFFLINE"),
        (["measure", *TINY[:-1], "cuda"], "CUDA"),
        (["measure", *TINY, "--optim", "paged_adamw_8bit"], "needs device cuda"),
        (["measure", *TINY, "--lora-alpha", "nan"], "lora_alpha"),
        (["measure", *TINY, "--save", "/dev/full"], "/dev/full"),
        (["measure", *TINY, "--save", "."], "a folder has that name"),
        (["measure", *TINY, "--timeout", "-5"], "more than 0 seconds"),
        (["measure", *TINY, "--seed", str(10**23)], "seed"),
        (["measure", *TINY, "--lora-targets", "a/b"], "module names"),
        (["measure", *TINY[:-1], "gpu"], "Nearest: cpu"),
        (["measure", *TINY, "--quant", "int8", "--dora", "--method", "qlora"], "DoRA cannot"),
        (["predict", *TINY[:-2], "--timeline", "a.pdf"], "must end in .html, .png or .svg"),
        (["predict", *TINY[:-2], "--timeline", "/proc/no/a.png"], "/proc/no/a.png"),
        (["profile", "--timeline", "a.txt", "--", "python", "a.py"], "must end in .html, .png, .svg or .json"),
        (["run", "nowhere.yaml"], "nowhere.yaml"),
        (["plan", "nowhere.yaml"], "nowhere.yaml"),
        (["plan", QUICKSTART, "--gpu", "H1000"], "unknown GPU"),
        (["plan", QUICKSTART, "--gpu", "H200", "--provider", "RunPad"], "Nearest: RunPod"),
        (["plan", QUICKSTART, "--device", "cpu", "--provider", "RunPod"], "the CPU has no price"),
        (["plan", QUICKSTART, "--only", "pythia-7b"], "Nearest: pythia-70m"),
        (["plan", QUICKSTART, "--only", ""], "an empty pattern"),
        (["plan", QUICKSTART, "--gpu", "H200", "--device", "cpu"], "one for device cuda"),
        (["plan", QUICKSTART, "--skip", "*"], "is left after --only, --skip and --shard"),
        (["plan", QUICKSTART, "--shard", "0/4"], "for instance 2/4"),
        (["plan", QUICKSTART, "--audit", "5 percent"], "for instance 5%"),
        (["run", QUICKSTART, "--device", "cpu", "--budget", "2"], "give --price"),
        (["run", QUICKSTART, "--device", "cpu", "--budget", "-2", "--price", "1"], "more than 0 dollars"),
        (["run", QUICKSTART, "--device", "cpu", "--price", "0"], "more than 0 dollars per hour"),
        (["run", QUICKSTART, "--device", "cpu", "--limit", "0"], "at least 1"),
        (["run", QUICKSTART, "--device", "cpu", "--max-time", "soon"], "is not a duration"),
        (["run", QUICKSTART, "--device", "cpu", "--limit-vram", "24GiB"], "needs device cuda"),
        (["fit", "nowhere"], "nowhere"),
        (["check", "nowhere"], "nowhere"),
        (["report", "nowhere"], "nowhere"),
        (["report", RESULTS, "--fit", "nowhere.json"], "nowhere.json"),
        (["report", RESULTS, "--check", "-o", "nowhere"], "by_size.md is missing"),
        (["evaluate", RESULTS], "33 left out: of the CPU, which is measured and not predicted"),
        (["report", RESULTS, "--dataset", "d", "--push", "name"], "write NAMESPACE/NAME"),
        (["measure", *TINY, "--snapshot", "a.pickle"], "measure it on a GPU"),
        ([*RECOMMEND, "--tokens", "many"], "write for instance 50M"),
        ([*RECOMMEND, "--tokens", "1M", "--deadline", "soon"], "is not a duration"),
        ([*RECOMMEND, "--tokens", "1M", "--gpu", "H1000"], "unknown GPU"),
        ([*RECOMMEND, "--tokens", "1M", "--region", "eu"], "no price at hand names its region"),
        ([*RECOMMEND, "--tokens", "1M", "--prices", "nowhere.csv"], "nowhere.csv"),
        ([*RECOMMEND, "--tokens", "1M", "--device", "cpu"], "about CUDA cards"),
        ([*RECOMMEND, "--tokens", "1M", "--largest-model", "--budget", "1"], "do not give it"),
        ([*RECOMMEND[:-2], "--tokens", "1M"], "seq_len: missing"),
    ],
    ids=lambda value: " ".join(value[-4:]) if isinstance(value, list) else "",
)
def test_a_users_error_is_one_clear_line(words: list[str], said: str, tmp_path: Path) -> None:
    if "cuda" in words:
        pytest.importorskip("torch")
        import torch

        if torch.cuda.is_available():
            pytest.skip("this machine has CUDA")
    done = within(verbs.main, ["vramprobe", *words], tmp_path)
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("vramprobe: ")
    assert said in done.stderr


def test_an_unknown_key_in_a_sweep_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("cells: [{model: gpt2, method: lora, batch_sice: 1, seq_len: 64}]")
    done = vramprobe("run", "bad.yaml", "--device", "cpu", cwd=tmp_path)
    assert done.returncode == 1
    assert "batch_sice" in done.stderr
    assert "batch_size" in done.stderr


def test_wrong_usage_exits_with_2() -> None:
    assert vramprobe("measure", "--model", "gpt2").returncode == 2
    assert vramprobe("no-such-verb").returncode == 2
    assert vramprobe(*RECOMMEND).returncode == 2  # neither tokens nor a limit


def test_results_that_cannot_be_written_are_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file where the folder should be")
    cells: list[dict[str, Any]] = [{"model": str(TINY_LLAMA_PATH), "method": "full", "batch_size": 1, "seq_len": 8}]
    (tmp_path / "one.yaml").write_text(json.dumps({"cells": cells}))
    done = vramprobe("run", "one.yaml", "--device", "cpu", "--out", "out", cwd=tmp_path)
    assert (done.returncode, "out" in done.stderr, "Traceback" in done.stderr) == (1, True, False)


def test_an_interrupted_measurement_exits_with_130_and_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vramprobe", "measure", *TINY, "--steps", "1000000"]
    pipes, env = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE), os.environ | {"TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, text=True, env=env, **pipes)
    deadline = time.monotonic() + 60
    while not (workers := psutil.Process(process.pid).children()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert not is_alive(workers[0])
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_under_the_output_is_one_clear_line() -> None:
    command = [sys.executable, "-m", "vramprobe", "models"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr == "vramprobe: the output could not be written: No space left on device\n"


def test_a_plan_shows_cells_that_can_be_copied_and_what_they_cost(tmp_path: Path) -> None:
    cells = ["emulated", "--only", "llama-3.1-8b_qlora"]
    words = ["plan", *cells, "--gpu", "RTX-4090", "--price", "0.36", "--out", str(tmp_path)]
    text = vramprobe(*words).stdout
    assert re.search(r"^run +fits +\S+ GiB +\S+ GiB +\S+ GiB +\S+ s +llama-3.1-8b_qlora\S+_b1s1024_ckpt *$", text, re.M)
    assert "2 cells: 2 run; on GeForce RTX 4090 (23.99 GiB): 2 fits; about" in text
    assert re.search(r"at \$0\.36/h \(as given\); 2 predicted by recipes; estimated, not measured", text)
    plan = json.loads(vramprobe(*words, "--json").stdout)
    assert (plan["total"], plan["actions"], plan["verdicts"]) == (2, {"run": 2}, {"fits": 2})
    assert plan["expected_dollars"] == pytest.approx(plan["expected_seconds"] * 0.36 / 3600, rel=0.01)
    assert all(cell["peak_allocated_bytes"]["low"] > 0 for cell in plan["cells"])


@pytest.mark.parametrize(
    "limit", ["--max-time=soon", "--max-time=", "--budget=-1", "--budget=1", "--limit=0", "--timeout=0"]
)
def test_a_dry_run_refuses_the_limits_that_a_run_refuses(limit: str, tmp_path: Path) -> None:
    """An empty one is a shell's variable that was never set: no reason to go on without a limit."""
    done = vramprobe("run", QUICKSTART, "--device", "cpu", "--out", str(tmp_path), "--dry-run", limit)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("vramprobe: ")


@pytest.mark.parametrize("words", [["calibrate", RESULTS], ["gpus"]], ids=lambda words: words[0])
def test_an_output_without_unicode_lacks_only_those_characters(words: list[str]) -> None:
    command, env = [sys.executable, "-m", "vramprobe", *words], os.environ | {"PYTHONPATH": HERE}
    plain = subprocess.run(command, capture_output=True, env=env | {"PYTHONIOENCODING": "ascii"})
    assert (plain.returncode, plain.stderr) == (0, b"")
    whole = subprocess.run(command, capture_output=True, env=env | {"PYTHONIOENCODING": "utf-8"}).stdout.decode()
    assert [len(line) for line in plain.stdout.decode("ascii").splitlines()] == [*map(len, whole.splitlines())]


def test_closed_output_is_no_error(tmp_path: Path) -> None:
    """Files that are opened later do not get the number of stderr, where libraries write."""
    command = shlex.join([sys.executable, "-m", "vramprobe", "gpus"])
    assert subprocess.run(["sh", "-c", f"{command} 0<&- 1>&- 2>&-"], check=False).returncode == 0
    check = "from vramprobe.cli import verbs; verbs._open_what_is_closed(); import os; os._exit(os.open('/', 0) - 3)"
    command = shlex.join([sys.executable, "-c", check])
    assert subprocess.run(["sh", "-c", f"{command} 0<&- 1>&- 2>&-"], check=False).returncode == 0


def test_a_dry_run_is_the_plan_and_runs_nothing(tmp_path: Path) -> None:
    words = [QUICKSTART, "--device", "cpu", "--only", "gpt2", "--out", str(tmp_path / "out")]
    assert vramprobe("run", *words, "--dry-run").stdout == vramprobe("plan", *words).stdout
    assert not (tmp_path / "out").exists()
