"""The table behind docs/coming-from.md: every flag of slime and miles that is known here, by its name."""

from __future__ import annotations

from collections.abc import Mapping

from posttrain_import.engine_rows import ENGINE
from posttrain_import.row import Row
from posttrain_import.run_rows import ALGORITHM, ROLLOUT, RUN
from posttrain_import.trainer_rows import TRAINER

# Headings of the page, with their rows.
TABLES: Mapping[str, tuple[Row, ...]] = {
    "Engine": ENGINE,
    "Trainer": TRAINER,
    "Algorithm, rollout, run": (*ALGORITHM, *ROLLOUT, *RUN),
}
ROWS: Mapping[str, Row] = {name: row for rows in TABLES.values() for row in rows for name in row.names}
