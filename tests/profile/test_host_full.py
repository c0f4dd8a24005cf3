"""A line before the host is full: once, with how much is left, and never while there is enough."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from vramprobe.profile import host_full
from vramprobe.units import GIB


def said_of(monkeypatch: pytest.MonkeyPatch, *free: tuple[int, int] | None) -> list[str]:
    monkeypatch.setattr(host_full, "_EVERY_SECONDS", 0.001)
    said: list[str] = []
    given = iter(free)
    done: list[bool] = []

    def look() -> tuple[int, int] | None:
        one = next(given, None)
        done.append(one is None or one[0] < GIB)
        return one

    with host_full.warned_of_a_full_host(said.append, free=look):
        until = time.monotonic() + 10
        while not any(done) and time.monotonic() < until:
            time.sleep(0.002)
    return said


def test_it_is_said_once_with_how_much_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    (said,) = said_of(monkeypatch, (9 * GIB, 24 * GIB), (GIB - 1, 24 * GIB), (GIB // 2, 24 * GIB))
    assert "1024.00 MiB of 24.00 GiB left" in said or "1.00 GiB of 24.00 GiB left" in said
    assert "--only-rank" in said


@pytest.mark.parametrize("free", [(5 * GIB, 24 * GIB), (5 * GIB, 512 * GIB), (GIB, 8 * GIB)])
def test_nothing_is_said_while_there_is_enough(monkeypatch: pytest.MonkeyPatch, free: tuple[int, int]) -> None:
    assert said_of(monkeypatch, free, None) == []


def test_a_control_group_that_has_less_than_the_machine_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host_full, "_GROUP", tmp_path)
    whole = host_full.free_host_bytes()
    assert whole is not None
    assert 0 < whole[0] <= whole[1]
    for name, text in (("max", "1000000"), ("current", "900000"), ("stat", "anon 1\ninactive_file 50000\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert host_full.free_host_bytes() == (150_000, 1_000_000)
    (tmp_path / "memory.max").write_text("max\n")
    assert host_full.free_host_bytes()[1] == whole[1]
