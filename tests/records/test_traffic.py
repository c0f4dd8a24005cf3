"""Bytes over a link by the ring, and counts between two readings; figures by hand."""

from __future__ import annotations

import pytest

from vramprobe.records.traffic import KINDS, CollectiveKind, CollectiveTraffic, added_up, link_bytes, moved_since


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        ("all_reduce", 1536),
        ("all_gather", 768),
        ("reduce_scatter", 768),
        ("all_to_all", 768),
        ("broadcast", 1024),
        ("reduce", 1024),
        ("send", 1024),
        ("receive", 0),
    ],
)
def test_what_one_of_four_ranks_sends_for_a_kibibyte(kind: CollectiveKind, sent: int) -> None:
    assert link_bytes(kind, 4, 1024) == sent


def test_each_kind_has_its_figure() -> None:
    assert all(0 <= link_bytes(kind, 2, 100) <= 100 for kind in KINDS)


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    for ranks in (2, 8, 64):
        parts = link_bytes("reduce_scatter", ranks, 1 << 20) + link_bytes("all_gather", ranks, 1 << 20)
        assert link_bytes("all_reduce", ranks, 1 << 20) == parts


def test_what_came_between_two_readings_is_the_phases() -> None:
    before = {(0, 2): (3, 300), (3, 8): (1, 80)}
    now = {(0, 2): (5, 500), (3, 8): (1, 80), (4, 8): (1, 800)}
    assert moved_since(before, now, "backward") == [
        CollectiveTraffic(
            phase="backward", kind="all_reduce", num_ranks=2, num_calls=2, payload_bytes=200, link_bytes=200
        ),
        CollectiveTraffic(
            phase="backward", kind="reduce_scatter", num_ranks=8, num_calls=1, payload_bytes=800, link_bytes=700
        ),
    ]


def test_micro_steps_add_up_by_phase() -> None:
    forward = moved_since({}, {(3, 4): (2, 64)}, "forward")
    backward = moved_since({}, {(3, 4): (1, 32)}, "backward")
    assert added_up([*forward, *backward, *forward, *backward]) == [
        CollectiveTraffic(
            phase="forward", kind="all_gather", num_ranks=4, num_calls=4, payload_bytes=128, link_bytes=96
        ),
        CollectiveTraffic(
            phase="backward", kind="all_gather", num_ranks=4, num_calls=2, payload_bytes=64, link_bytes=48
        ),
    ]
