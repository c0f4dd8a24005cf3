"""Expected: a record -> what is predicted of its cell without a fit; records -> the fit that learns from that.

In: RunRecords. Out: bytes allocated and reserved: by arithmetic through the allocator's replay, else from a recipe
that is at hand. Records nothing, and never looks at what was measured.
"""

from __future__ import annotations

from collections.abc import Iterable

from vramprobe.architecture import UnsupportedArchitecture, architecture
from vramprobe.catalog import gpu_seen
from vramprobe.errors import VramprobeError
from vramprobe.kernels.chip import chip_like
from vramprobe.model.card_fit import CardFit
from vramprobe.model.fit import Expected, fit
from vramprobe.predict.at_hand import replay_at_hand
from vramprobe.records.record import RunRecord
from vramprobe.terms import moments
from vramprobe.terms.replayed import replayed
from vramprobe.terms.step.workspaces import highest_moment


def fit_records(records: Iterable[RunRecord]) -> CardFit:
    """The fit of these records; raises as :func:`vramprobe.model.fit.fit`."""
    return fit(records, expected)


def expected(record: RunRecord) -> Expected:
    """Raises VramprobeError where there is neither arithmetic nor a recipe."""
    spec, gpu = record.spec, gpu_seen(record.environment.device_name)
    try:
        num_params = architecture(spec.architecture).num_params
        if spec.device == "cpu":
            return Expected(highest_moment(moments(spec, chip_like(gpu))).total_bytes, None, num_params)
        played = replayed(spec, gpu)
        return Expected(played.allocated_bytes, played.reserved_bytes, num_params)
    except UnsupportedArchitecture as error:
        missing = str(error)
    replay = replay_at_hand(spec, gpu=gpu)
    if replay is None or record.facts is None:
        raise VramprobeError(f"{missing}; and no recipe is at hand: vramprobe predict --engine recipe records it")
    return Expected(replay.peak.allocated_bytes, replay.peak.reserved_bytes, record.facts.num_params)
