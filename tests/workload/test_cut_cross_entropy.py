"""Cut Cross-Entropy as a cell's loss: by its own code on an emulated GPU, recorded, and refused where it is not run."""

import sys
from pathlib import Path
from typing import Any

import pytest
from emulated import require_emulation, swept
from factories import make_spec
from grids import exhaustive

from vramprobe import api
from vramprobe.errors import MissingDependency

CUT: dict[str, Any] = {"loss": "cut_cross_entropy", "device": "cuda"}
SWEEP = """
name: cut
defaults: {model: qwen2.5-0.5b, num_layers: 2, batch_size: 2, seq_len: 512, timing_steps: 0, loss: cut_cross_entropy}
cells:
  - {method: full}
  - {method: lora, gradient_checkpointing: true}
"""


@exhaustive
def test_what_is_recorded_is_what_it_allocates_on_an_emulated_gpu(tmp_path: Path) -> None:
    site = require_emulation().parents[1]
    if not list(site.glob("lib/python3*/site-packages/cut_cross_entropy/transformers")):
        pytest.skip("the emulated environment has no build of cut-cross-entropy with a patch for transformers")
    for record in swept(tmp_path, SWEEP, cards="RTX-4090"):
        assert record.outcome.kind == "ok"
        words = record.spec.model_dump(exclude={"architecture"}, exclude_none=True, exclude_defaults=True)
        found = api.predict(gpu="RTX-4090", **words)
        assert found.peak_allocated_bytes.value == pytest.approx(record.peak.allocated_bytes, rel=0.001)


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from vramprobe.workload.loss import load_library

    monkeypatch.setitem(sys.modules, "cut_cross_entropy", None)
    monkeypatch.setitem(sys.modules, "cut_cross_entropy.transformers", None)
    with pytest.raises(MissingDependency, match=r"Install 'cut-cross-entropy\[transformers\] @ git\+https"):
        load_library(make_spec(model="llama-3.2-1b", **CUT))
