"""The lines nobody crosses: torch stays behind its own, imports point one way."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import vramprobe

ROOT = Path(vramprobe.__file__).parent
MODULES = {
    "vramprobe"
    + "".join(f".{part}" for part in path.relative_to(ROOT).with_suffix("").parts).replace(".__init__", ""): path
    for path in sorted(ROOT.rglob("*.py"))
}
HEAVY = ("torch", "transformers", "peft", "bitsandbytes", "accelerate")
TORCH_SIDE = (
    "vramprobe.workload",
    "vramprobe.emulate.values",
    "vramprobe.profile.hook",
    "vramprobe.profile.empty",
    "vramprobe.measure.cpu",
    "vramprobe.measure.cuda",
    "vramprobe.measure.cards",
    "vramprobe.measure.log_source",
    "vramprobe.measure.worker",
    "vramprobe.measure.run_cell",
    "vramprobe.measure.ranks",
    "vramprobe.measure.emulation",
    "vramprobe.measure.environment",
    "vramprobe.measure.selftest",
)


def imports(path: Path, *, also_lazy: bool, also_typing: bool = False) -> set[str]:
    """Absolute names that a module imports at its top level, or anywhere; names under TYPE_CHECKING do not run."""
    tree = ast.parse(path.read_text())
    bodies = list(ast.walk(tree)) if also_lazy else tree.body
    typing_only = {
        node
        for branch in tree.body
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.dump(branch.test)
        for node in ast.walk(branch)
    }
    found: set[str] = set()
    for node in bodies:
        if node in typing_only and not also_typing:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def graph() -> dict[str, set[str]]:
    return {
        name: {
            used
            for used in imports(path, also_lazy=True, also_typing=True)
            if used in MODULES and used != name and used != "vramprobe"
        }
        for name, path in MODULES.items()
    }


#: The rooms from the ground up, each above all that it may import. Modules at the top are rooms of their own.
FLOORS = (
    "errors", "units", "optimizers", "trainers", "choices", "options", "allocator", "architecture", "catalog",
    "rules", "spec", "resolve", "bounds", "records", "log", "workload", "emulate", "measure", "recipe",
    "model", "techniques", "predict", "lengths", "speed", "recommend", "check", "sweep", "literature", "report",
    "profile", "explain", "interop", "api", "cli", "__main__",
)  # fmt: skip


def room(name: str) -> str:
    """The room of a module: its first folder, or itself at the top."""
    return name.removeprefix("vramprobe.").split(".")[0]


def test_every_room_has_its_floor_and_few_modules_lie_at_the_top() -> None:
    assert {room(name) for name in MODULES if name != "vramprobe"} == set(FLOORS)
    assert len(list(ROOT.glob("*.py"))) <= 11


def test_imports_point_one_way() -> None:
    """No arrow runs back up from one room to another, and none in a circle inside a room; lazy imports counted too."""
    edges = graph()
    for name, used in edges.items():
        for other in used if name != "vramprobe" else ():
            assert FLOORS.index(room(other)) <= FLOORS.index(room(name)), f"{name} imports {other}, which lies above it"
    for name in edges:
        for circle in circles(name, edges):
            raise AssertionError(f"a circle: {' → '.join(circle)}")


def circles(name: str, edges: dict[str, set[str]]) -> list[list[str]]:
    """The ways that lead from ``name`` back to it; a package and its own parts count as one way only."""
    found, todo, seen = [], [[name]], {name}
    while todo:
        path = todo.pop()
        for used in sorted(edges[path[-1]]):
            if used.startswith(f"{path[-1]}.") or path[-1].startswith(f"{used}."):
                continue
            if used == name:
                found.append([*path, used])
            elif used not in seen:
                seen.add(used)
                todo.append([*path, used])
    return found


def test_only_the_torch_side_names_torch() -> None:
    for name, path in MODULES.items():
        if not name.startswith((*TORCH_SIDE, "vramprobe.measure.forkserver")):
            assert not {module.split(".")[0] for module in imports(path, also_lazy=True)} & set(HEAVY), name


#: Of the command line's modules those that print; the others are of the hook, which speaks in the processes of others.
PRINTING = {
    "vramprobe.emulate.values.hook", "vramprobe.profile.hook.journal", "vramprobe.profile.empty.replacements",
    *(f"vramprobe.cli.{name}" for name in (
        "verbs", "explain", "options", "predict", "predict_cell", "results", "techniques", "contribute", "launch",
        "campaigns", "calibrate_gpu", "diff", "display", "lengths", "live", "emulate", "profile", "recipes",
        "recommend", "grpo", "serve",
    )),
}  # fmt: skip


def test_only_the_command_line_prints_and_exits() -> None:
    for name, path in MODULES.items():
        nodes = ast.walk(ast.parse(path.read_text()))
        calls = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
        assert name in PRINTING or "print" not in calls, name


RESULTS = str(ROOT.parent / "results" / "cpu" / "quickstart")
TABLES = ("claims", "calibrate")
LIGHT = (
    "import sys; from vramprobe.cli.verbs import main; sys.argv[1:] = {words!r}\ntry: main()\n"
    "except SystemExit: pass\n"
    "print([name for name in {heavy!r} if name in sys.modules], file=sys.stderr)"
)


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["measure", "--help"],
        ["models"],
        ["gpus"],
        ["plan", "configs/sweeps/quickstart.yaml", "--device", "cpu"],
        ["check", RESULTS],
        ["predict", "--model", "smollm2-135m", "--method", "lora", "--batch-size", "1", "--seq-len", "4096"],
        ["recommend", "--model", "smollm2-135m", "--method", "lora", "--seq-len", "64", "--tokens", "1M"],
        ["claims", "--id", "L1-12", "--id", "O5-15"],
        ["calibrate", RESULTS],
    ],
    ids=lambda words: words[0],
)
def test_the_light_commands_load_nothing_heavy(words: list[str]) -> None:
    """Those that show tables load pandas."""
    heavy = (*HEAVY, "matplotlib", "scipy", "huggingface_hub", *([] if words[0] in TABLES else ["pandas"]))
    code = LIGHT.format(words=words, heavy=heavy)
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr == "[]\n"
