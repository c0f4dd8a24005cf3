"""Options that ranks give accelerate, by its release."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import accelerate.utils
import pytest

from vramprobe.workload.sharding.fsdp import FsdpRank


@dataclass
class PluginBefore16:
    """As accelerate before 1.6 has it: without ``fsdp_version``."""

    auto_wrap_policy: str
    cpu_ram_efficient_loading: bool
    state_dict_type: str
    cpu_offload: bool


@pytest.mark.parametrize(("version", "is_refused"), [({"fsdp_version": 1}, False), ({"fsdp_version": 2}, True)])
def test_accelerate_before_1_6_has_fsdp1_alone(
    version: dict[str, Any], is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerate.utils, "FullyShardedDataParallelPlugin", PluginBefore16)
    rank: Any = SimpleNamespace(spec=SimpleNamespace(quant="none", offload="none"))
    if is_refused:
        with pytest.raises(TypeError, match="fsdp_version"):
            FsdpRank.plugin(rank, **version)
    else:
        assert FsdpRank.plugin(rank, **version).cpu_ram_efficient_loading
