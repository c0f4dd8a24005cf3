"""Bytes over a link by the ring, and counts between two readings; figures by hand."""

from vramprobe.records.traffic import KINDS, CollectiveKind, CollectiveTraffic, added_up, link_bytes, moved_since


def test_what_one_of_four_ranks_sends_for_a_kibibyte() -> None:
    sent = {"all_reduce": 1536, "all_gather": 768, "reduce_scatter": 768, "all_to_all": 768}
    sent |= {"broadcast": 1024, "reduce": 1024, "send": 1024, "receive": 0}
    assert {kind: link_bytes(kind, 4, 1024) for kind in KINDS} == sent


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    for ranks in (2, 8, 64):
        parts = link_bytes("reduce_scatter", ranks, 1 << 20) + link_bytes("all_gather", ranks, 1 << 20)
        assert link_bytes("all_reduce", ranks, 1 << 20) == parts


def traffic(phase: str, kind: CollectiveKind, *figures: int) -> CollectiveTraffic:
    names = ("num_ranks", "num_calls", "payload_bytes", "link_bytes")
    return CollectiveTraffic(phase=phase, kind=kind, **dict(zip(names, figures, strict=True)))


def test_what_came_between_two_readings_is_the_phases() -> None:
    before = {(0, 2): (3, 300), (3, 8): (1, 80)}
    now = {(0, 2): (5, 500), (3, 8): (1, 80), (4, 8): (1, 800)}
    assert moved_since(before, now, "backward") == [
        traffic("backward", "all_reduce", 2, 2, 200, 200),
        traffic("backward", "reduce_scatter", 8, 1, 800, 700),
    ]


def test_micro_steps_add_up_by_phase() -> None:
    forward = moved_since({}, {(3, 4): (2, 64)}, "forward")
    backward = moved_since({}, {(3, 4): (1, 32)}, "backward")
    assert added_up([*forward, *backward, *forward, *backward]) == [
        traffic("forward", "all_gather", 4, 4, 128, 96),
        traffic("backward", "all_gather", 4, 2, 64, 48),
    ]
