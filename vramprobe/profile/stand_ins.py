"""What stands in for weights and rows that are not there: what the processes of a command are told of it.

In: the length of a row. Out: a part of ``run.json`` that empty/ reads: the catalog's configs by id and slug, and which
columns well-known datasets have. Runs nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vramprobe.catalog.models import list_models
from vramprobe.catalog.shipped import csv_rows, data_file, split

#: (name in the process, folder, module), as emulate/values/hook.py takes hooks.
HOOK = ("vramprobe_empty", str(Path(__file__).with_name("empty")), "start")
DEFAULT_SEQ_LEN = 2048


def stand_ins(seq_len: int | None = None) -> dict[str, Any]:
    """For ``--empty-weights`` with rows of ``seq_len`` tokens."""
    models = {}
    for entry in list_models():
        about = {
            "hf_id": entry.hf_id,
            "config": str(data_file(f"models/{entry.name}.json")),
            "dtype": entry.dtype,
        }
        models |= {name.lower(): about for name in (entry.name, entry.hf_id) if name}
    datasets = {
        row["hf_id"].lower(): {"format": row["format"], "splits": split(row["splits"], "|")}
        for row in csv_rows("datasets.csv")
    }
    return {"seq_len": seq_len or DEFAULT_SEQ_LEN, "models": models, "datasets": datasets}
