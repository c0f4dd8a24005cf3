"""Each docstring of the package begins with a verb, or a noun and its unit: "Return …", "Bytes of …"."""

import ast
import re
from pathlib import Path

from vramprobe.emulate.build import _SOURCES

PACKAGE = Path(__file__).parent.parent / "vramprobe"
GOING = {"terms", "architecture", "kernels"}  # to be deleted
#: A question in a sentence's place, or a reference to the docstring before: neither says what is returned.
NOT_FIRST = re.compile(r"(What|Whether|Of|How|Where|Why|Which|Who|Whose|When|The same)\b")


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if path.relative_to(PACKAGE).parts[0] not in GOING]
    # Each change of these makes another emulator, which builds and records anew.
    paths = [path for path in paths if path.parent.name != "emulate" or path.name not in _SOURCES]
    assert len(paths) > 400
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    offenders = []
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.get_docstring(node) if isinstance(node, kinds) else None
            if text and NOT_FIRST.match(text):
                offenders.append(f"{path.relative_to(PACKAGE)}:{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}")
    assert not offenders, "\n".join(["begin with a verb, or a noun and its unit:", *offenders])
