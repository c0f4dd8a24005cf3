"""Find the line of Python from which an operator comes: the innermost frame outside torch; in backward, its forward's.

In: nothing but the stack and autograd's state. Out: (file, line, function), or None. Autograd numbers its nodes in the
order in which forward makes them: an operator of the backward is the line's that made its node.
"""

import os
import sys

import torch

from ..reads import OWN_FOLDERS

_node = getattr(torch._C, "_current_autograd_node", None)
_number = getattr(torch._C._autograd, "_get_sequence_nr", None) if hasattr(torch._C, "_autograd") else None


class Lines:
    """The lines of one step. ``here(in_backward)`` of the operator that runs now."""

    def __init__(self):
        folders = [os.path.dirname(torch.__file__)]
        for name in ("triton", "torch._inductor"):
            module = sys.modules.get(name)
            folders += [os.path.dirname(module.__file__)] if getattr(module, "__file__", None) else []
        self._behind = tuple(folder + os.sep for folder in folders) + tuple(OWN_FOLDERS) + ("<",)
        self._is_behind, self._made_by = {}, {}

    def here(self, in_backward):
        """The line, of forward where autograd runs the operator; None where neither is known."""
        frame = self._frame()
        if in_backward and _node is not None:
            node = _node()
            if node is not None:
                return self._made_by.get(node._sequence_nr(), frame)
        if _number is not None and frame is not None:
            self._made_by[_number() - 1] = frame  # the node of what runs now is made before it runs
        return frame

    def _frame(self):
        frame = sys._getframe(2)
        while frame is not None:
            file = frame.f_code.co_filename
            behind = self._is_behind.get(file)
            if behind is None:
                behind = self._is_behind[file] = file.startswith(self._behind) or "torchinductor_" in file
            if not behind:
                return file, frame.f_lineno, frame.f_code.co_name
            frame = frame.f_back
        return None
