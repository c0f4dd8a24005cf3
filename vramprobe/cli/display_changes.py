"""Print changes: a line for each, in the options that make it, within the terminal's width.

In: frozen Changes. Out: text on the terminal (rich), plain lines where there is none.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from vramprobe.options import as_typed
from vramprobe.units import format_bytes

if TYPE_CHECKING:
    from vramprobe.predict.changes import Change

_MOST_LINES = 10
#: Shares of a token's time below this cannot be told by the speed model.
_LEAST_SHARE = 0.03
_STYLES = {"fits": "green", "tight": "yellow", "does not fit": "red", None: ""}


def print_changes(changes: Sequence[Change], *, is_near: bool = False, num_left_out: int = 0) -> None:
    """Those that save most, with what is needed then; whether none is enough, whether all of it is near, and how many
    would take a recording."""
    console = Console(highlight=False, emoji=False)
    if changes or not num_left_out:
        _print_most(console, changes, is_near=is_near)
    if num_left_out:
        console.print(f"{num_left_out} other options would each take a recording: --changes makes them")


def _print_most(console: Console, changes: Sequence[Change], *, is_near: bool) -> None:
    if not changes:
        console.print("no other option that was tried saves more")
        return
    judged = changes[0].verdict is not None
    timed = any(one.slower_share is not None for one in changes)
    enough = "" if not judged or any(one.verdict == "fits" for one in changes) else "; none is enough"
    notes = ["%: how much longer a token takes, predicted"] if timed else []
    notes += ["near; a prediction of it records it"] if is_near else []
    said = f" ({'; '.join(notes)})" if notes else ""
    console.print(f"what other options would save, each line by itself{said}{enough}:")
    for one in changes[:_MOST_LINES]:
        _print_change(console, one, timed=timed)
    if (more := len(changes) - _MOST_LINES) > 0:
        console.print(f"  … and {more} that save less; --json tells all")


def _print_change(console: Console, one: Change, *, timed: bool) -> None:
    """Verdict, bytes and time, then the options, TRL's too: beside them, below where they are too long."""
    verdict = f"{one.verdict:<14}" if one.verdict is not None else ""
    head = f"  {verdict}{format_bytes(one.to_bytes):>11}  {format_bytes(one.saved_bytes):>11} less  "
    if timed:
        share = one.slower_share or 0.0
        head += f"{f'{share:+.0%}' if abs(share) >= _LEAST_SHARE else '':>5}  "
    lines, room = [""], console.width - len(head)
    said = [" ".join(as_typed({name: value})) for name, value in one.options.items()]
    if one.tight_bytes is not None:
        said.append(f"({format_bytes(one.tight_bytes)} allocated)")
    if one.trl and one.trl.replace("_", "-") != " ".join(said[: len(one.options)]):  # TRL reads dashes, too
        said.append(f"(TRL {one.trl})")
    for words in said:
        if lines[-1] and len(lines[-1]) + 1 + len(words) > room:
            lines.append("")
        lines[-1] += f" {words}" if lines[-1] else words
    if max(map(len, lines)) > room:
        console.print(head.rstrip(), style=_STYLES[one.verdict])
        for words in said:
            for line in textwrap.wrap(words, max(console.width - 4, 1), break_long_words=False, break_on_hyphens=False):
                console.print(f"    {line}", soft_wrap=True)
        return
    for number, line in enumerate(lines):
        console.print((head if number == 0 else " " * len(head)) + line, style=_STYLES[one.verdict], soft_wrap=True)
