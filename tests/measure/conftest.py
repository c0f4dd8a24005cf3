"""Cells that stand for every way to use several GPUs, run once on emulated cards for all tests, also other workers'."""

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import vramprobe
from emulated import require_emulation, swept
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


_CHECKPOINT = """
import sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM
config = AutoConfig.from_pretrained(sys.argv[1])
AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(sys.argv[2])
"""


@pytest.fixture
def trained_by_user(tmp_path: Path) -> Callable[[Path, str, str], list[dict[str, Any]]]:
    """trained_by_user(config, method, sharing) → what each process of ``users_training.py`` saw on two cards."""

    def train(config: Path, method: str, sharing: str) -> list[dict[str, Any]]:
        require_emulation()
        model = str(config)
        if sharing != "sequences":
            (tmp_path / "make.py").write_text(_CHECKPOINT)
            model = str(tmp_path / "model")
            vramprobe("profile", "--emulate", "H100-SXM", "--", "python", "make.py", str(config), model, cwd=tmp_path)
        start = ["python"] if sharing == "cards" else ["torchrun", "--nproc-per-node", "2"]
        words = [*start, str(Path(__file__).with_name("users_training.py")), model, method, sharing]
        done = vramprobe("profile", "--emulate", "H100-SXM x2", "--", *words, cwd=tmp_path)
        seen = [tmp_path / f"seen-{rank}.json" for rank in range(1 if sharing == "cards" else 2)]
        assert all(path.exists() for path in seen), done.stdout + done.stderr
        return [json.loads(path.read_text()) for path in seen]

    return train
