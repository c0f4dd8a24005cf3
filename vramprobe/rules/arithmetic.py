"""Arithmetic: which cells have their step counted by it; those of any other are recorded on an emulated GPU.

In: a cell. Out: its Architecture, or an UnsupportedArchitecture that names what is recorded. Parameters of more
families are counted (architecture/) than steps. No torch here.
"""

from __future__ import annotations

from vramprobe.architecture import VISION_LANGUAGE, Architecture, UnsupportedArchitecture, architecture
from vramprobe.rules import Cell

#: Model types whose parameters are counted, and whose steps are recorded.
RECORDED = (*VISION_LANGUAGE, "bloom", "deepseek_v2", "falcon", "gpt_oss", "llama4_text")


def counted_architecture(spec: Cell) -> Architecture:
    """Return the Architecture of a cell whose step is counted. Raises UnsupportedArchitecture for one that is
    recorded.
    """
    found = architecture(spec.architecture)
    given = [
        (spec.model_type in RECORDED, f"model type {spec.model_type}"),
        (spec.trainer != "sft", f"trainer {spec.trainer}"),
    ]
    if names := " with ".join(name for is_given, name in given if is_given):
        raise UnsupportedArchitecture(
            f"a step of {names} is not counted by the formula engine; vramprobe predict --engine recipe records it, or "
            "measure the cell"
        )
    return found
