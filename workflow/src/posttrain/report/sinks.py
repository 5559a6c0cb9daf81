"""Writes the metrics of each step to `metrics.jsonl`, and to a W&B run if it is enabled.

`metrics.jsonl` contains one JSON object per step, on disk (fsync) before `log` returns. The report reads it, and a
resumed run continues it: rows of steps that will be repeated are removed first, so no step appears twice. A step is
logged before its checkpoint is committed, so the state that a run resumes from always has its row.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

from posttrain.config.schema import Logging
from posttrain.errors import CheckpointError
from posttrain.report.metrics import METRICS, check_metrics
from posttrain.report.sinks_wandb import WandbWriter
from posttrain.store import append_json_line, parse_json, write_text

log = logging.getLogger(__name__)


class MetricSinks:
    """Writes the metrics of a run, step by step.

    Args:
        folder: The training run's folder, with `metrics.jsonl` and, below `wandb/`, the W&B run.
        run_name: Name of the run.
        settings: Whether and how W&B is written.
        last_step: The last finished step of the state to resume from; rows of later steps are removed. None
            removes all rows, for a fresh start.
        config: The configuration shown in W&B (for example `Resolved.experiment`). It must contain no secret.

    Raises:
        CheckpointError: An earlier row is damaged, or the row of `last_step` is missing.
    """

    def __init__(
        self,
        folder: Path,
        run_name: str,
        settings: Logging,
        last_step: int | None = None,
        config: Mapping[str, Any] | None = None,
    ):
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "metrics.jsonl"
        rows = cut_off_rows(self._path, last_step)
        self._last_step = last_step
        self._wandb = WandbWriter(folder, run_name, settings, rows, config or {}) if settings.wandb else None

    def __enter__(self) -> MetricSinks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the metrics of one step; they are on disk when this method returns.

        Args:
            step: Greater than the previous step.
            values: Metric name -> number, without metrics that were not measured in this step.

        Raises:
            ValueError: A name is unknown or a value is not finite; nothing is written.
            RuntimeError: W&B could not be started or written.
        """
        check_metrics(values)
        assert self._last_step is None or step > self._last_step, f"step {step} after step {self._last_step}"
        known = {name: values[name] for name in METRICS if name in values}
        row = {"step": step} | known | {name: values[name] for name in sorted(values.keys() - known.keys())}
        append_json_line(self._path, row)
        self._last_step = step
        if self._wandb:
            self._wandb.log(row)

    def close(self) -> None:
        """Finish the W&B run."""
        if self._wandb:
            self._wandb.close()


def read_rows(path: Path) -> list[dict[str, float]]:
    """Return the rows of a `metrics.jsonl`, without a last line that a kill truncated.

    Raises:
        CheckpointError: Another line is damaged, or the steps do not increase.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    # A row is complete once its newline is on disk, so anything after the last newline is a torn write.
    rows = [_parse(path, number, line) for number, line in enumerate(lines[:-1], start=1)]
    steps = [row["step"] for row in rows]
    if any(later <= earlier for earlier, later in pairwise(steps)):
        raise CheckpointError(
            "metrics-not-rising", f"{path}: the steps do not rise; restore the file from a copy or start a new run"
        )
    return rows


def cut_off_rows(path: Path, last_step: int | None) -> list[dict[str, float]]:
    """Atomically remove the rows of all steps after `last_step`, and return the remaining rows.

    Raises:
        CheckpointError: A remaining row is damaged, or there is no row for `last_step`.
    """
    rows = read_rows(path)
    kept = [row for row in rows if last_step is not None and row["step"] <= last_step]
    if last_step is not None and (not kept or kept[-1]["step"] != last_step):
        found = f"ends at step {kept[-1]['step']}" if kept else "holds no step before it"
        raise CheckpointError(
            "metrics-incomplete",
            f"{path}: resuming after step {last_step}, but the file {found}; restore the file or start a new run",
        )
    text = "".join(json.dumps(row) + "\n" for row in kept)
    if path.exists() and path.read_text(encoding="utf-8") != text:
        log.info("%s: %d of %d rows kept, the steps after them are done again", path, len(kept), len(rows))
        write_text(path, text)
    return kept


def _parse(path: Path, number: int, line: bytes) -> dict[str, float]:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise CheckpointError(
            "metrics-invalid", f"{path}:{number}: not JSON ({error}); restore the file or start a new run"
        ) from error
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise CheckpointError(
            "metrics-invalid",
            f"{path}:{number}: a metric row has no whole number 'step'; restore the file or start a new run",
        )
    return row
