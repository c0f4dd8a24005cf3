"""Images of replaced rows that a program drops are said to be dropped, and those that it keeps are not."""

import pytest

from vramprobe.profile.unread_images import unread_images

ROWS = {
    "kind": "dataset",
    "what": "org/vlm",
    "by": "512 rows of 256 tokens, known: messages, images; one image of 672 × 672",
}
COUNTED = {"kind": "image tokens", "what": "org/m", "by": "1,441 for 672 × 672 pixels, counted by Qwen3VLProcessor"}


@pytest.mark.parametrize(
    ("replaced", "tokens", "samples", "is_said"),
    [
        ([ROWS, COUNTED], 8 * 272, 8, True),
        ([ROWS, COUNTED], 8 * 1713, 8, False),
        ([ROWS, COUNTED], 8 * 1713, 1, False),  # packed
        ([ROWS, COUNTED], None, 8, False),
        ([COUNTED], 8 * 272, 8, False),  # the program's own rows, which may be text
        ([ROWS, COUNTED | {"by": "not counted: ValueError: no"}], 8 * 272, 8, False),
    ],
)
def test_a_sample_shorter_than_its_image_has_lost_it(replaced, tokens, samples, is_said) -> None:
    said = unread_images(replaced, tokens, samples)
    assert bool(said) == is_said
    assert not said or "a sample has 272 tokens, an image of 672 × 672 pixels alone 1,441" in said[0]
