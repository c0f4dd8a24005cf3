"""Cells that stand for every way to use several GPUs, run once on emulated cards for all tests, also other workers'."""

from __future__ import annotations

import fcntl
import json
import os

import pytest
from emulated import swept
from factories import TINY_LLAMA, TINY_LLAMA_PATH

from vramprobe.records import store
from vramprobe.records.record import RunRecord

_SWEEP = f"""
name: few
defaults: {{model: {TINY_LLAMA_PATH}, batch_size: 2, seq_len: 32, num_gpus: 2, device: cuda}}
cells:
  - {{method: full, sharding: [ddp, fsdp]}}
  - {{method: full, sharding: fsdp, only_rank: 1}}
  - {{method: full, sharding: fsdp, offload: params}}
  - {{method: full, recipe: mixed, num_gpus: 4, sharding: fsdp-hybrid, shard_size: 2}}
  - {{method: full, autocast: bf16, sharding: tp}}
  - {{method: full, autocast: bf16, sharding: fsdp, cp_size: 2, seq_len: 1024}}
  - {{model: six/config.json, method: full, autocast: bf16, sharding: device-map}}
  - {{model: six/config.json, method: [lora, qlora], sharding: device-map}}
"""
_NUM_CELLS = 10


@pytest.fixture(scope="session")
def few_of_each(tmp_path_factory: pytest.TempPathFactory) -> list[RunRecord]:
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "few_of_each"  # one for all workers
    (folder / "six").mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            (folder / "six" / "config.json").write_text(json.dumps(TINY_LLAMA | {"num_hidden_layers": 6}))
            assert len(swept(folder, _SWEEP, cards="H100-SXM x8")) == _NUM_CELLS
            (folder / "done").touch()
    return store.read(folder / "out").records
