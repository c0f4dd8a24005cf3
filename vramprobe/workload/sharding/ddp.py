"""A rank under torch's ``DistributedDataParallel``, with its defaults: the whole model on each card.

In: a CellSpec of sharding ddp. Out: a Rank. Mixed precision is accelerate's autocast in forward.
"""

from typing import Any

from vramprobe.workload.sharding.rank import Rank


class DdpRank(Rank):
    """A rank with a replica of the model, which accelerate wraps without being told how."""

    def accelerator_options(self) -> dict[str, Any]:
        """None: DistributedDataParallel is accelerate's default for several processes."""
        return {}


RANK = DdpRank
