"""Translate: the Python source of the arithmetic (terms/) -> JavaScript that counts the same bytes in a browser.

In: modules of vramprobe. Out: JavaScript text, to be run beside runtime.js. The page has no second account of any term:
what `predict` counts and what the page counts are one source. The tape's values die when their last reference goes, so
the translation counts references as CPython does: a local holds what is assigned to it until it is assigned anew,
deleted, or its function returns; an argument is the callee's; a result belongs to nobody until somebody takes it.
Only what the arithmetic uses of Python is known here; anything else raises TranslationError, which a test would show.
Reads source and imports none of it, so it stays this side of the torch line.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

from vramprobe.report.page.translation.modules import Module, ModuleTranslation
from vramprobe.report.page.translation.names import Signatures, TranslationError

__all__ = ["Module", "TranslationError", "translate"]


def translate(modules: Sequence[Module], given: Mapping[str, str]) -> str:
    """JavaScript of all the modules, each an object of its top-level names; ``given`` maps imports that JavaScript has
    of its own (dotted Python name → JavaScript expression). Modules come after those they import.

    Raises TranslationError for Python that has no rule.
    """
    trees = {module.name: ast.parse(module.source) for module in modules}
    signatures = Signatures(trees)
    return "\n".join(ModuleTranslation(module, trees[module.name], signatures, given).text() for module in modules)
