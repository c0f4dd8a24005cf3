"""Names and docstrings: a class of the package has its name to itself, a docstring begins with a verb or a noun."""

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "vramprobe"
GOING = {"architecture"}  # to be deleted
#: A question in a sentence's place, or a reference to the docstring before: neither says what is returned.
NOT_FIRST = re.compile(r"(What|Whether|Of|How|Where|Why|Which|Who|Whose|When|The same)\b")
#: Modules whose own docstring stays: the first one's text is hashed for its journal, --help prints the others'.
KEPT = {"benchmarks/versions/train.py", "benchmarks/techniques/techniques.py", "benchmarks/truth/late_2026.py"}


def modules() -> list[Path]:
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if path.relative_to(PACKAGE).parts[0] not in GOING]
    assert len(paths) > 400
    return paths


def test_a_class_has_its_name_to_itself() -> None:
    homes = defaultdict(list)
    for path in modules():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(str(path.relative_to(PACKAGE)))
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    beside = [path for name in ("tests", "benchmarks", "tools") for path in sorted((ROOT / name).rglob("*.py"))]
    assert len(beside) > 350
    offenders, kept = [], set()
    for path in [*modules(), *beside]:
        name = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.get_docstring(node) if isinstance(node, kinds) else None
            if not text or not NOT_FIRST.match(text):
                continue
            if isinstance(node, ast.Module) and name in KEPT:
                kept.add(name)
            else:
                offenders.append(f"{name}:{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}")
    assert not offenders, "\n".join(["begin with a verb, or a noun and its unit:", *offenders])
    assert kept == KEPT
