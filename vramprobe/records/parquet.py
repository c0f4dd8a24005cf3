"""Results → one Parquet file with the rows of ``vramprobe.load``, a batch at a time: for a million records and more.

In: a results file or folder. Out: the file, and from there a DataFrame in seconds; DuckDB and others read it, too.
Holds one batch of records, and the id of each attempt. Drops no record: failures are rows.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vramprobe.errors import SpecError, StoreError, require_extra
from vramprobe.records import columns, store
from vramprobe.records.record import RunRecord
from vramprobe.records.whole_file import replacing

if TYPE_CHECKING:
    import pandas as pd

SUFFIX = ".parquet"
_BATCH = 10_000
_VERSIONS = re.compile(rb'"versions":(\{[^{}]*\})')


def export(results: str | Path, out: str | Path, *, on_batch: Callable[[int], None] = lambda rows: None) -> int:
    """Write all records under ``results`` to ``out`` and return their number; ``on_batch`` gets that so far.

    Raises MissingDependency without pyarrow, SpecError where ``out`` has another suffix, StoreError for results that
    cannot be read or hold no record; a file that was there stays then.
    """
    require_extra("report", "a Parquet file", "hub")
    out = Path(out)
    if out.suffix != SUFFIX:
        raise SpecError(f"{out} given; name a file that ends in {SUFFIX}")
    files = store.journals(results)
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as part:
        num_rows = _write(part, _batches(_records(files)), sorted(_packages(files)), on_batch)
        if not num_rows:
            raise StoreError(f"{results} holds no record; run a sweep first: vramprobe run quickstart")
    return num_rows


def load(path: Path, of: str = "records") -> pd.DataFrame:
    """The rows of a file that :func:`export` wrote. Raises StoreError, or MissingDependency without pyarrow."""
    if of != "records":
        raise SpecError(f"{path} holds records alone; load the journals that it was made of for {of}")
    require_extra("report", "a Parquet file", "hub")
    if not path.exists():
        raise StoreError(f"there are no results at {path}; vramprobe export RESULTS -o {path} makes some")
    import pandas as pd

    try:
        frame = pd.read_parquet(path)
    except OSError as error:
        raise store.cannot_read(path, error) from error
    except ValueError as error:  # pyarrow's ArrowInvalid is one
        raise StoreError(
            f"{path} is no Parquet file ({error}); vramprobe export RESULTS -o {path} makes one"
        ) from error
    if missing := [name for name in ("attempt_id", "cell_id", "outcome") if name not in frame]:
        raise StoreError(f"{path} lacks {', '.join(missing)}; vramprobe export RESULTS -o FILE makes a whole one")
    return frame


def _write(path: Path, batches: Iterable[list[RunRecord]], packages: list[str], on_batch: Callable[[int], None]) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from vramprobe.records.frames import records_frame

    versions = [f"version_{package}" for package in packages]
    names = list(columns.RECORDS)
    names[names.index("commit") : names.index("commit")] = versions
    with contextlib.ExitStack() as stack:
        writer, num_rows = None, 0
        for batch in batches:
            frame = records_frame(batch).reindex(columns=names)
            table = pa.Table.from_pandas(frame.astype(dict.fromkeys(versions, "string")), preserve_index=False)
            writer = writer or stack.enter_context(pq.ParquetWriter(path, table.schema, compression="zstd"))
            writer.write_table(table.cast(writer.schema))
            num_rows += len(batch)
            on_batch(num_rows)
    return num_rows


def _batches(records: Iterator[RunRecord]) -> Iterator[list[RunRecord]]:
    while batch := list(itertools.islice(records, _BATCH)):
        yield batch


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with store.opened(file) as lines:
            yield from enumerate(lines, start=1)
    except (*store.DAMAGED, OSError) as error:
        raise store.cannot_read(file, error) from error


def _packages(files: Iterable[Path]) -> set[str]:
    """Every library that a record names; as text that repeats, read once."""
    texts = {found for file in files for _, line in _lines(file) for found in _VERSIONS.findall(line)}
    return {package for text in texts for package in json.loads(text)}


def _records(files: Iterable[Path]) -> Iterator[RunRecord]:
    """As store.read has them, one after the other."""
    seen: dict[str, int] = {}
    for file in files:
        for number, line in _lines(file):
            is_torn = not line.endswith(b"\n") and not store.is_whole(line)
            if is_torn or not line.strip() or store.is_profile(line):
                continue
            entry: Any = store.read_line(line, file, number)
            if not isinstance(entry, RunRecord):
                continue
            text = hash(line.strip())
            if entry.attempt_id not in seen:
                seen[entry.attempt_id] = text
                yield entry
            elif seen[entry.attempt_id] != text:
                raise StoreError(
                    f"{file}, line {number}: attempt {entry.attempt_id} is there a second time with other values; "
                    "delete the copy that was edited"
                )
