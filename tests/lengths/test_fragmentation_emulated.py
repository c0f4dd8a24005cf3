"""Reserved memory over batches of varied shapes: the replay against torch's own allocator on an emulated GPU."""

import json
import shutil
from pathlib import Path

import pytest
from command_line import vramprobe
from emulated import require_emulation
from grids import exhaustive

import vramprobe as package
from vramprobe.lengths.batches import make_batches
from vramprobe.lengths.fragmentation import reserved_over_steps
from vramprobe.lengths.reading import read_lengths

MODEL = Path(package.__file__).parent / "data" / "models" / "smollm2-135m.json"
SCRIPT = Path(__file__).parent / "varied_training.py"
NUM_STEPS = 40
#: With room for all that is reserved: near a limit the replay stops at what a verdict allows, which a run may exceed.
CARD = "L40S"


@exhaustive
@pytest.mark.parametrize(
    ("alloc_conf", "loop"),
    [
        ("", "trainer"),
        ("expandable_segments:True", "trainer"),
        ("roundup_power2_divisions:8", "trainer"),
        ("max_split_size_mb:128", "trainer"),
        ("", "keeps-outputs"),
    ],
)
def test_each_step_reserves_what_torch_reserves(alloc_conf: str, loop: str, tmp_path: Path) -> None:
    """Lengths of three branches: the sums of a few tokens' gradients, and of many tokens' embeddings, are others."""
    require_emulation()
    lengths = read_lengths("p50=150 p90=400 p99=800 max=2048 rows=1000")
    shapes = [one.shape for one in make_batches(lengths, batch_size=4, max_length=1024)][:NUM_STEPS]
    shutil.copy(MODEL, tmp_path / "config.json")
    out = tmp_path / "out.json"
    words = ("profile", "--emulate", CARD, "--whole", "--trace", "none", "--", "python", str(SCRIPT))
    env = {"PYTORCH_CUDA_ALLOC_CONF": alloc_conf, "OMP_NUM_THREADS": "1"}
    done = vramprobe(*words, str(tmp_path), json.dumps(shapes), str(out), loop, env=env)
    assert done.returncode == 0, done.stderr
    emulated = json.loads(out.read_text())
    cell = {"model": "smollm2-135m", "method": "full", "batch_size": 4, "seq_len": 1024, "loop": loop}
    (course,), notes = reserved_over_steps(shapes, NUM_STEPS, gpu=CARD, settings=[(alloc_conf, 0)], **cell)
    assert list(course.reserved_bytes) == emulated["reserved"]
    assert course.peak_allocated_bytes == emulated["allocated"]
    assert notes == []
    assert course.last_reserved_bytes > course.first_reserved_bytes
