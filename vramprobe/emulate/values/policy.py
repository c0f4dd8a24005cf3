"""Define the replacements of values that nobody computed: one frozen object, read by the mode and printed in every
report.

In: three words and a few limits. Out: a ``Policy``. It holds no state, imports nothing, and never decides whether a
value is known.
"""

from dataclasses import asdict, dataclass

CONTENTS = ("zeros", "ones", "random")
ROUTINGS = ("even", "one_expert")

# What ordinary (not all-zero, finite) numbers would make of a reduction over something big, where zeros would say
# otherwise: DeepSpeed took a stale norm for an overflow and trained nothing.
LIKELY = {"aten::all": 1, "aten::equal": 1, "aten::amax": 1, "aten::max": 1, "aten::amin": -1, "aten::min": -1}


@dataclass(frozen=True)
class Policy:
    """Policy of values nobody computed: their replacements, and the sizes up to which values are computed at all.

    ``contents``: what such bytes hold (``zeros``, ``ones``, ``random``, the last from ``seed``). With ``zeros`` a few
    reductions over big tensors are set to what ordinary numbers would give (``LIKELY``), the others of course vary
    with ``contents`` too. ``routing``: where ``topk``, ``sort``, ``argmax`` and sampling over scores that nobody
    computed point: ``even`` gives each of E experts tokens * k / E, ``one_expert`` sends every token to the first k.
    Limits in bytes: tensors up to them are computed for real on the CPU. ``mask_max_bytes`` holds for bool, int32 and
    int64 whose inputs are all known; ``float_chain_max_bytes``: above it a float made from unknown floats is not
    worth computing.
    """

    contents: str = "zeros"
    seed: int = 0
    routing: str = "even"
    int_max_bytes: int = 1 << 20
    float_max_bytes: int = 1 << 16
    mask_max_bytes: int = 1 << 26
    float_chain_max_bytes: int = 1 << 10

    def __post_init__(self):
        if self.contents not in CONTENTS:
            raise ValueError(f"contents={self.contents!r}: one of {', '.join(CONTENTS)}")
        if self.routing not in ROUTINGS:
            raise ValueError(f"routing={self.routing!r}: one of {', '.join(ROUTINGS)}")

    def as_dict(self):
        """The policy as JSON-able words and numbers."""
        return asdict(self)


def verification_policies(policy):
    """The policies under which a step must allocate the same for its memory not to depend on values: zeros, ones,
    random."""
    given = policy.as_dict()
    return [Policy(**{**given, "contents": contents}) for contents in CONTENTS]
