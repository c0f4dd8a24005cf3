"""The table of public memory snapshots: totals as torch's viewer counts them, and a page that is made of the table."""

import pickle

from scripts import script

MIB = 2**20


def test_the_page_is_made_of_the_table_whose_totals_are_torchs() -> None:
    tables, snapshots = script("tables"), script("truth.snapshots")
    rows = tables.read_csv(snapshots.TABLE)
    assert [(row["repository"], row["path"]) for row in rows] == [(one[0], one[3]) for one in snapshots.sources()]
    assert len(rows) >= 12
    for row in rows:
        assert row["allocated_bytes"] == row["torch_allocated_bytes"]
        assert row["reserved_bytes"] == row["torch_reserved_bytes"]
    assert snapshots.TABLE.with_suffix(".md").read_text(encoding="utf-8") == snapshots.markdown(rows)


def test_a_snapshot_is_compared_with_torchs_viewer() -> None:
    snapshots = script("truth.snapshots")
    blocks = [
        {"size": 5 * MIB, "requested_size": 5 * MIB - 1, "state": "active_allocated"},
        {"size": 3 * MIB, "requested_size": 3 * MIB, "state": "inactive"},
    ]
    segment = {"device": 0, "address": 1, "total_size": 8 * MIB, "stream": 0, "segment_type": "large", "blocks": blocks}
    source = snapshots.Source("owner/name", "0", "", "snapshot.pickle")
    row = snapshots.compared(source, pickle.dumps({"segments": [segment], "device_traces": []}))
    assert (row["allocated_bytes"], row["torch_allocated_bytes"]) == (5 * MIB, 5 * MIB)
    assert (row["reserved_bytes"], row["torch_reserved_bytes"]) == (8 * MIB, 8 * MIB)
    assert (row["num_live_blocks"], row["num_entries"], row["failed_request_bytes"]) == (1, 0, "")
