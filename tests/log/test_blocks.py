"""Blocks and causes of events: which block, when it is there, and why it was made, by hand on a few events."""

import numpy as np

from vramprobe.log.blocks import NONE, block_numbers, blocks_at, causes_of, lives_of
from vramprobe.log.log import CAUSES
from vramprobe.log.trace import Event, Owned, composition


def test_an_address_that_is_used_again_is_another_block() -> None:
    addresses, sizes = np.array([1, 2, 1, 1, 9, 1, 1]), np.array([100, 50, -100, 30, -7, -30, -30])
    blocks = block_numbers(addresses, sizes)
    assert blocks.tolist() == [1, 2, 1, 3, 0, 3, 0]  # of nothing: a free at 9, a second one at 1
    lives = lives_of(sizes, blocks)
    assert (lives.sizes.tolist(), lives.starts.tolist(), lives.ends.tolist()) == ([100, 50, 30], [0, 1, 3], [2, 7, 5])
    assert lives.alive_after(2).tolist() == [True, True, False]
    assert lives.alive_after(3).tolist() == [False, True, False]


def test_lives_in_a_part_of_a_log_whose_numbers_begin_later() -> None:
    """A free of what was there before has no life; the numbers need not be in order."""
    lives = lives_of(np.array([-9, 5, 7, -5, 0]), np.array([3, 900, 41, 900, 0]))
    assert (lives.starts.tolist(), lives.ends.tolist()) == ([1, 2], [3, 5])


def test_the_first_of_the_highest_moments_before_any_event_too() -> None:
    sizes = np.array([5, 5, -5, 5, -5, -5])
    lives = lives_of(sizes, np.array([1, 2, 2, 3, 3, 1]))
    assert lives.highest(np.arange(7)) == 2
    assert lives.highest(np.arange(3, 7)) == 4
    assert lives.highest(np.array([0])) == 0
    assert lives_of(sizes[:2], np.array([1, 2])).highest(np.array([0, 1])) == 1


def test_a_storage_lies_within_its_block() -> None:
    addresses, sizes = np.array([1000, 2000], np.uint64), np.array([64, 64])
    lives = lives_of(sizes, np.array([1, 2]))
    wanted = np.array([999, 1000, 1063, 1064, 2000], np.uint64)
    assert blocks_at(lives, addresses, wanted, 1).tolist() == [NONE, 0, 0, NONE, NONE]
    assert blocks_at(lives, addresses, wanted, 2).tolist() == [NONE, 0, 0, NONE, 1]


def test_causes_of_what_nobody_holds() -> None:
    """In order: older than the step, saved, passing, a gradient that is held, one that outlives the next step."""
    sizes = np.array([8, 8, 8, -8, -8, 8, 8])  # what is saved goes with the first event after the forward
    lives = lives_of(sizes, np.array([1, 2, 3, 3, 2, 4, 5]))
    owners = np.array([NONE, NONE, NONE, CAUSES.index("gradients"), NONE])
    found = causes_of(lives, owners, [range(1, 4)], 1)
    assert [CAUSES[one] for one in found] == ["other", "saved_activations", "temporaries", "gradients", "temporaries"]
    found = causes_of(lives, owners, [range(1, 4)], 1, outlived=[7])
    assert [CAUSES[one] for one in found] == ["other", "saved_activations", "temporaries", "gradients", "other"]


def test_composition_by_cause_adds_up() -> None:
    """weights at 1; in the forward (events 2-4) a saved and a passing block; a gradient; a temporary at the peak."""
    sizes_at = ((1, 1000), (8, 11), (2, 70), (3, 7), (3, -7), (4, 300), (5, 40), (2, -70))
    trace = [Event(ptr, size, time) for time, (ptr, size) in enumerate(sizes_at)]
    owned = [Owned("weights", 0, frozenset({1})), Owned("gradients", 7, frozenset({4}))]
    alive = composition(trace, owned, [range(2, 5)], step_start=2, at=6)
    parts = {"weights": 1000, "gradients": 300, "saved_activations": 70, "temporaries": 40, "other": 11}
    assert {name.removesuffix("_bytes"): size for name, size in alive.parts().items() if size} == parts
    assert alive.total_bytes == 1421
