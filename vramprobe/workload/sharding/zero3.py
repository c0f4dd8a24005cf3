"""A rank under ZeRO-3, which DeepSpeed runs as it runs ZeRO-1 and 2: the configuration names the stage."""

from vramprobe.workload.sharding.zero import ZeroRank

RANK = ZeroRank
