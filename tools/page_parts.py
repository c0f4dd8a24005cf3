"""Make what the page holds ready: ``python tools/page_parts.py`` (``--check``: change nothing, fail where it is stale).

Compiles the allocator to WebAssembly (ziglang) and packs the recipes that ship: the cells are those of
configs/book.yaml, and what the page lets people choose are the fields that its cells name.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools import page_book
from vramprobe.catalog.shipped import data_file
from vramprobe.predict.at_hand import notes_of
from vramprobe.recipe.book import recorded_as
from vramprobe.recipe.packed import unpack
from vramprobe.recipe.shipped import BOOK, LIKE_ALL, entry_keys, read_book, shapes_of
from vramprobe.report.page import page_data
from vramprobe.spec import CellSpec
from vramprobe.sweep.definition import load_sweep
from vramprobe.trainers import TRAINERS

ROOT = Path(__file__).resolve().parents[1]
PLAIN = ROOT / "vramprobe" / "allocator" / "plain"
SWEEP = ROOT / "configs" / "book.yaml"
#: Fields of the sweep that are numbers on the page, or of cells that it does not answer for.
_NOT_CHOSEN = {"model", "batch_size", "seq_len", "device", "trainer", "autocast"}
_WORDS = (
    "-std=c11",
    "-O2",
    "-mbulk-memory",
    "-nostdlib",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wl,--no-entry",
    "-Wl,--strip-all",
)


def compiled(to: Path) -> bytes:
    """The allocator as WebAssembly, without a libc."""
    digest = page_book.digest_of(*(PLAIN / name for name in ("blocks.c", "blocks.h", "replay.c")))
    command = [
        sys.executable,
        "-m",
        "ziglang",
        "cc",
        "-target",
        "wasm32-freestanding",
        *_WORDS,
        f'-DSOURCES="{digest}"',
    ]
    subprocess.run([*command, "replay.c", "blocks.c", "-o", str(to)], cwd=PLAIN, check=True)
    return to.read_bytes()


def axes() -> dict[str, list[Any]]:
    """The fields in which the book's cells differ, beside model, batch and length: their values, a flag's both."""
    words = yaml.safe_load(SWEEP.read_text())
    cells = [cell for cell in load_sweep(SWEEP, device="cuda").cells if _is_shown(cell)]
    fields = sorted(set(words["defaults"]).union(*words["cells"]) - _NOT_CHOSEN)
    found = {field: list(dict.fromkeys(getattr(cell, field) for cell in cells)) for field in fields}
    return {field: [True, False] if isinstance(values[0], bool) else values for field, values in found.items()}


def _is_shown(cell: CellSpec) -> bool:
    """Return True for a cell that the page answers for: not a trainer's beside an engine (vramprobe grpo)."""
    return not TRAINERS[cell.trainer].scores_first


def entries() -> Iterator[page_book.PageRecipe]:
    """Return what ships of the sweep's cells and answers for any length; what is of another cell is named."""
    packed, fields = read_book(data_file(BOOK)), list(axes())
    by_key: dict[str, list[str]] = {}
    used: set[str] = set()
    for name in packed:
        by_key.setdefault(name.split()[0], []).append(name)
    for cell in load_sweep(SWEEP, device="cuda").cells:
        for name in (one for key in entry_keys(recorded_as(cell), LIKE_ALL) for one in by_key.get(key, ())):
            used.add(name.split()[0])
            if len(shapes_of(name)) == 1 or cell.learned_positions is not None or not _is_shown(cell):
                continue
            recipe, words = unpack(packed[name], name), {field: getattr(cell, field) for field in fields}
            if recipe.rules is not None and cell.lora_r is not None:
                recipe = replace(recipe, rules=recipe.rules.at_rank(cell.lora_r))
            yield page_book.PageRecipe(
                model=cell.model,
                options=words,
                shapes=tuple(shape[:2] for shape in shapes_of(name)),
                notes=notes_of(recipe, cell),
                recipe=recipe,
            )
    for name in (one for key, names in by_key.items() if key not in used for one in names):
        print(f"not in {SWEEP.name}: {name}", file=sys.stderr)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = {
            page_data.ALLOCATOR: compiled(Path(folder) / "replay.wasm"),
            page_data.BOOK: page_book.packed_book(entries(), axes(), page_book.digest_of(data_file(BOOK))),
        }
    for path, content in made.items():
        if "--check" in sys.argv and path.read_bytes() != content:
            sys.exit(f"{path} is stale: python tools/page_parts.py")
        path.write_bytes(content)
        print(f"{path.relative_to(ROOT)}: {len(content):,} bytes")


if __name__ == "__main__":
    main()
