"""The names that people type for a model: tuned and dated variants, mirrors, quantized copies, adapters.

In: a name, and the names that are known. Out: the known one that has the same shape, or the nearest ones. Standard
library only, and no import of vramprobe: the processes of a profiled command load this file by its path
(profile/empty/hub.py).
"""

import difflib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

#: Words that tell a tuned model, or a copy in another float dtype, from its base.
_VARIANT = re.compile(r"-(instruct|it|chat|base|hf|pt|thinking|think|reasoning|sft|dpo|bf16|fp16|fp32)(?=-|$)")
_DATE = re.compile(r"-(20\d{6}|\d{4})(?=-|$)")
_FAMILY = re.compile(r"^([a-z]+)-(?=\d)")  # llama-3 and llama3
_ADAPTER = re.compile(r"-(\w?[ld]ora|peft|adapters?)(?=-|$)")
#: What the name of a repository says of its quantization, as Qwen, RedHatAI, Unsloth and mlx-community have it: end of
#: the name → quantization_config; null where the name does not tell its layout.
QUANTIZED: dict[str, dict[str, Any] | None] = json.loads(
    (Path(__file__).parents[1] / "data" / "quantized_names.json").read_text(encoding="utf-8")
)


class Match(NamedTuple):
    """The known name of the same shape. ``quantized``: the end of the given name that says so, or empty."""

    known: str
    quantized: str = ""


def match_name(name: str, known: Iterable[str]) -> Match | None:
    """The first of ``known`` (lower-case ids and slugs) with the shape of ``name``; None where no name says so.

    By its own name, that of a mirror, of a tuned variant, of another release of the same month-less name; then all
    this of the model that a quantized copy was made of; then as the base of an adapter that is named after it.
    """
    names, given = list(known), name.lower()
    if given in names:
        return Match(given)
    made_of, quantized = split_quantized(given)
    for one, end in dict.fromkeys(((given, ""), (made_of, quantized))):
        for key in (_last, bare_name, _undated):
            for other in names:
                if key(other) == key(one):
                    return Match(other, end)
    word = _ADAPTER.search(_last(made_of))
    bases = [one for one in names if word and f"{bare_name(made_of)}-".startswith(f"{bare_name(one)}-")]
    return Match(max(bases, key=lambda one: len(bare_name(one))), quantized) if bases else None


def split_quantized(name: str) -> tuple[str, str]:
    """(The name of the model that a quantized copy was made of, the end that says how), or (name, "")."""
    for end in QUANTIZED:
        if name.lower().endswith(end):
            return name[: -len(end)].removesuffix("-unsloth"), end
    return name, ""


def nearest_names(name: str, known: Iterable[str], number: int = 4) -> list[str]:
    """The known names that are most like ``name``, compared without owners and words of variants."""
    by_key: dict[str, str] = {}
    for one in known:
        by_key.setdefault(bare_name(one), one)
    near = difflib.get_close_matches(bare_name(split_quantized(name)[0]), by_key, n=number, cutoff=0.6)
    return [by_key[key] for key in near]


def bare_name(name: str) -> str:
    """A name without its owner and what tells a tuned model from its base: ``llama3.1-8b``."""
    return _FAMILY.sub(r"\1", _VARIANT.sub("", _last(name)).removeprefix("meta-"))


def _undated(name: str) -> str:
    return _DATE.sub("", bare_name(name))


def _last(name: str) -> str:
    """The repository without its owner, in one spelling."""
    return re.sub("[_:]", "-", name.rsplit("/", 1)[-1].lower())
