"""The table of docs/coming-from.md: all known flags of slime and miles, by name."""

from __future__ import annotations

from collections.abc import Mapping

from posttrain_import.engine_rows import ENGINE
from posttrain_import.row import Row
from posttrain_import.run_rows import ALGORITHM, ROLLOUT, RUN
from posttrain_import.trainer_rows import TRAINER

# Heading of the page -> rows.
TABLES: Mapping[str, tuple[Row, ...]] = {
    "Engine": ENGINE,
    "Trainer": TRAINER,
    "Algorithm, rollout, run": (*ALGORITHM, *ROLLOUT, *RUN),
}
ROWS: Mapping[str, Row] = {name: row for rows in TABLES.values() for row in rows for name in row.names}
