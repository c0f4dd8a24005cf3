"""Names and docstrings of the package: a class has its name to itself, a docstring begins with a verb or a noun."""

import ast
import re
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "vramprobe"
GOING = {"terms", "architecture", "kernels"}  # to be deleted
#: A question in a sentence's place, or a reference to the docstring before: neither says what is returned.
NOT_FIRST = re.compile(r"(What|Whether|Of|How|Where|Why|Which|Who|Whose|When|The same)\b")


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
    offenders = []
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.get_docstring(node) if isinstance(node, kinds) else None
            if text and NOT_FIRST.match(text):
                offenders.append(f"{path.relative_to(PACKAGE)}:{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}")
    assert not offenders, "\n".join(["begin with a verb, or a noun and its unit:", *offenders])
