"""Print others' words on the terminal, folded to its width below themselves.

In: texts of commands, libraries and files. Out: lines in which nothing moves the cursor.
"""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape


def print_place(console: Console, amount: str, text: str) -> None:
    """An amount and what it is, folded below itself."""
    print_folded(console, f"  {amount:>11}  ", text, 15, 15)


def print_folded(console: Console, head: str, text: str, taken: int, indent: int) -> None:
    """``head`` (``taken`` places wide, with markup), then others' words, the rest of them indented."""
    text, width = on_one_line(text), max(console.width, indent + 20)
    first = True
    while text or first:
        room = width - (taken if first else indent)
        cut = len(text) if len(text) <= room else max(text.rfind(" ", 0, room + 1), text.rfind("/", 0, room) + 1)
        cut = cut if cut > 0 else room
        part, text = text[:cut], text[cut:].lstrip(" ")
        console.print((head if first else " " * indent) + escape(part), soft_wrap=True)
        first = False


def print_lines(console: Console, lines: Sequence[str]) -> None:
    """Print a line each, indented."""
    for line in lines:
        print_folded(console, "  ", line, 2, 4)


def on_one_line(text: str) -> str:
    """Others' text on one line: what moves the cursor or starts a line of its own is shown by its code."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
