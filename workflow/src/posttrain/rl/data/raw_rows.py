"""Reads files of rows: JSON lines, JSON arrays, parquet, CSV. Errors name the line or row.

JSON lines are parsed one by one, not as a table: a column may mix texts and numbers, and an invalid line hides no
other. A file's first bytes determine its format, then its name. The decoded size of a row, and of a compressed file, is
limited, so that a small file cannot fill the memory.
"""

from __future__ import annotations

import csv
import glob
import gzip
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from posttrain.config.data import LOCAL_DATA, Data, sources_of
from posttrain.errors import ConfigError, Problem
from posttrain.rl.data.arrow_values import decoder_of
from posttrain.rl.data.keys import kind_of
from posttrain.store import parse_json

# Suffixes of row files in a folder; a file named explicitly may have any name, and defaults to JSON lines.
SUFFIXES = (".jsonl", ".json", ".parquet", ".jsonl.gz", ".json.gz")
# Used if a folder has none of those.
TABLE_SUFFIXES = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
# Limits on parquet rows in memory, in rows and bytes; some rows have megabytes of solutions.
BATCH_ROWS, BATCH_BYTES = 256, 512 << 20
# Of one row.
MAX_ROW_BYTES = 32 << 20
# Limit on a compressed file's decoded rows, in bytes or as a multiple of the file's size.
MAX_DECODED_BYTES, MAX_EXPANSION = 256 << 20, 100
_SPACE = re.compile(r"[ \t\n\r]*")
_GZIP, _PARQUET = b"\x1f\x8b", b"PAR1"
_DECOMPRESS, _CONVERT = "decompress it, or compress it with gzip", "write it as JSON lines, CSV or parquet"
# First bytes of unsupported files -> their type, and the remedy.
_OTHERS = {
    b"PK\x03\x04": ("a zip archive, as Excel's workbooks are", "save its table as CSV, JSON lines or parquet"),
    b"\xd0\xcf\x11\xe0": ("an old Excel workbook", "save its table as CSV, JSON lines or parquet"),
    b"ARROW1": ("an Arrow file", "write it with Dataset.to_parquet or pyarrow.parquet.write_table"),
    b"\xff\xff\xff\xff": ("an Arrow stream, as save_to_disk writes", "write it with Dataset.to_parquet"),
    b"version https://git-lfs": ("a Git LFS pointer, not the file", "run `git lfs pull` in its repository"),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", _DECOMPRESS),
    b"BZh": ("compressed by bzip2", _DECOMPRESS),
    b"\xfd7zXZ": ("compressed by xz", _DECOMPRESS),
    b"7z\xbc\xaf": ("a 7z archive", _DECOMPRESS),
    b"ORC": ("an ORC file", _CONVERT),
    b"Obj\x01": ("an Avro file", _CONVERT),
    b"SQLite format 3": ("an SQLite database", _CONVERT),
    b"\x89HDF": ("an HDF5 file", _CONVERT),
    b"\x80\x04": ("a pickle", _CONVERT),
    b"\x80\x05": ("a pickle", _CONVERT),
}
_READABLE = "a file of rows: JSON lines, a JSON array, CSV or parquet"


@dataclass(frozen=True)
class RawRow:
    """One row of a file, or the reason that it is invalid.

    Args:
        place: "line 3" or "row 3", from 1.
        content: Its columns; None if invalid.
        reason: Why it is invalid.
    """

    place: str
    content: dict[str, Any] | None
    reason: str = ""


def files_of(pattern: str) -> list[Path]:
    """Return the files that a setting names, sorted by name.

    Args:
        pattern: A file, a folder of files of rows, or a pattern such as `data/train-*.parquet`.
    """
    if os.path.isdir(pattern):
        names = sorted(Path(pattern).iterdir())
        return [path for path in names if path.name.endswith(SUFFIXES)] or [
            path for path in names if path.name.endswith(TABLE_SUFFIXES)
        ]
    if os.path.exists(pattern) or not glob.has_magic(pattern):
        return [Path(pattern)]
    return [Path(path) for path in sorted(glob.glob(pattern, recursive=True))]


def local_files(data: Data) -> list[Path]:
    """Return a dataset's local files; none if it is fetched or generated."""
    sources = [source for source in sources_of(data).values() if source.kind in LOCAL_DATA]
    patterns = [pattern for source in sources for pattern in (source.train_file, source.heldout_file) if pattern]
    return list(dict.fromkeys(path for pattern in patterns for path in files_of(pattern)))


def read_raw(path: Path, left_out: Collection[str] = ()) -> Iterator[RawRow]:
    """Yield the rows of a file, one after another.

    Args:
        path: The first bytes identify parquet and gzip, the name `.csv`, `.tsv` and `.json` (array or lines). Anything
            else is JSON lines. A JSON array's text is held in memory as a whole, other files a few rows at a time.
        left_out: Columns to drop; in parquet they are not even read.

    Raises:
        ConfigError: The file cannot be read, or its rows are too large.
    """
    try:
        reads = _reader_of(path)
        yield from reads(path, left_out)
    except ConfigError:
        raise
    # Includes pyarrow's errors.
    except (OSError, EOFError, ValueError, NotImplementedError, csv.Error) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            [Problem("data-unreadable", "data", str(path), f"a readable {_READABLE[2:]}", f"check it: {reason}")]
        ) from error


def _reader_of(path: Path) -> Callable[[Path, Collection[str]], Iterator[RawRow]]:
    with path.open("rb") as file:
        head = file.read(64)
    if found := next((told for magic, told in _OTHERS.items() if head.startswith(magic)), None):
        raise ConfigError([Problem("data-unreadable", "data", f"{path}, {found[0]}", _READABLE, found[1])])
    if head.startswith(_PARQUET) or path.suffix == ".parquet":
        return _parquet_rows
    return _table_rows if path.name.endswith(TABLE_SUFFIXES) else _json_rows


class _Decoded:
    """Counts the decoded bytes of a file's rows.

    Args:
        path: The file; the limit applies only to compressed ones.
    """

    def __init__(self, path: Path):
        self._path, self._size = path, path.stat().st_size
        self.limit = max(MAX_DECODED_BYTES, MAX_EXPANSION * self._size)
        self._total = 0

    def add(self, num_bytes: int) -> None:
        """Add decoded bytes.

        Raises:
            ConfigError: The limit is exceeded.
        """
        self._total += num_bytes
        if self._total > self.limit:
            value = f"{self._size:,} bytes that decode to more than {self.limit:,}"
            remedy = "if it is what you expect, write it as JSON lines without compression"
            raise ConfigError(
                [Problem("file-too-large", str(self._path), value, "a file that fits into memory when decoded", remedy)]
            )


def _too_long(path: Path, place: str) -> ConfigError:
    value = f"more than {MAX_ROW_BYTES:,} bytes in one row"
    return ConfigError(
        [
            Problem(
                "row-too-large", f"{path}, {place}", value, f"at most {MAX_ROW_BYTES:,} bytes", "shorten or remove it"
            )
        ]
    )


def _open(path: Path) -> BinaryIO:
    with path.open("rb") as file:
        is_gzip = file.read(2) == _GZIP or path.suffix == ".gz"
    return cast(BinaryIO, gzip.open(path) if is_gzip else path.open("rb"))


def _lines(path: Path, file: BinaryIO) -> Iterator[bytes]:
    decoded, number = _Decoded(path), 0
    while line := file.readline(MAX_ROW_BYTES + 1):
        number += 1
        if len(line) > MAX_ROW_BYTES:
            raise _too_long(path, f"line {number}")
        if isinstance(file, gzip.GzipFile):
            decoded.add(len(line))
        yield line


# ---- JSON ----


def _json_rows(path: Path, left_out: Collection[str]) -> Iterator[RawRow]:
    with _open(path) as file:
        if path.name.removesuffix(".gz").endswith(".json") and file.read(1 << 16).lstrip()[:1] == b"[":
            file.seek(0)
            yield from _rows_of_array(b"".join(_pieces(path, file)))
            return
        file.seek(0)
        for number, line in enumerate(_lines(path, file), start=1):
            if line.strip():
                yield _parsed(f"line {number}", line)


def _pieces(path: Path, file: BinaryIO) -> Iterator[bytes]:
    decoded = _Decoded(path)
    while piece := file.read(1 << 20):
        if isinstance(file, gzip.GzipFile):
            decoded.add(len(piece))
        yield piece


def _parsed(place: str, text: str | bytes) -> RawRow:
    try:
        row = parse_json(text, unique_names=True)
    except UnicodeDecodeError as error:
        return RawRow(place, None, f"not UTF-8 ({error.reason} at byte {error.start})")
    except ValueError as error:
        return RawRow(place, None, f"not JSON ({error})")
    return RawRow(place, row) if isinstance(row, dict) else RawRow(place, None, f"{kind_of(row)}, expected an object")


def _rows_of_array(content: bytes) -> Iterator[RawRow]:
    try:
        text = content.decode("utf-8")
        for number, element in enumerate(_elements(text), start=1):
            yield _parsed(f"row {number}", element)
    except json.JSONDecodeError as error:
        yield RawRow(f"line {error.lineno}", None, f"not JSON ({error})")
    except (UnicodeDecodeError, RecursionError):
        yield _parsed("line 1", content)


def _elements(text: str) -> Iterator[str]:
    """Yield the text of each element of a JSON array, so that only one is parsed at a time."""
    scan = json.JSONDecoder().raw_decode
    place = _after_space(text, text.index("[") + 1)
    is_closed = text[place : place + 1] == "]"
    while not is_closed:
        _, end = scan(text, place)
        yield text[place:end]
        end = _after_space(text, end)
        is_closed = text[end : end + 1] == "]"
        if not is_closed and text[end : end + 1] != ",":
            raise json.JSONDecodeError("Expecting ',' delimiter", text, end)
        place = end if is_closed else _after_space(text, end + 1)
    if (end := _after_space(text, place + 1)) != len(text):
        raise json.JSONDecodeError("Extra data", text, end)


def _after_space(text: str, place: int) -> int:
    found = _SPACE.match(text, place)
    return found.end() if found else place


# ---- CSV ----


def _table_rows(path: Path, left_out: Collection[str]) -> Iterator[RawRow]:
    """Yield the rows of a table with a header; all values are strings."""
    csv.field_size_limit(MAX_ROW_BYTES)
    delimiter = "\t" if ".tsv" in path.suffixes[-2:] else ","
    with _open(path) as file:
        texts = (line.decode("utf-8-sig" if number == 0 else "utf-8") for number, line in enumerate(_lines(path, file)))
        rows = csv.reader(texts, delimiter=delimiter, strict=True)
        names = next(rows, [])
        _check_header(path, names, delimiter)
        for number, cells in enumerate((cells for cells in rows if cells), start=1):
            if len(cells) == len(names):
                yield RawRow(f"row {number}", dict(zip(names, cells, strict=True)))
            else:
                yield RawRow(f"row {number}", None, f"has {len(cells)} cells, the header {len(names)}")


def _check_header(path: Path, names: Sequence[str], delimiter: str) -> None:
    allowed = "a first line with a name for each column, none twice"
    key, remedy = f"{path}, line 1", "correct the header"
    if len(names) == 1 and (other := next((one for one in ";\t," if one in names[0]), "")):
        remedy = f"separate the cells by {delimiter!r}, not by {other!r}"
        raise ConfigError([Problem("header-not-columns", key, repr(names[0]), allowed, remedy)])
    if wrong := [name for name in names if not name.strip() or names.count(name) > 1]:
        raise ConfigError(
            [Problem("header-not-columns", key, f"the names {list(names)}, of which {wrong[0]!r}", allowed, remedy)]
        )


# ---- parquet ----


def _parquet_rows(path: Path, left_out: Collection[str]) -> Iterator[RawRow]:
    import pyarrow.parquet  # the import takes a third of a second, which JSON files do not need

    decoded, number = _Decoded(path), 0
    with pyarrow.parquet.ParquetFile(path, arrow_extensions_enabled=True) as file:
        names = file.schema_arrow.names
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"it has the column {twice[0]!r} twice")
        wanted = [name for name in names if name not in left_out]
        decoders = {name: decoder for name in wanted if (decoder := decoder_of(file.schema_arrow.field(name).type))}
        for group in range(file.num_row_groups):
            for batch in file.iter_batches(_batch_rows(file, group, wanted), row_groups=[group], columns=wanted):
                if batch.nbytes > MAX_ROW_BYTES and batch.nbytes > MAX_ROW_BYTES * batch.num_rows:
                    raise _too_long(path, f"rows {number + 1} to {number + batch.num_rows}")
                decoded.add(batch.nbytes)
                for content in batch.to_pylist():
                    number += 1
                    yield _decoded(f"row {number}", content, decoders)


def _batch_rows(file: Any, group: int, wanted: Collection[str]) -> int:
    """Return the number of rows of a row group to read at a time.

    A value shared by many rows is stored once (dictionary encoding), so any row may be as large as the whole group.
    """
    columns = [file.metadata.row_group(group).column(place) for place in range(file.metadata.num_columns)]
    sizes = [column.total_uncompressed_size for column in columns if column.path_in_schema.split(".")[0] in wanted]
    return max(1, min(BATCH_ROWS, BATCH_BYTES // max(1, sum(sizes))))


def _decoded(place: str, content: dict[str, Any], decoders: dict[str, Callable[[Any], Any]]) -> RawRow:
    for name, decode in decoders.items():
        try:
            content[name] = decode(content[name])
        except ValueError as error:
            return RawRow(place, None, f"{name!r} is not JSON ({error})")
    return RawRow(place, content)


def first_rows(paths: Sequence[Path], count: int) -> list[dict[str, Any]]:
    """Return the content of the first readable rows."""
    found: list[dict[str, Any]] = []
    for path in paths:
        for row in read_raw(path):
            found += [row.content] if row.content is not None else []
            if len(found) == count:
                return found
    return found
