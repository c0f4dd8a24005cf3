"""The page's engine without the page: questions asked in a tab of Chromium. Its fixture is conftest.py's.

In: questions, and the JavaScript that asks one after the other. Out: what the engine says of each.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

#: Runs in the page: each question's answer, or its error.
ASK = """
return questions.map(({options, config, gpu, largest, replays}) => {
  try {
    const {spec, errors} = vramprobe.resolve(options, config);
    if (errors.length) return {errors};
    const card = vramprobe.gpus.find((one) => one.slug === gpu);
    if (largest === "bit by bit") {
      let found = null, steps = 0;
      for (; found === null; steps += 1) found = vramprobe.lookForLargest(spec, config, card);
      return {...found, steps};
    }
    if (largest) return vramprobe.largest(spec, config, card, replays);
    const prediction = vramprobe.predict(spec, config, card, replays);
    return {...prediction, verdict: vramprobe.verdict(prediction, card), command: vramprobe.command(spec)};
  } catch (error) { return {error: error.message}; }
});
"""


class Engine:
    """A tab that has the engine loaded: to load and to compile it takes longer than most tests' questions."""

    def __init__(self, browser: Any, folder: Path) -> None:
        self._tab = browser.new_page()
        self._folder = folder
        self._loaded: str | None = None

    def __call__(self, questions: list[dict[str, Any]], data: dict[str, Any] | None = None, ask: str = ASK) -> Any:
        """What the engine with this data says of each question; ``ask`` has the JavaScript that asks it."""
        self._load(data)
        done = self._tab.evaluate(f"(questions) => JSON.stringify(((questions) => {{{ask}}})(questions))", questions)
        return json.loads(done)

    def shown(self, scripts: str) -> Any:
        """The JSON that these scripts leave as the page's text."""
        self._loaded = None
        page = self._folder / "engine.html"
        page.write_text(f'<!doctype html><meta charset="utf-8"><body></body>{scripts}', encoding="utf-8")
        self._tab.goto(page.as_uri())
        return json.loads(self._tab.text_content("body"))

    def _load(self, data: dict[str, Any] | None) -> None:
        from page_example import engine_data, engine_script

        written = json.dumps(data or engine_data()).replace("<", "\\u003c")
        if written == self._loaded:
            return
        self.shown(
            f'<script type="application/json" id="engine-data">{written}</script><script>{engine_script()}</script>'
            "<script>document.body.textContent = JSON.stringify(Boolean(vramprobe.predict));</script>"
        )
        self._loaded = written


@pytest.fixture(scope="session")
def answers(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Skips where there is no browser."""
    return Engine(browser, tmp_path_factory.mktemp("engine"))
