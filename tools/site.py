"""Build the documentation site from docs/ into out/site/html: ``python tools/site.py`` (``make docs``).

The site is docs/ and every page, table, script and picture that its links lead to, so that no link leaves it for a
repository whose address nobody knows here. docs/ is the site's top folder; the rest keeps its place in the repository.
A link to a file that is not there, an anchor that no heading has, and any warning of the builder end the build.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_DOCS = ROOT / "docs"
#: A fenced block, whose text is kept as it is; or the target of a link.
_LINK = re.compile(r"^```.*?^```$|(?<=\]\()(?P<target>[^)\s#:]+)(?=[)#])", re.MULTILINE | re.DOTALL)
#: Characters of a line of a code block that a page of usual width shows.
_COLUMNS = 110
#: A link of a page that is HTML already, as `vramprobe report` writes it, to one that will be.
_LINK_OF_HTML = re.compile(r"(?<=href=\")(?P<target>[^\"\s#:]+\.md)(?=[\"#])")


def site_path(path: Path) -> Path:
    """The place on the site, relative to its top, of a file of the repository."""
    return path.relative_to(_DOCS if path.is_relative_to(_DOCS) else ROOT)


def folded(line: str) -> str:
    """A command of a code block that is too long for a page, before options on further lines, as a shell takes it."""
    if len(line) <= _COLUMNS or not line.startswith(("vramprobe ", "$ vramprobe ")):
        return line
    lines = [""]
    for word in re.split(r" (?=-)", line):
        if lines[-1] and len(f"{lines[-1]} {word} \\") > _COLUMNS:
            lines.append(f"  {word}")
        else:
            lines[-1] = f"{lines[-1]} {word}".lstrip(" " if len(lines) == 1 else "")
    return " \\\n".join(lines)


def relinked(page: Path) -> tuple[str, list[Path]]:
    """The text of ``page`` with its links as the site has them, and the files that they lead to."""
    linked: list[Path] = []

    def on_the_site(match: re.Match[str]) -> str:
        if match["target"] is None:
            return "\n".join(map(folded, match[0].splitlines()))
        path = (page.parent / match["target"]).resolve()
        if not path.is_file():
            sys.exit(f"{page.relative_to(ROOT)} links to {match['target']}: give a file of the repository")
        linked.append(path)
        there = os.path.relpath(site_path(path), site_path(page).parent)
        return there if page.suffix == ".md" else f"{there.removesuffix('.md')}.html"

    return (_LINK if page.suffix == ".md" else _LINK_OF_HTML).sub(on_the_site, page.read_text()), linked


def stage(folder: Path) -> list[Path]:
    """Write docs/ and all that its links lead to under ``folder``; return those files of the repository, sorted."""
    waiting, staged = [path for path in _DOCS.rglob("*") if path.is_file()], set()
    while waiting:
        path = waiting.pop()
        if path in staged:
            continue
        staged.add(path)
        to = folder / site_path(path)
        to.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix in (".md", ".html"):
            text, linked = relinked(path)
            to.write_text(text)
            waiting += linked
        else:
            shutil.copy(path, to)
    return sorted(staged)


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    """Build the site from scratch into ``folder``/html; a warning is an error."""
    shutil.rmtree(folder, ignore_errors=True)
    stage(folder / "docs")
    shutil.copy(ROOT / "mkdocs.yml", folder)
    words = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    there = {"cwd": folder, "env": os.environ | {"PYTHONPATH": str(ROOT)}}  # the API's pages are made from the source
    return subprocess.run(words, **there, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def main() -> None:
    done = build(ROOT / "out" / "site")
    print(done.stdout.strip())
    if done.returncode == 0:
        print("read it, with its search: python -m http.server --directory out/site/html; from disk it has no search")
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
