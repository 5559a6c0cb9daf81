"""Checks the first rows of local files when a run is planned: format, columns and keys.

So a fault of every row is found before a job starts. `download_dataset` checks the rest of the file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from posttrain.config.data import LOCAL_DATA, Data, sources_of
from posttrain.config.derived import calibration_passes
from posttrain.config.schema import Config
from posttrain.config.suites import data_of
from posttrain.errors import ConfigError, Problem
from posttrain.rl.data.keys import parse_key
from posttrain.rl.data.messages import PromptTemplate
from posttrain.rl.data.raw_rows import files_of
from posttrain.rl.data.reading import Reading, reading_of
from posttrain.rl.data.rows import describe_bad_rows, read_rows

# Rows per file, and files per pattern, to check; larger JSON arrays are skipped because they are parsed as a whole.
NUM_ROWS, NUM_FILES, MAX_ARRAY_BYTES = 100, 4, 64 << 20
# Invalid rows to name: most share the same fault.
NUM_TOLD = 3


def check_data_files(config: Config, must_exist: bool = True) -> list[Problem]:
    """Return the problems of all data's keys, and of the first rows of local files.

    Args:
        config: The resolved configuration.
        must_exist: Whether a missing file is a problem, or is skipped.
    """
    wanted = {f"data.sources.{name}" if name else "data": data for name, data in sources_of(config.data).items()}
    readings = {section: (data, reading_of(data)) for section, data in wanted.items()}
    for name, suite in config.evaluation.suites.items():
        data = data_of(suite)
        readings[f"evaluation.suites.{name}"] = data, reading_of(data)
    for name, calibration in calibration_passes(config).items():
        data = data_of(calibration)
        readings[f"serving.passes.{name}"] = data, replace(reading_of(data), needs_label=False, unlabeled="drop")
    return [
        problem
        for section, (data, reading) in readings.items()
        for problem in (*_check_keys(section, data), *_check_files(section, data, reading, must_exist))
    ]


def _check_keys(section: str, data: Data) -> Iterator[Problem]:
    try:
        for name in ("prompt_key", "label_key", "response_key"):
            if key := getattr(data, name):
                parse_key(key, f"{section}.{name}")
        if data.prompt_template:
            PromptTemplate(data.prompt_template, f"{section}.prompt_template")
    except ConfigError as error:
        yield from error.problems


def _check_files(section: str, data: Data, reading: Reading, must_exist: bool) -> Iterator[Problem]:
    if data.kind not in LOCAL_DATA or list(_check_keys(section, data)):
        return
    for pattern in dict.fromkeys([data.train_file, data.heldout_file or data.train_file]):
        paths = [path for path in files_of(pattern) if path.exists()]
        if not paths and must_exist and pattern:
            remedy = "check the path or the pattern"
            yield Problem("no-such-file", f"{section}: data files", repr(pattern), "files of rows", remedy)
        paths = [path for path in paths if _is_quickly_read(path)]
        if paths:
            yield from _check_rows(pattern, paths[:NUM_FILES], reading)


def _is_quickly_read(path: Path) -> bool:
    is_array = path.name.removesuffix(".gz").endswith(".json")
    return path.is_file() and os.access(path, os.R_OK) and (not is_array or path.stat().st_size < MAX_ARRAY_BYTES)


def _check_rows(pattern: str, paths: list[Path], reading: Reading) -> Iterator[Problem]:
    try:
        # Duplicates and rows without a label are counted when the whole file is read.
        found = read_rows(pattern, paths, replace(reading, duplicates="keep"), most=NUM_ROWS)
    except ConfigError as error:
        yield from error.problems
        return
    # A few invalid rows among valid ones are reported together when the whole file is read.
    if not (found.rows or found.dropped):
        yield describe_bad_rows(found, most_told=NUM_TOLD)
