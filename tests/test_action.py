"""action.yml: of the shape that GitHub publishes, and its steps run as a runner would run them."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from composite import ROOT, Job, evaluate
from grids import exhaustive

from vramprobe.records.profile import last_profile

ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
STEPS = ACTION["runs"]["steps"]
#: The parts of https://json.schemastore.org/github-action.json that a composite action stands on.
KEYS = {"name", "description", "author", "inputs", "outputs", "runs", "branding"}
STEP_KEYS = {"run", "shell", "uses", "with", "name", "id", "if", "env", "continue-on-error", "working-directory"}
MAIN = {"workflow": "ci", "job": "memory", "sha": "a1", "ref_type": "branch", "ref_name": "main", "event_name": "push"}
MAIN["event.repository.default_branch"] = "main"
PULL = MAIN | {"sha": "b2", "ref_name": "53/merge", "event_name": "pull_request"}
#: In place of vramprobe: its words, one a line, and a profile.
STUB = """#!/bin/bash
printf '%s\\n' "$@" > "$RUNNER_TEMP/words"
printf '%s\\n' "$PATH" > "$RUNNER_TEMP/path"
while [ "$1" != --save ]; do shift; done
echo "profile of $STUB_SAYS" > "$2"
exit "${STUB_ENDS:-0}"
"""
TRAINING = """
import sys, torch
width = int(sys.argv[1])
model = torch.nn.Sequential(torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(9):
    model(torch.ones(64, width, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_it_has_the_shape_that_is_published() -> None:
    assert {"name", "description", "runs"} <= set(ACTION) <= KEYS
    assert set(ACTION["branding"]) == {"icon", "color"}
    for kind, needed, allowed in (
        ("inputs", {"description"}, {"description", "required", "default", "deprecationMessage"}),
        ("outputs", {"description", "value"}, {"description", "value"}),
    ):
        for name, one in ACTION[kind].items():
            assert re.fullmatch(r"[_a-zA-Z][a-zA-Z0-9_-]*", name)
            assert needed <= set(one) <= allowed
            assert isinstance(one.get("default", ""), str)
            assert isinstance(one.get("required", False), bool)
    assert set(ACTION["runs"]) == {"using", "steps"}
    assert ACTION["runs"]["using"] == "composite"
    for step in STEPS:
        assert set(step) <= STEP_KEYS
        assert ("run" in step) != ("uses" in step)
        assert ("shell" in step) == ("run" in step)


def test_every_name_in_an_expression_is_there() -> None:
    """An unknown name is empty on GitHub, and nobody is told; and no expression stands in a script."""
    known = {f"inputs.{name}" for name in ACTION["inputs"]}
    known |= {"runner.temp", "runner.os", "runner.arch", *(f"github.{name}" for name in MAIN)}
    for step in [*STEPS, {"outputs": ACTION["outputs"]}]:
        assert "${{" not in step.get("run", "")
        text = yaml.dump({key: value for key, value in step.items() if key != "run"})
        names = set(re.findall(r"\b(?:inputs|github|runner|steps)\.[\w.-]+", text))
        assert names <= known, names - known
        if "id" in step:
            made = re.findall(r'echo "([\w-]+)=', step.get("run", "")) or ["cache-hit"]
            known |= {f"steps.{step['id']}.outputs.{name}" for name in made}


def test_the_page_uses_inputs_that_are_there() -> None:
    text = (ROOT / "docs" / "ci.md").read_text()
    (workflow,) = re.findall(r"^```yml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (job,) = yaml.safe_load(workflow)["jobs"].values()
    given = job["steps"][-1]["with"]
    assert (
        {name for name, one in ACTION["inputs"].items() if one.get("required")} <= set(given) <= set(ACTION["inputs"])
    )
    table = text.partition("| input | meaning |\n")[2].partition("\n\n")[0]
    named = [name for row in table.splitlines() for name in re.findall(r"`([\w-]+)`", row.split("|")[1])]
    assert sorted(named) == sorted(ACTION["inputs"])


def test_every_variable_in_a_script_is_given() -> None:
    of_the_runner = {"HOME", "PATH", "RUNNER_TEMP", "GITHUB_ACTION_PATH", "GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY"}
    for step in STEPS:
        read = set(re.findall(r"\$\{?([A-Z][A-Z_]+)", step.get("run", "")))
        assert read <= of_the_runner | set(step.get("env", {})), step["name"]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("a.b != ''", "true"),
        ("none == ''", "true"),
        ("a.b == 'x' && none == 'y'", "false"),
        ("a.b == 'x' && a.b || ''", "x"),
        ("a.b == 'y' && a.b || ''", ""),
    ],
)
def test_expressions_are_read_as_on_github(expression: str, value: str) -> None:
    assert evaluate(expression, {"a.b": "x"}) == value


class Stubbed:
    """Jobs on fresh machines, for which the environment is in the cache already, with STUB in vramprobe's place."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.num_jobs = folder, 0
        (folder / "work" / "sub").mkdir(parents=True)

    def job(self, github: dict[str, str], says: str, **more: str) -> Job:
        self.num_jobs += 1
        machine, own = self.folder / f"machine{self.num_jobs}", {"STUB_SAYS": says, **more}
        job = Job(machine, self.folder / "caches", self.folder / "work", github, own)
        job.action = self.folder / "action"
        if not job.action.exists():
            (job.action / "vramprobe").mkdir(parents=True)
            for name in ("action.yml", "pyproject.toml", "setup.py"):
                shutil.copy(ROOT / name, job.action)
        (job.folder / "bin").mkdir()
        python = job.folder / "bin" / "python3"
        # python3 -m venv FOLDER, then FOLDER/bin/python -m pip and FOLDER/bin/vramprobe
        python.write_text(
            '#!/bin/bash\nif [ "$1" = -c ]; then echo python 3.12; exit; fi\n'
            f'mkdir -p "$3/bin"; cp {job.folder}/bin/stub "$3/bin/vramprobe"; cp /bin/true "$3/bin/python"\n'
        )
        (job.folder / "bin" / "stub").write_text(
            STUB.replace(
                "printf",
                'if [ "$1" = emulate ]; then mkdir -p "$VRAMPROBE_CACHE_DIR/environments/torch-9/bin"; '
                'printf "%s\\n" "$@" > "$RUNNER_TEMP/setup"; exit; fi\nprintf',
                1,
            )
        )
        for each in (job.folder / "bin").iterdir():
            each.chmod(0o755)
        job.more["PATH"] = f"{job.folder}/bin:/usr/local/bin:/usr/bin:/bin"
        return job

    def baselines(self) -> list[Path]:
        return [each for each in (self.folder / "caches").iterdir() if "baseline" in each.name]


def words(job: Job) -> list[str]:
    return (job.temporary / "words").read_text().splitlines()


@pytest.fixture
def stubbed(tmp_path: Path) -> Stubbed:
    return Stubbed(tmp_path)


def test_the_command_reaches_vramprobe_as_a_shell_reads_it(stubbed: Stubbed) -> None:
    job = stubbed.job(MAIN, "main")
    command = "env 'NAME=two words' python train.py \\\n  --lr $((1 + 1))"
    ran = job.use(
        command=command, gpu="H100-SXM x2", max_allocated="22GiB", working_directory="sub", packages="a==1\nb\n"
    )
    assert ran.status == 0, ran.out
    profile = ran.outputs["profile"]
    assert words(job) == [
        *("profile", "--emulate", "H100-SXM x2", "--save", profile, "--summary", str(job.summary)),
        *("--max-allocated", "22GiB", "--empty-weights"),
        *("--", "env", "NAME=two words", "python", "train.py", "--lr", "2"),
    ]
    assert (job.temporary / "setup").read_text().split() == ["emulate", "setup", "--package", "a==1", "--package", "b"]
    assert (
        (job.temporary / "path").read_text().startswith(f"{job.home}/.cache/vramprobe-action/environments/torch-9/bin:")
    )


def test_the_environment_is_made_once_and_again_for_other_versions(stubbed: Stubbed) -> None:
    made = "Install vramprobe and the emulated environment"
    assert made in stubbed.job(MAIN, "a").use(command="x", torch="2.9.0").steps
    # a machine has its home at the same path each time, and here each has its own
    again = stubbed.job(PULL, "b")
    again.home = stubbed.folder / "machine1" / "home"
    assert made not in again.use(command="x", torch="2.9.0").steps
    assert made in again.use(command="x", torch="2.8.0").steps


def test_a_pull_request_is_compared_with_the_default_branch(stubbed: Stubbed) -> None:
    first = stubbed.job(PULL, "early")
    ran = first.use(command="x", max_growth="2%")
    assert "--baseline" not in words(first)
    assert "has no profile of the default branch yet" in ran.out
    assert stubbed.job(MAIN, "main").use(command="x", max_growth="2%").status == 0
    pull = stubbed.job(PULL, "pull")
    pull.use(command="x", max_growth="2%")
    baseline = pull.temporary / "vramprobe-baseline" / "profile.jsonl"
    assert words(pull)[7:11] == ["--baseline", str(baseline), "--max-growth", "2%"]
    (kept,) = stubbed.baselines()
    assert kept.name == "vramprobe-baseline-ci-memory-default@a1"
    assert (kept / "profile.jsonl").read_text() == "profile of main\n"


def test_the_default_branch_is_compared_without_a_limit_and_becomes_the_baseline(stubbed: Stubbed) -> None:
    stubbed.job(MAIN, "one").use(command="x")
    second = stubbed.job(MAIN | {"sha": "a2"}, "two")
    second.use(command="x", max_growth="0")
    assert "--baseline" in words(second)
    assert "--max-growth" not in words(second)
    third = stubbed.job(MAIN | {"sha": "a3"}, "three", STUB_ENDS="1")
    assert third.use(command="x").status == 1
    assert {kept.name[-2:] for kept in stubbed.baselines()} == {"a1", "a2"}  # what failed is no baseline


@pytest.mark.parametrize(
    "other",
    [{"event_name": "pull_request_target"}, {"ref_name": "topic"}, {"ref_type": "tag"}],
    ids=lambda other: next(iter(other.values())),
)
def test_nothing_else_becomes_the_baseline(stubbed: Stubbed, other: dict[str, str]) -> None:
    assert stubbed.job(MAIN | other, "x").use(command="x").status == 0
    assert stubbed.baselines() == []


def test_two_uses_in_a_job_have_two_baselines(stubbed: Stubbed) -> None:
    main = stubbed.job(MAIN, "main")
    assert main.use(command="x", name="a").outputs != main.use(command="x", name="b").outputs
    assert "--baseline" not in words(main)  # b's: not what a left
    pull = stubbed.job(PULL, "pull")
    pull.use(command="x", name="a")
    assert "--baseline" in words(pull)
    pull.use(command="x", name="c")
    assert "--baseline" not in words(pull)


def test_a_baseline_of_the_repository_comes_first(stubbed: Stubbed) -> None:
    stubbed.job(MAIN, "main").use(command="x")
    main = stubbed.job(MAIN | {"sha": "a2"}, "again")
    main.use(command="x", baseline="memory.jsonl", max_growth="1MiB")
    assert words(main)[7:11] == ["--baseline", "memory.jsonl", "--max-growth", "1MiB"]
    assert not (stubbed.folder / "caches" / "vramprobe-baseline-ci-memory-default@a2").exists()


@exhaustive
@pytest.mark.timeout(1800)
def test_it_finds_what_grew_with_nothing_but_python_on_the_machine(tmp_path: Path) -> None:
    """The whole of it, in a fresh home: pip installs this checkout and a CUDA build of torch (a download of 0.7 GB)."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "train.py").write_text(TRAINING)
    pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}  # where its packages come from
    more = {"PATH": f"{Path(sys.executable).resolve().parent}:/usr/bin:/bin", **pip}
    main = Job(tmp_path / "machine", tmp_path / "caches", work, MAIN, more)
    ran = main.use(command="python train.py 512")
    assert ran.status == 0, ran.out
    for width, status in (("512", 0), ("640", 1)):
        shutil.rmtree(tmp_path / "machine")
        pull = Job(tmp_path / "machine", tmp_path / "caches", work, PULL, more)
        ran = pull.use(command=f"python train.py {width}", max_growth="2%")
        assert ran.status == status, ran.out
        assert "Install vramprobe and the emulated environment" not in ran.steps
        said = pull.summary.read_text()
        assert ("over the limit" in said) == bool(status)
        assert last_profile(ran.outputs["profile"]).instrument == "emulated"
    assert "| `train.py:4 <module> (weights)` |" in said
