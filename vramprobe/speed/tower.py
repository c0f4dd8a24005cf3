"""Tower: what a vision tower computes of a cell's images: rows of its linear layers, attention, elementwise bytes.

In: a CellSpec with images, its Architecture. Out: TowerWork, whose rows the products of work.py take. Never sees a
tensor.
"""

from __future__ import annotations

from typing import NamedTuple

from vramprobe.architecture import Architecture
from vramprobe.spec import CellSpec
from vramprobe.speed.elementwise import Moved, block

#: How names of a tower, and of its blocks, begin.
VISUAL, BLOCKS = "visual.", "visual.blocks."


class TowerWork(NamedTuple):
    """Work on a micro-step's images; ``attention_flops`` and ``num_kernels`` of one forward."""

    num_patches: float
    patch_numel: int
    width: int
    merge: int  # patches that become a token
    hands_on: bool  # gradients run through it
    attention_flops: float
    attention_bytes: float
    moved: Moved
    num_kernels: float

    def rows(self, name: str) -> float:
        """Rows of a linear layer: patches in a block, and the tokens they become in a merger."""
        return self.num_patches if name.startswith(BLOCKS) else self.num_patches / self.merge


#: Without images the tower does not run.
NO_IMAGES = TowerWork(0.0, 1, 1, 1, False, 0.0, 0.0, Moved(0.0, 0.0), 0.0)


def tower_of(spec: CellSpec, arch: Architecture, width: int) -> TowerWork:
    """The tower's work, of elements of ``width`` bytes."""
    tower, image = arch.tower, spec.image
    if tower is None or image is None:
        return NO_IMAGES
    num_images = float(spec.num_rows * spec.images * image.num_tiles)
    high, wide = image.height // tower.patch, image.width // tower.patch
    patches = num_images * high * wide
    in_windows, windows = _squares(high, tower.window) * _squares(wide, tower.window), 1
    if tower.window is not None:
        windows = -(-high // tower.window) * -(-wide // tower.window)
    whole = len(tower.whole_blocks) if tower.is_windowed else tower.depth
    pairs = num_images * (whole * (high * wide) ** 2 + (tower.depth - whole) * in_windows)
    attentions = num_images * (whole + (tower.depth - whole) * windows)
    moved, kernels = block(tower.width, _mlp_width(arch), tower.is_windowed, patches * width / 2)
    return TowerWork(
        num_patches=patches,
        patch_numel=tower.patch_numel,
        width=tower.width,
        merge=tower.merge,
        hands_on=not spec.freeze_vision or (spec.gradient_checkpointing and tower.is_windowed),
        attention_flops=4.0 * tower.width * pairs,
        attention_bytes=4.0 * width * tower.width * patches * tower.depth,
        moved=Moved(tower.depth * moved.forward, tower.depth * moved.backward),
        num_kernels=tower.depth * kernels + attentions,
    )


def _squares(length: int, window: int | None) -> int:
    """The sum of the squares of what windows cut a side into."""
    side = window or length
    return (length // side) * side**2 + (length % side) ** 2


def _mlp_width(arch: Architecture) -> int:
    return next(linear.num_out for linear in arch.linears if linear.name.startswith(f"{BLOCKS}0.mlp."))
