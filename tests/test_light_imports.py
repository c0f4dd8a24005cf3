"""The stages that plan, read and predict start fast: importing them loads nothing heavy."""

import os
import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "peft", "bitsandbytes", "huggingface_hub", "pandas", "matplotlib", "scipy", "yaml")
LIGHT = """
    catalog spec api interop.questions interop.training_file interop.watch interop.callback sweep.definition
    records.record records.outcomes records.store records.table check report report.timeline_file sweep.resume
    sweep.duration sweep.skip sweep.plan literature.formulas literature.calibrate literature.claims literature.figures
    literature.readings measure.doctor
""".split()  # noqa: SIM905


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [(LIGHT, HEAVY), (["architecture", "model.fit", "predict.prediction"], ("numpy", *HEAVY))],
    ids=["light", "without numpy"],
)
def test_importing_loads_nothing_heavy(modules: list[str], heavy: tuple[str, ...]) -> None:
    """One after the other: the first that loads it is named."""
    code = (
        "import importlib, sys\n"
        f"for module in {modules}:\n"
        "    importlib.import_module(f'vramprobe.{module}')\n"
        f"    heavy = [name for name in {heavy} if name in sys.modules]\n"
        "    if heavy: sys.exit(f'{module} loads {heavy}')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_command_line_starts_without_pydantic_and_numpy() -> None:
    """They take longer than all of vramprobe's own verbs; an answer needs the first, help needs neither."""
    code = "import sys; from vramprobe.cli.verbs import app; print({'pydantic', 'numpy'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_verb_that_is_called_is_loaded_alone() -> None:
    code = (
        "import sys; from vramprobe.cli.verbs import main\n"
        "sys.argv[1:] = ['explain', '--help']\n"
        "try: main()\n"
        "except SystemExit: print([verb for verb in ('explain', 'profile', 'results') if f'vramprobe.cli.{verb}' in "
        "sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "['explain']\n"


#: Command → the most modules of ours that it loads; libraries take the rest of its time.
MOST_MODULES = {
    "--help": 52,
    "predict --help": 22,
    "predict --model smollm2-135m --method lora --batch-size 2 --seq-len 1024 --gpu RTX-4090": 127,
}
#: Of ours: what no answer in a line or a bar needs.
NOT_OF_ANSWERS = (
    "cli.help",
    "cli.display",
    "report.definition",
    "interop.arguments",
    "techniques.registry",
    "catalog.claims",
)


@pytest.mark.parametrize("words", MOST_MODULES)
def test_a_question_loads_no_more_of_ours_than_it_needs(words: str) -> None:
    code = (
        "import sys; from vramprobe.cli.verbs import main\n"
        f"sys.argv[1:] = {words.split()}\n"
        "try: main()\n"
        "except SystemExit: print(*(one for one in sys.modules if one.startswith('vramprobe.')), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {one.removeprefix("vramprobe.") for one in done.stderr.split()}
    assert len(loaded) <= MOST_MODULES[words]
    assert "help" in words or not loaded & {*NOT_OF_ANSWERS}


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/task is Linux's")
def test_an_answer_starts_no_threads_and_leaves_the_environment_to_what_is_run_from_it() -> None:
    """NumPy's BLAS starts a thread per core as it loads; a command that is profiled or recorded has its own."""
    code = (
        "import os, sys; from vramprobe.cli.verbs import main\n"
        "sys.argv[1:] = 'predict --model smollm2-135m --method lora --batch-size 2 --seq-len 1024 --json'.split()\n"
        "try: main()\n"
        "except SystemExit: print('numpy' in sys.modules, 'OPENBLAS_NUM_THREADS' in os.environ, "
        "len(os.listdir('/proc/self/task')), file=sys.stderr)"
    )
    env = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert done.stderr == "True False 1\n"
