"""Freeze what inverse questions, changes, recommendations and plans answer: ``python tests/oracles/freeze.py``.

It asks on a machine that has recorded nothing and writes questions.jsonl.xz. ``--check`` writes nothing and names what
is answered otherwise now. The cells' rows are not asked again: their runs are the yardstick. Loads no torch.
"""

import argparse
import os
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.oracles import oracles
from tests.oracles.inverse import answered, asked


def changed_answers(questions: Iterable[oracles.Question]) -> list[str]:
    """Return the questions that are answered otherwise than they were."""
    return [f"{one.ask} {one.words}" for one in questions if answered(one.ask, one.words) != one.answer]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="name what is answered otherwise now")
    words = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1"}
    if words.check:
        found = changed_answers(oracles.questions())
        sys.exit("\n".join(found) if found else 0)
    answers = [{"ask": ask, "words": cell, "answer": answered(ask, cell)} for ask, cell in asked()]
    oracles.write(oracles.QUESTIONS, answers)


if __name__ == "__main__":
    main()
