"""Docstrings as the API pages' builder takes them: Markdown, where a role of Sphinx is text and <x> is HTML."""

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`~?([^`]+)`")
_CODE_OR_ANGLE = re.compile(r"(?P<code>(`+).+?\2)|<", re.DOTALL)


class AsMarkdown(griffe.Extension):
    """``:func:`name``` becomes code, and < outside of code is escaped."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = _ROLE.sub(r"``\1``", obj.docstring.value)
            obj.docstring.value = _CODE_OR_ANGLE.sub(lambda match: match["code"] or "&lt;", text)
