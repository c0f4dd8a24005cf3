"""Train the merges of the tokenizer that --empty-weights puts in the place of a missing one, on English prose at hand.

In: README.md, docs/*.md, and the docstrings of the libraries that are installed. Out:
vramprobe/profile/empty/merges.txt, two symbols a line, most frequent first. Needs tokenizers; takes a minute. English
text comes to three to four characters a token with it, whatever the releases of those libraries.
"""

import ast
import json
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

HOME = Path(__file__).parents[1]
OUT = HOME / "vramprobe" / "profile" / "empty" / "merges.txt"
NUM_MERGES = 8000
LIBRARIES = ("pandas", "trl", "peft", "accelerate", "datasets", "numpy")


def texts() -> Iterator[str]:
    """The docs' prose, then docstrings."""
    for path in [HOME / "README.md", *sorted((HOME / "docs").glob("*.md"))]:
        yield prose_of(path.read_text(encoding="utf-8"))
    folder = Path(sysconfig.get_paths()["purelib"])
    for library in LIBRARIES:
        for path in sorted((folder / library).rglob("*.py")):
            try:
                with warnings.catch_warnings(action="ignore"):
                    tree = ast.parse(path.read_text(encoding="utf-8"))
            except SyntaxError:  # of a newer Python
                continue
            for node in ast.walk(tree):
                if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (doc := ast.get_docstring(node)):
                    yield " ".join(doc.split(">>>")[0].split())


def prose_of(page: str) -> str:
    """A page without its code blocks and tables, in one line."""
    lines = [line for part in page.split("```")[::2] for line in part.splitlines() if not line.startswith("|")]
    return " ".join(" ".join(lines).split())


def main() -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=256 + NUM_MERGES, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts(), trainer)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    lines = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    OUT.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
