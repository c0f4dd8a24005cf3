"""Rebuild what each sweep file says it takes and costs: ``python tools/planned.py`` (``make readme``).

A file of configs/sweeps may hold a comment ``# planned: vramprobe plan NAME --gpu GPU``; the comment
lines under it are what that command ends with, one statement a line. ``--check`` changes nothing and fails when one is
stale.
"""

import re
import sys
from pathlib import Path

from vramprobe import api
from vramprobe.cli.display_plan import plan_in_words
from vramprobe.predict.at_hand import shipped_alone

ROOT = Path(__file__).resolve().parents[1]
_COMMENT = re.compile(r"^# planned: (?P<command>vramprobe plan (?P<name>\S+) --gpu (?P<gpu>\S+))\n(?:#   .*\n)*", re.M)


def planned(path: Path) -> str:
    """The file with its comments made anew; planned by the recipes that ship, without a fit and without records."""

    def replace(match: re.Match[str]) -> str:
        assert match["name"] == path.stem, f"{path} speaks of {match['name']}"
        with shipped_alone():
            words = plan_in_words(api.plan(path, gpu=match["gpu"], out=ROOT / "nowhere"))
        lines = "".join(f"#   {statement}\n" for statement in words.split("; "))
        return f"# planned: {match['command']}\n{lines}"

    return _COMMENT.sub(replace, path.read_text())


def main() -> None:
    stale = []
    for path in sorted((ROOT / "configs" / "sweeps").glob("*.yaml")):
        fresh = planned(path)
        if fresh != path.read_text():
            stale.append(path.name)
            if "--check" not in sys.argv:
                path.write_text(fresh)
    if stale and "--check" in sys.argv:
        sys.exit(f"stale: {', '.join(stale)}; rebuild them: make readme")


if __name__ == "__main__":
    main()
