"""A composite GitHub action, run here: its steps in order, each by ``bash`` as the runner starts it, in an environment
that has nothing but what the runner sets. Of the actions that it uses, those of the cache are played by folders.

In: action.yml, inputs, contexts. Out: how it ended, its summary, its outputs, the caches. Expressions may have names,
strings, ``==``, ``!=``, ``&&``, ``||``.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
_EXPRESSION = re.compile(r"\$\{\{(.*?)\}\}")
_TOKEN = re.compile(r"\s*('[^']*'|==|!=|&&|\|\||[\w.-]+)")


@dataclass
class Ran:
    status: int = 0
    out: str = ""
    steps: list[str] = field(default_factory=list)  # names of those that ran
    outputs: dict[str, str] = field(default_factory=dict)


@dataclass
class Job:
    """A machine of its own for each job: its home and its temporary folder; ``caches`` outlive it."""

    folder: Path
    caches: Path
    workspace: Path
    github: Mapping[str, str]
    more: Mapping[str, str] = field(default_factory=dict)  # environment that the job's other steps have set
    action: Path = ROOT

    def __post_init__(self) -> None:
        self.home, self.temporary = self.folder / "home", self.folder / "temp"
        for each in (self.home, self.temporary, self.caches):
            each.mkdir(parents=True, exist_ok=True)
        self.summary = self.temporary / "summary.md"

    def use(self, **inputs: str) -> Ran:
        """One use of the action: ``with`` these inputs, by their names with ``_`` for ``-``."""
        definition = yaml.safe_load((self.action / "action.yml").read_text())
        given = {name.replace("_", "-"): value for name, value in inputs.items()}
        assert set(given) <= set(definition["inputs"])
        known = {
            **{f"github.{name}": value for name, value in self.github.items()},
            **{f"inputs.{name}": given.get(name, one.get("default")) for name, one in definition["inputs"].items()},
            "runner.temp": str(self.temporary),
            "runner.os": "Linux",
            "runner.arch": "X64",
        }
        ran, saved_later = Ran(), []
        for step in definition["runs"]["steps"]:
            if not _is_true(evaluate(step.get("if", "'x'"), known)):
                continue
            ran.steps.append(step["name"])
            filled = {name: fill(value, known) for name, value in step.get("with", {}).items()}
            outputs = self._run(step, known, ran) if "run" in step else self._uses(step["uses"], filled, saved_later)
            known |= {f"steps.{step.get('id')}.outputs.{name}": value for name, value in outputs.items()}
            if ran.status:
                break
        if not ran.status:
            for key, path in saved_later:
                self._save(key, path)
        ran.outputs = {name: fill(one["value"], known) for name, one in definition["outputs"].items()}
        return ran

    def _run(self, step: Mapping[str, Any], known: Mapping[str, str], ran: Ran) -> dict[str, str]:
        output, script = self.temporary / "output", self.temporary / "script.sh"
        output.write_text("")
        script.write_text(step["run"])
        environment = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": str(self.home),
            "RUNNER_TEMP": str(self.temporary),
            "GITHUB_ACTION_PATH": f"{self.action}/.",  # as of an action of the same repository
            "GITHUB_OUTPUT": str(output),
            "GITHUB_STEP_SUMMARY": str(self.summary),
            "CI": "true",
            **self.more,
            **{name: fill(value, known) for name, value in step.get("env", {}).items()},
        }
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)],
            env=environment,
            cwd=self.workspace / fill(step.get("working-directory", "."), known),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        ran.status, ran.out = done.returncode, ran.out + done.stdout + done.stderr
        return dict(line.split("=", 1) for line in output.read_text().splitlines())

    def _uses(self, action: str, given: Mapping[str, str], saved_later: list[tuple[str, Path]]) -> dict[str, str]:
        name = action.partition("@")[0]
        if name == "actions/setup-python":
            return {}
        path = Path(given["path"].replace("~", str(self.home)))
        if name == "actions/cache/save":
            self._save(given["key"], path)
            return {}
        found = self._restore(given["key"], given.get("restore-keys", ""), path)
        if name == "actions/cache" and found != given["key"]:
            saved_later.append((given["key"], path))  # after the job, if it succeeded
        return {"cache-hit": str(found == given["key"]).lower() if found else ""}

    def _save(self, key: str, path: Path) -> None:
        assert path.exists(), f"{key}: nothing to save at {path}"
        target = self.caches / key
        if not target.exists():
            shutil.copytree(path, target, symlinks=True)
            os.utime(target)

    def _restore(self, key: str, prefix: str, path: Path) -> str | None:
        there = [each for each in self.caches.iterdir() if each.name == key]
        if not there and prefix:
            there = sorted(
                (each for each in self.caches.iterdir() if each.name.startswith(prefix.strip())),
                key=lambda each: each.stat().st_mtime_ns,
            )
        if there:
            shutil.copytree(there[-1], path, symlinks=True, dirs_exist_ok=True)
        return there[-1].name if there else None


def fill(text: str, known: Mapping[str, str]) -> str:
    """``text`` with each ``${{ … }}`` in it replaced by its value."""
    return _EXPRESSION.sub(lambda match: str(evaluate(match[1], known)), str(text))


def evaluate(expression: str, known: Mapping[str, str]) -> str:
    """The value of an expression; a name that no context has is empty, as on GitHub."""
    tokens = _TOKEN.findall(expression)
    assert "".join(tokens) == "".join(re.split(r"\s+(?=(?:[^']*'[^']*')*[^']*$)", expression)), expression
    either: list[str] = []
    for part in _split(tokens, "||"):
        value = "true"
        for term in _split(part, "&&"):
            values = [one[1:-1] if one[0] == "'" else known.get(one, "") for one in term[::2]]
            value = values[0] if len(values) == 1 else str((values[0] == values[1]) == (term[1] == "==")).lower()
            if not _is_true(value):
                break
        either.append(value)
    return next((value for value in either if _is_true(value)), either[-1])


def _split(tokens: list[str], at: str) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for token in tokens:
        if token == at:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def _is_true(value: str) -> bool:
    return value not in ("", "false")
