"""Print changes: a line for each, in the options that make it, within the terminal's width.

In: frozen Changes. Out: text on the terminal (rich), plain lines where there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from vramprobe.units import format_bytes

if TYPE_CHECKING:
    from vramprobe.predict.changes import Change

_MOST_LINES = 10
_STYLES = {"fits": "green", "tight": "yellow", "does not fit": "red", None: ""}


def print_changes(changes: Sequence[Change], *, is_near: bool = False) -> None:
    """Those that save most, with what is needed then; whether none is enough, and whether all of it is near."""
    console = Console(highlight=False)
    if not changes:
        console.print("no other option that was tried saves more")
        return
    judged = changes[0].verdict is not None
    enough = "" if not judged or any(one.verdict == "fits" for one in changes) else "; none is enough"
    near = " (near; a prediction of it records it)" if is_near else ""
    console.print(f"what other options would save, each line by itself{near}{enough}:")
    for one in changes[:_MOST_LINES]:
        _print_change(console, one)
    if (more := len(changes) - _MOST_LINES) > 0:
        console.print(f"  … and {more} that save less; --json tells all")


def _print_change(console: Console, one: Change) -> None:
    """Verdict and bytes, then the options: beside them, below where they are too long."""
    verdict = f"{one.verdict:<14}" if one.verdict is not None else ""
    head = f"  {verdict}{format_bytes(one.to_bytes):>11}  {format_bytes(one.saved_bytes):>11} less  "
    lines, room = [""], console.width - len(head)
    said = list(map(option_words, one.options, one.options.values()))
    if one.tight_bytes is not None:
        said.append(f"({format_bytes(one.tight_bytes)} allocated)")
    for words in said:
        if lines[-1] and len(lines[-1]) + 1 + len(words) > room:
            lines.append("")
        lines[-1] += f" {words}" if lines[-1] else words
    if max(map(len, lines)) > room:
        lines = ["", *(f"    {words}" for words in said)]
        console.print(head.rstrip(), style=_STYLES[one.verdict])
        for line in lines[1:]:
            console.print(line, soft_wrap=True)
        return
    for number, line in enumerate(lines):
        console.print((head if number == 0 else " " * len(head)) + line, style=_STYLES[one.verdict], soft_wrap=True)


def option_words(name: str, value: Any) -> str:
    """An option as it is typed."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag} {value}"
