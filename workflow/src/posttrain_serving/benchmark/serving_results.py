"""Tables of serving benchmarks on disk, written row by row.

`NAME.json` has the request and the rows, and is rewritten after each row. Repeating the request of an interrupted
benchmark keeps its rows and measures the missing ones. A complete benchmark, or one with another request, starts over.
`NAME.csv` has the rows for other programs; tables of other benchmarks are read from CSV, too.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from posttrain.errors import ConfigError, Problem, one_line, printable
from posttrain.plan.timing.serving_load import PUBLISHED_FILE
from posttrain.readable import counted, format_number
from posttrain.rl.engines.calls import EngineError
from posttrain.rl.engines.streaming import Endpoint
from posttrain.store import read_json, write_json, write_text
from posttrain_serving.benchmark.serving import Level, Load, PromptOf, measure_level

# Required columns; published tables have only these.
COLUMNS = tuple(field.name for field in fields(Level))[:5]
# Above the smallest concurrency with this share of the peak speed, more requests only wait.
SATURATED_SHARE = 0.95
HEADS = {
    "concurrency": "clients",
    "output_tokens_per_second": "output tok/s",
    "ttft_ms": "TTFT ms",
    "ttft_p99_ms": "TTFT p99",
    "tpot_ms": "TPOT ms",
    "itl_p50_ms": "ITL p50",
    "itl_p99_ms": "ITL p99",
    "generator_lag_ms": "gen. lag",
}
BOUND_MARK = "*"


@dataclass(frozen=True)
class Table:
    """Rows of one engine.

    Args:
        name: Name of the engine.
        rows: Rows by concurrency, with at least `COLUMNS`.
    """

    name: str
    rows: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Peak:
    """The peak speed of a table.

    Args:
        output_tokens_per_second: The peak speed.
        concurrency: The concurrency at the peak.
        saturated_at: The smallest concurrency with `SATURATED_SHARE` of the peak.
        is_inside: A larger concurrency was measured and is slower, so the peak is not at the table's end.
    """

    output_tokens_per_second: float
    concurrency: int
    saturated_at: int
    is_inside: bool


def peak_of(rows: Sequence[Mapping[str, Any]]) -> Peak:
    """Return the peak of at least one row."""
    ordered = sorted(rows, key=lambda row: row["concurrency"])
    speeds = [row["output_tokens_per_second"] for row in ordered]
    place, highest = max(enumerate(speeds), key=lambda pair: pair[1])
    saturated = next(at for at, speed in enumerate(speeds) if speed >= SATURATED_SHARE * highest)
    return Peak(highest, ordered[place]["concurrency"], ordered[saturated]["concurrency"], place < len(speeds) - 1)


class Record:
    """Rows of one benchmark, written to disk one by one.

    Args:
        path: `NAME.json`; `NAME.csv` is written to the same folder.
        name: Name of the engine in tables and charts.
        question: The complete request; another request starts over.
        concurrencies: Concurrencies to measure.
    """

    def __init__(self, path: Path, name: str, question: Mapping[str, Any], concurrencies: Sequence[int]):
        self._path, self._name, self._concurrencies = path, name, concurrencies
        self._question = json.loads(json.dumps(question))
        before = read_json(path) if path.exists() else {}
        is_ours = isinstance(before, dict) and before.get("question") == self._question
        goes_on = is_ours and not before["is_complete"]
        self.rows: list[dict[str, Any]] = [*before["rows"]] if goes_on else []
        self._write()

    @property
    def missing(self) -> list[int]:
        """Concurrencies that are not yet measured."""
        known = {row["concurrency"] for row in self.rows}
        return [concurrency for concurrency in self._concurrencies if concurrency not in known]

    @property
    def table(self) -> Table:
        """The rows so far."""
        return Table(self._name, self.rows)

    def add(self, level: Level) -> None:
        """Append a row and write the files."""
        self.rows.append(asdict(level))
        self._write()

    def fail(self, concurrency: int, why: str) -> None:
        """Record the failure of one row; the other rows are kept."""
        self._write({"concurrency": concurrency, "why": why})

    def _write(self, failed: Mapping[str, Any] | None = None) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        content = {"name": self._name, "question": self._question, "rows": self.rows, "failed": failed}
        peak = asdict(peak_of(self.rows)) if self.rows else None
        write_json(self._path, {**content, "peak": peak, "is_complete": not self.missing})
        write_text(self._path.with_suffix(".csv"), _as_csv(self.table))


async def measure_table(record: Record, endpoints: Sequence[Endpoint], prompt_of: PromptOf, load: Load) -> None:
    """Measure the missing rows of a record.

    Raises:
        EngineError: A row failed; the record keeps the failure and the rows before it.
    """
    for concurrency in record.missing:
        try:
            record.add(await measure_level(endpoints, prompt_of, concurrency, load))
        except EngineError as error:
            record.fail(concurrency, printable(str(error)))
            kept = f"{counted(len(record.rows), 'row')} before it {'is' if len(record.rows) == 1 else 'are'} kept"
            raise EngineError(f"{concurrency} in flight: {error}\n  {kept}; the same command goes on here") from error


def read_table(path: Path) -> Table:
    """Read a CSV with `COLUMNS`; its name is the first line's comment up to a colon, else the file's name.

    Raises:
        ConfigError: The file has another format, or a number is not above 0.
    """
    allowed = f"CSV with the columns {', '.join(COLUMNS)}"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        name = lines[0].lstrip("# ").partition(": ")[0] if lines[0].startswith("#") else path.stem
        rows = [
            {key: _number(value) for key, value in row.items()}
            for row in csv.DictReader(line for line in lines if not line.startswith("#"))
        ]
        missing = [key for key in COLUMNS if not rows or any(not row.get(key, 0) > 0 for row in rows)]
    except (OSError, ValueError, IndexError, TypeError, AttributeError) as error:
        raise ConfigError(
            [Problem("table-unreadable", "beside", f"{path}: {error}", allowed, "name another file")]
        ) from None
    if missing:
        raise ConfigError(
            [
                Problem(
                    "table-unreadable", "beside", f"{path} without {', '.join(missing)}", allowed, "name another file"
                )
            ]
        )
    return Table(one_line(name), [{**row, "concurrency": int(row["concurrency"])} for row in rows])


def _number(value: str) -> float:
    return {"True": 1.0, "False": 0.0}[value] if value in ("True", "False") else float(value)


def tables_beside(files: Sequence[str]) -> list[Table]:
    """Return the tables of files; `published` names the project's published table."""
    return [read_table(PUBLISHED_FILE if file == "published" else Path(file)) for file in files]


def format_tables(tables: Sequence[Table]) -> str:
    """Return tables as text: one line per concurrency and engine, then the peaks."""
    shown = [key for key in HEADS if any(key in row for table in tables for row in table.rows)]
    lines = ["  ".join([*(f"{HEADS[key]:>12}" for key in shown), "engine"])]
    rows = [(row, table.name) for table in tables for row in table.rows]
    for row, name in sorted(rows, key=lambda pair: pair[0]["concurrency"]):
        cells = [f"{_cell(row, key):>12}" for key in shown]
        lines.append("  ".join([*cells, name]) + (f" {BOUND_MARK}" if row.get("is_generator_bound") else ""))
    lines += [_peak_line(table) for table in tables if table.rows]
    if any(row.get("is_generator_bound") for row, _ in rows):
        lines.append(f"{BOUND_MARK} the generator was late or busy here: not the server's speed alone")
    return "\n".join(lines)


def _peak_line(table: Table) -> str:
    peak = peak_of(table.rows)
    where = "" if peak.is_inside else ", the most that was tried"
    speed = format_number(peak.output_tokens_per_second)
    return f"{table.name}: peak {speed} tok/s at {peak.concurrency}{where}; saturated from {peak.saturated_at}"


def _cell(row: Mapping[str, Any], key: str) -> str:
    value = row.get(key)
    return "" if value is None else str(value) if isinstance(value, int) else f"{value:,.1f}"


def _as_csv(table: Table) -> str:
    text = io.StringIO()
    text.write(f"# {one_line(table.name)}\n")
    writer = csv.DictWriter(text, [field.name for field in fields(Level)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(table.rows)
    return text.getvalue()
