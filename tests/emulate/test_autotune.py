"""An autotuner on an emulated GPU compiles one configuration, and the next where that one does not run."""

import math
from typing import Any

import pytest

from vramprobe.emulate.values.autotune import try_one


class Tuned:
    """As triton.runtime.autotuner.Autotuner: ``run`` benchmarks each configuration of a new key and keeps the best."""

    def __init__(self, refused: set[str]) -> None:
        self.refused, self.tried, self.cache = refused, [], {}

    def run(self, key: str, configs: list[str]) -> str:
        if key not in self.cache:
            timings = {config: self._bench(key, config=config) for config in configs}
            self.cache[key] = min(timings, key=timings.__getitem__)
        return self.cache[key]

    def _bench(self, key: str, *, config: str) -> list[float]:
        self.tried.append(config)
        return [math.inf if config in self.refused else 1.0] * 3


@pytest.mark.parametrize(("refused", "tried", "chosen"), [(set(), "a", "a"), ({"a", "b"}, "abc", "c")])
def test_one_configuration_that_runs_is_enough(refused: set[str], tried: str, chosen: str) -> None:
    one: Any = type("Once", (Tuned,), {"run": Tuned.run, "_bench": Tuned._bench})
    try_one(one)
    tuner = one(refused)
    assert [tuner.run(key, list("abcd")) for key in "xyx"] == [chosen] * 3
    assert "".join(tuner.tried) == tried * 2, "once for each of two keys"


def test_a_benchmark_of_its_own_may_answer_by_a_number() -> None:
    class Plain(Tuned):
        def _bench(self, key: str, *, config: str) -> Any:
            return super()._bench(key, config=config)[0]

        run = Tuned.run

    try_one(Plain)
    assert Plain({"a"}).run("x", list("abc")) == "b"
