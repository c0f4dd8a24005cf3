"""What the API's pages read of a docstring: Sphinx's roles (``:func:`name```) are code, as the builder knows none."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`~?([^`]+)`")


class RolesAsCode(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(r"``\1``", obj.docstring.value)
