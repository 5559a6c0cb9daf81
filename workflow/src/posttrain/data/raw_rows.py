"""Files of rows as they are: JSON lines, one JSON array, parquet; what cannot be read is told by its line or row.

JSON lines are parsed one by one, not as a table: labels of one column may be texts in one line and numbers in the
next, and a wrong line hides no other.
"""

from __future__ import annotations

import glob
import gzip
import json
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from posttrain.artifacts import parse_json
from posttrain.config.data import LOCAL_DATA, Data, sources_of
from posttrain.data.keys import kind_of
from posttrain.errors import ConfigError, Problem

# What a folder's files end with to be rows; a file that is named itself may be called anything, and holds JSON lines.
SUFFIXES = (".jsonl", ".json", ".parquet", ".jsonl.gz", ".json.gz")
# Rows of a parquet file that exist at a time; some have megabytes of solutions.
BATCH_ROWS = 256


@dataclass(frozen=True)
class RawRow:
    """One row of a file, or what is wrong with it.

    Args:
        place: "line 3" or "row 3", from 1.
        content: Its columns; None for a wrong one.
        reason: What is wrong.
    """

    place: str
    content: dict[str, Any] | None
    reason: str = ""


def files_of(pattern: str) -> list[Path]:
    """Return the files that a setting names, in the order of their names.

    Args:
        pattern: A file, a folder of files of rows, or a pattern such as `data/train-*.parquet`.
    """
    if os.path.isdir(pattern):
        return sorted(path for path in Path(pattern).iterdir() if path.name.endswith(SUFFIXES))
    if os.path.exists(pattern) or not glob.has_magic(pattern):
        return [Path(pattern)]
    return [Path(path) for path in sorted(glob.glob(pattern, recursive=True))]


def local_files(data: Data) -> list[Path]:
    """Return the files on this machine that a dataset is made of; none for those that are fetched or generated."""
    sources = [source for source in sources_of(data).values() if source.kind in LOCAL_DATA]
    patterns = [pattern for source in sources for pattern in (source.train_file, source.heldout_file) if pattern]
    return list(dict.fromkeys(path for pattern in patterns for path in files_of(pattern)))


def read_raw(path: Path, left_out: Collection[str] = ()) -> Iterator[RawRow]:
    """Yield the rows of a file, one after another.

    Args:
        path: Its name tells what it is: `.parquet`; `.json`, an array or lines; anything else is JSON lines, also
            compressed (`.gz`). An array is held as a whole, of other files a few rows at a time.
        left_out: Columns that are not wanted; of parquet they are not even read.

    Raises:
        ConfigError: The file cannot be read.
    """
    try:
        yield from _parquet_rows(path, left_out) if path.suffix == ".parquet" else _json_rows(path)
    # pyarrow's errors are some of these, too.
    except (OSError, EOFError, ValueError, NotImplementedError) as error:
        allowed = "a readable file of rows: JSON lines, a JSON array or parquet"
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError([Problem("data", str(path), allowed, f"check the path: {reason}")]) from error


def _json_rows(path: Path) -> Iterator[RawRow]:
    with cast(BinaryIO, gzip.open(path) if path.suffix == ".gz" else path.open("rb")) as file:
        if path.name.removesuffix(".gz").endswith(".json") and file.read(1 << 16).lstrip()[:1] == b"[":
            file.seek(0)
            yield from _rows_of_array(file.read())
            return
        file.seek(0)
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _parsed(f"line {number}", line)


def _parsed(place: str, text: str | bytes) -> RawRow:
    try:
        row = parse_json(text)
    except UnicodeDecodeError as error:
        return RawRow(place, None, f"not UTF-8 ({error.reason} at byte {error.start})")
    except ValueError as error:
        return RawRow(place, None, f"not JSON ({error})")
    return RawRow(place, row) if isinstance(row, dict) else RawRow(place, None, f"{kind_of(row)}, expected an object")


def _rows_of_array(content: bytes) -> Iterator[RawRow]:
    try:
        rows = json.loads(content)
    except json.JSONDecodeError as error:
        yield RawRow(f"line {error.lineno}", None, f"not JSON ({error})")
    except (UnicodeDecodeError, RecursionError):
        yield _parsed("line 1", content)
    else:
        # Once more one by one: half a character anywhere is told by its row.
        yield from (_parsed(f"row {number}", json.dumps(row)) for number, row in enumerate(rows, start=1))


def _parquet_rows(path: Path, left_out: Collection[str]) -> Iterator[RawRow]:
    import pyarrow.parquet  # takes a third of a second, which readers of JSON need not wait

    with pyarrow.parquet.ParquetFile(path) as file:
        wanted = [name for name in file.schema_arrow.names if name not in left_out]
        number = 0
        for batch in file.iter_batches(BATCH_ROWS, columns=wanted):
            for content in batch.to_pylist():
                number += 1
                yield RawRow(f"row {number}", content)


def first_rows(paths: Sequence[Path], count: int) -> list[dict[str, Any]]:
    """Return the content of the first readable rows."""
    found: list[dict[str, Any]] = []
    for path in paths:
        for row in read_raw(path):
            found += [row.content] if row.content is not None else []
            if len(found) == count:
                return found
    return found
