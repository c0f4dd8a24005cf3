"""SkyPilot itself reads catalogs in its own format, and vramprobe its offers; skipped where it is not installed.

It wants an environment of its own: VRAMPROBE_SKYPILOT_PYTHON names its interpreter. The rows of tests/data/skypilot are
made up in the format of SkyPilot 0.14.1's fetchers (catalog schema v8); nothing is fetched.
"""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("VRAMPROBE_SKYPILOT_PYTHON") or (sys.executable if find_spec("sky") else None)
READ = """
import json
from sky.skylet import constants
constants.ALL_CLOUDS = ("aws", "lambda", "runpod", "kubernetes")
from vramprobe.recommend.prices import offers_from_skypilot
print(json.dumps([[one.provider, one.terms, one.gpu, one.num_gpus, one.usd_per_hour, one.region]
                  for one in offers_from_skypilot()]))
"""


@pytest.mark.skipif(PYTHON is None, reason="SkyPilot is not installed: pip install 'vramprobe[cloud]'")
def test_skypilots_own_reader_gives_offers(tmp_path: Path) -> None:
    for file in (ROOT / "tests" / "data" / "skypilot").glob("*.csv"):
        catalog = tmp_path / ".sky" / "catalogs" / "v8" / file.stem
        catalog.mkdir(parents=True)
        shutil.copyfile(file, catalog / "vms.csv")
    env = os.environ | {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    done = subprocess.run([PYTHON, "-c", READ], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert sorted(json.loads(done.stdout.splitlines()[-1])) == [
        ["AWS", "on-demand", "A100-40GB-SXM", 8, 32.7726, "us-east-1"],
        ["AWS", "on-demand", "L4", 1, 0.8048, "eu-central-1"],
        ["AWS", "spot", "A100-40GB-SXM", 8, 9.8318, "us-east-1"],
        ["AWS", "spot", "L4", 1, 0.3, "eu-central-1"],
        ["Lambda", "on-demand", "A10", 1, 0.75, "us-west-1"],
        ["Lambda", "on-demand", "GH200", 1, 1.49, "us-east-3"],
        ["Lambda", "on-demand", "H100-SXM", 8, 23.92, "europe-central-1"],
        ["Lambda", "on-demand", "H100-SXM", 8, 23.92, "us-west-1"],
        ["RunPod", "on-demand", "A100-80GB-SXM", 2, 3.78, "CA"],
        ["RunPod", "on-demand", "RTX-4090", 1, 0.69, "US"],
        ["RunPod", "spot", "RTX-4090", 1, 0.35, "US"],
    ]
