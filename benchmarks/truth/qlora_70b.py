"""QLoRA of a 70B, recipe by recipe, on emulated cards: ``python benchmarks/truth/qlora_70b.py``.

Guides give one figure for it: 19.5, 24, 41, 46 or 52 GB. Each command of qlora_70b/recipes.toml runs unmodified under
``vramprobe profile --empty-weights`` and says what it takes; what the journal (qlora_70b.jsonl) has is not run again.
A recipe with ``layers`` runs with so few and so few layers, and each phase's figure is the line through both at 80:
several ranks of 80 take long on two cores. ``--only WORDS`` runs those whose names have them; ``--table`` runs none;
``--check`` says whether qlora_70b.md is what the journal says.
"""

import argparse
import hashlib
import json
import shlex
import shutil
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vramprobe.catalog import cut_depth, find_model
from vramprobe.emulate.environment import find_environment
from vramprobe.units import GIB

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import journal
from benchmarks.frameworks import frameworks
from benchmarks.tables import as_markdown, filled, write_or_check
from benchmarks.versions.attempt import profiled

HERE = Path(__file__).resolve().parent
FILES, JOURNAL, PAGE = HERE / "qlora_70b", HERE / "qlora_70b.jsonl", HERE / "qlora_70b.md"
GB = 10**9
_MOST_SEQ_LEN = 2048


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One entry of recipes.toml. ``layers``: the depths that it is run with, none for the whole model."""

    name: str
    model: str
    cards: str
    command: str
    environment: str = ""
    layers: tuple[int, ...] = ()

    def config(self, num_layers: int | None) -> dict[str, Any]:
        config = find_model(self.model).config
        return config if num_layers is None else cut_depth(config, num_layers)

    def fingerprint(self, num_layers: int | None) -> str:
        """Return a short hash of all that decides what is run, but for the libraries."""
        scripts = [path.read_text() for path in sorted(FILES.iterdir()) if path.name in self.command]
        told = json.dumps([self.config(num_layers), self.cards, self.command, self.environment, scripts])
        return hashlib.sha256(told.encode()).hexdigest()[:12]


def recipes() -> list[Recipe]:
    found = tomllib.loads((FILES / "recipes.toml").read_text())["recipe"]
    return [Recipe(**entry | {"layers": tuple(entry.get("layers", ()))}) for entry in found]


def run(recipe: Recipe, num_layers: int | None, *, environments: Path, uv: str, limit_seconds: float) -> dict[str, Any]:
    """The journal's entry of one attempt."""
    python = (
        frameworks.environment_of(recipe.environment, environments, uv) if recipe.environment else find_environment()
    )
    started = time.time()
    with tempfile.TemporaryDirectory(prefix="vramprobe-70b-") as home:
        work = Path(home)
        for path in (*FILES.iterdir(), HERE.parent / "versions" / "train.py"):
            shutil.copy(path, work)
        model = work / recipe.model
        model.mkdir()
        (model / "config.json").write_text(json.dumps(recipe.config(num_layers)))
        words = shlex.split(recipe.command.format(model=recipe.model))
        told = profiled(
            [str(python.parent / words[0]), *words[1:]],
            work,
            recipe.cards,
            python=python,
            limit_seconds=limit_seconds,
            seq_len=_MOST_SEQ_LEN,
        )
    return {
        "run": recipe.name,
        "num_layers": num_layers,
        "fingerprint": recipe.fingerprint(num_layers),
        "seconds": round(time.time() - started, 1),
        "ended": round(time.time()),
        **told,
    }


def latest(entries: list[journal.Entry]) -> dict[str, journal.Entry]:
    """The entry that counts of each recipe and depth, by its fingerprint."""
    return journal.latest(entries, "fingerprint")


def phases_of(recipe: Recipe, entries: list[journal.Entry]) -> dict[str, int] | None:
    """Phase → its highest allocated bytes, of the whole model: where it was cut, on the line through two depths."""
    known = latest(entries)
    found = [known.get(recipe.fingerprint(num_layers)) for num_layers in recipe.layers or (None,)]
    if any(entry is None or entry["outcome"] != "ok" for entry in found):
        return None
    phases = [entry["phases"] for entry in found if entry]
    if not recipe.layers:
        return phases[0]
    (few, more), depth = recipe.layers, find_model(recipe.model).config["num_hidden_layers"]
    return {
        name: size + (phases[1][name] - size) * (depth - few) // (more - few)
        for name, size in phases[0].items()
        if name in phases[1]
    }


def page(entries: list[journal.Entry]) -> str:
    """The table, and the commands."""
    done = [(recipe, phases) for recipe in recipes() if (phases := phases_of(recipe, entries)) is not None]
    lines, commands = [], []
    for recipe, phases in done:
        steps = max(size for name, size in phases.items() if name != "load")
        cut = f" (lines through {' and '.join(map(str, recipe.layers))} layers)" if recipe.layers else ""
        reserved = "" if recipe.layers else f"{latest(entries)[recipe.fingerprint(None)]['reserved_bytes'] / GB:.1f}"
        lines.append([recipe.name + cut, recipe.cards, f"{steps / GB:.1f}", reserved, f"{phases['load'] / GB:.1f}"])
        where = f" (environment `frameworks/runs/{recipe.environment}.txt`)" if recipe.environment else ""
        command = recipe.command.format(model=recipe.model)
        commands.append(
            f"- {recipe.name}{where}: `vramprobe profile --emulate '{recipe.cards}' --empty-weights "
            f"--seq-len {_MOST_SEQ_LEN} -- {command}`"
        )
    head = ["recipe", "card", "steps, GB allocated", "reserved, GB", "loading, GB allocated"]
    return filled(PAGE, table=as_markdown(head, "llrrr", lines), commands=commands)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="WORDS", action="append", help="run those whose names have these words")
    parser.add_argument("--again", action="store_true", help="run what the journal has, too")
    parser.add_argument("--environments", metavar="FOLDER", type=Path, default=frameworks.cache_folder() / "frameworks")
    parser.add_argument("--uv", default="uv", help="uv's command, for environments that are not there yet")
    parser.add_argument("--limit", type=float, default=1200, metavar="SECONDS", help="for one run")
    parser.add_argument("--table", action="store_true", help="only write the page")
    parser.add_argument("--check", action="store_true", help="say whether the page is what the journal says")
    given = parser.parse_args()
    entries = journal.read(JOURNAL, "run")
    for recipe in [] if given.table or given.check else recipes():
        if given.only and not any(words in recipe.name for words in given.only):
            continue
        for num_layers in recipe.layers or (None,):
            known = latest(entries).get(recipe.fingerprint(num_layers))
            if known is None or given.again or known["outcome"] != "ok":
                how = {"environments": given.environments, "uv": given.uv, "limit_seconds": given.limit}
                entry = run(recipe, num_layers, **how)
                journal.append(JOURNAL, entry)
                entries.append(entry)
                size = f"{entry['peak_bytes'] / GIB:.2f} GiB" if entry["outcome"] == "ok" else entry["outcome"]
                print(f"{recipe.name}: {size}  {entry['seconds']:.0f} s", file=sys.stderr, flush=True)
    write_or_check({PAGE: page(entries)}, "truth/qlora_70b.py --table", check=given.check)


if __name__ == "__main__":
    main()
