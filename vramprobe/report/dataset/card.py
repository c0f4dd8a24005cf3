"""Records → the card of their data set: front matter as the Hugging Face hub reads it, and every column explained.

In: what the store holds, the columns and the command. Out: README.md as text; others' words are escaped.
"""

from collections import Counter
from collections.abc import Sequence

from vramprobe.records import columns
from vramprobe.records.record import RunRecord
from vramprobe.records.store import StoreContents
from vramprobe.report.formats import markdown

#: The column with the whole record.
RECORD = "record_json"
_WHOLE = "the whole record as one line of JSON; vramprobe.records.record.record_from_json reads it back"
_TAGS = ("gpu-memory", "vram", "fine-tuning", "lora", "qlora", "benchmark")
#: The hub's own classes of size, by their upper ends in rows.
_SIZES = {1_000: "n<1K", 10_000: "1K<n<10K", 100_000: "10K<n<100K", 1_000_000: "100K<n<1M", 10**12: "n>1M"}


def card(contents: StoreContents, names: Sequence[str], command: str) -> str:
    """The whole card; the same text each time."""
    records = contents.records
    num_cells = len({record.fingerprint for record in records})
    about = (
        f"{len(records)} attempts at {num_cells} configurations of training steps under vramprobe, one row each, "
        "failures included. Amounts are bytes, times are seconds; null is unknown."
    )
    outcomes = ", ".join(
        f"{count} {kind}" for kind, count in Counter(one.outcome.kind for one in records).most_common()
    )
    lines = [f"outcomes: {outcomes}", *_seen(records), *([contents.torn_tail] if contents.torn_tail else [])]
    return "\n".join(
        [
            _front_matter(len(records)),
            "# Memory and time of fine-tuning runs\n",
            f"{about}\n",
            "".join(f"- {markdown.escape(line)}\n" for line in lines),
            "## Columns\n",
            "| column | dtype | meaning |\n| --- | --- | --- |\n" + "".join(map(_explained, names)),
            f"---\n\nRebuild this data set:\n\n```\n{command}\n```\n",
        ]
    )


def _explained(name: str) -> str:
    """The column's row. Raises KeyError for a column without documentation."""
    kind = columns.RecordColumn("string", _WHOLE) if name == RECORD else columns.of_records(name)
    return f"| {name} | {kind.dtype} | {kind.meaning} |\n"


def _front_matter(num_rows: int) -> str:
    size = next(name for most, name in _SIZES.items() if num_rows < most)
    tags = "".join(f"- {tag}\n" for tag in _TAGS)
    return (
        "---\nlicense: apache-2.0\npretty_name: Memory and time of fine-tuning runs\n"
        f"size_categories:\n- {size}\ntags:\n{tags}"
        "configs:\n- config_name: default\n  data_files:\n  - split: train\n    path: records.parquet\n---\n"
    )


def _seen(records: Sequence[RunRecord]) -> list[str]:
    """Instruments, devices and versions, each with how many rows."""
    instruments = Counter(record.instrument for record in records)
    devices = Counter(record.environment.device_said for record in records)
    versions = Counter(
        f"{package} {version}"
        for record in records
        for package, version in sorted(record.environment.versions.items())
        if version
    )
    return [
        f"{what}: {', '.join(f'{name} ({count})' for name, count in sorted(found.items()))}"
        for what, found in (("instruments", instruments), ("devices", devices), ("versions", versions))
    ]
