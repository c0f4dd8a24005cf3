"""Results that ``lent.sh`` left in OUT, without what names a machine: ``python benchmarks/gpu/keep.py OUT FOLDER``.

Records go through ``vramprobe contribute``; of the programs' profiles the peak, the outcome and the libraries are kept,
as programs.jsonl. ``compare.py`` reads FOLDER.
"""

from __future__ import annotations

import json
import lzma
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def profiles(archive: Path) -> Iterator[dict[str, Any]]:
    """A row for each profile of programs.tgz."""
    with tarfile.open(archive) as files:
        for member in sorted(files.getmembers(), key=lambda one: one.name):
            if not member.name.endswith(".json") or (file := files.extractfile(member)) is None:
                continue
            lines = file.read().decode().strip().splitlines()
            if not lines or not lines[-1].startswith("{"):
                continue
            profile = json.loads(lines[-1])
            rank = (profile.get("ranks") or [{}])[0]
            environment = profile["environment"]
            yield {
                "program": Path(member.name).stem,
                "instrument": profile["instrument"],
                "outcome": profile["outcome"]["kind"],
                "peak": rank.get("peak"),
                "num_steps": rank.get("num_steps"),
                "device_name": environment.get("device_name"),
                "torch": environment.get("torch"),
                "versions": environment.get("versions"),
            }


def main() -> None:
    """Write FOLDER's files."""
    from vramprobe import api
    from vramprobe.records import store

    out, folder = map(Path, sys.argv[1:3])
    folder.mkdir(parents=True, exist_ok=True)
    for sweep in ("cells", "boundary"):
        if not (out / f"{sweep}.jsonl").exists():
            continue
        with tempfile.TemporaryDirectory() as home:
            made = api.contribute(out / f"{sweep}.jsonl", Path(home, "records.jsonl")).file
            assert store.read(made).records
            folder.joinpath(f"{sweep}.jsonl.xz").write_bytes(lzma.compress(made.read_bytes(), preset=9))
    if (out / "programs.tgz").exists():
        lines = [json.dumps(row) + "\n" for row in profiles(out / "programs.tgz")]
        folder.joinpath("programs.jsonl").write_text("".join(lines))
    if (out / "workspaces.jsonl").exists():
        packed = lzma.compress((out / "workspaces.jsonl").read_bytes(), preset=9)
        folder.joinpath("workspaces.jsonl.xz").write_bytes(packed)
    if (out / "context.jsonl").exists():
        shutil.copy(out / "context.jsonl", folder)


if __name__ == "__main__":
    main()
