"""A Recipe as the bytes of a file, and back.

In: a Recipe, or a file's bytes. Out: the other; StoreError for bytes that are no recipe of this format.
"""

import io
import json
import lzma
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from fractions import Fraction

import numpy as np

from vramprobe.errors import StoreError
from vramprobe.log.depth import Growth
from vramprobe.log.log import PhaseMark
from vramprobe.log.pairing import Kinds
from vramprobe.log.shapes import ShapeRules
from vramprobe.recipe.recipe import Origin, Recipe

FORMAT = 4


def pack(recipe: Recipe) -> bytes:
    """Return the recipe's bytes for a file."""
    kinds = recipe.growths[0].kinds
    words = {
        "format": FORMAT,
        "marks": [asdict(mark) | {"events": 0} for mark in recipe.marks],
        "blocks": [growth.blocks for growth in recipe.growths],
        "lengths": [len(growth.codes) for growth in recipe.growths],
        "rules": _packed(recipe.rules),
        "launch_rules": _packed(recipe.launch_rules),
        **{
            name: getattr(recipe, name)
            for name in ("times", "depths", "checked", "facts", "owned_bytes", "stack", "launches")
        },
        **({"origin": asdict(recipe.origin)} if recipe.origin is not None else {}),
    }
    arrays = {
        "sizes": kinds.size_bytes,
        "causes": kinds.causes,
        "streams": kinds.streams,
        "codes": np.concatenate([growth.codes for growth in recipe.growths]).astype(np.int32),
        "ranks": np.concatenate([growth.ranks for growth in recipe.growths if growth.ranks is not None], axis=1).astype(
            np.int32
        ),
    }
    for prefix, rules in (("", recipe.rules), ("launch_", recipe.launch_rules)):
        if rules is not None:
            arrays |= {f"{prefix}rule_of": rules.rule_of, f"{prefix}fallback": rules.fallback}
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, words=np.array(json.dumps(words)), **arrays)
    return lzma.compress(buffer.getvalue())


def unpack(packed: bytes, name: str) -> Recipe:
    """Return the recipe of a file's bytes. Raises StoreError, with the file's ``name``, for what is none."""
    try:
        with np.load(io.BytesIO(lzma.decompress(packed)), allow_pickle=False) as file:
            words = json.loads(str(file["words"]))
            if words.pop("format") != FORMAT:
                raise ValueError("another format")
            kinds = Kinds(file["sizes"], file["causes"], file["streams"])
            stops = np.cumsum(words.pop("lengths"))[:-1]
            codes = np.split(file["codes"].astype(np.int64), stops)
            ranks = np.split(file["ranks"].astype(np.int64), stops, axis=1)
            rules, launch_rules = (
                None
                if (rules := words.pop(f"{prefix}rules", None)) is None
                else ShapeRules(file[f"{prefix}rule_of"], _exact(rules), file[f"{prefix}fallback"])
                for prefix in ("", "launch_")
            )
        blocks = [tuple((at, size) for at, size in one) for one in words.pop("blocks")]
        marks = tuple(PhaseMark(**mark | {"events": range(0)}) for mark in words.pop("marks"))
        if (origin := words.get("origin")) is not None:
            words["origin"] = Origin(**origin | {"shapes": tuple(map(tuple, origin["shapes"]))})
        growths = tuple(Growth(kinds, *parts) for parts in zip(codes, blocks, ranks, strict=True))
        both = {"rules": rules, "launch_rules": launch_rules}
        return Recipe(marks=marks, growths=growths, **both, **words | {"depths": tuple(words["depths"])})
    except (lzma.LZMAError, EOFError, OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{name} is no recipe of this vramprobe ({type(error).__name__}); delete it") from error


def _packed(rules: ShapeRules | None) -> list[dict[str, str]] | None:
    """The rules' coefficients as text."""
    return None if rules is None else [{name: str(one) for name, one in rule.items()} for rule in rules.coefficients]


def _exact(rules: Sequence[Mapping[str, str]]) -> tuple[Mapping[str, Fraction | int], ...]:
    return tuple({name: Fraction(one) if "/" in one else int(one) for name, one in rule.items()} for rule in rules)
