"""Folders of rows that are not trained on: prompts of evaluation suites, conversations of calibration passes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from posttrain.config.calibration import CalibrationPass
from posttrain.config.derived import calibration_passes
from posttrain.config.evaluation import Suite
from posttrain.config.load import digest8
from posttrain.config.schema import Config
from posttrain.config.suites import rows_of
from posttrain.store.format_versions import FORMAT_VERSIONS

SUITE, PASS = "suite", "pass"


def wanted_rows(config: Config, kind: str) -> Mapping[str, Suite | CalibrationPass]:
    """Return the suites (`SUITE`) or the calibration passes (`PASS`) of a configuration, by name."""
    return config.evaluation.suites if kind == SUITE else calibration_passes(config)


def suite_folders(config: Config) -> dict[str, Path]:
    """Return the folders of the store with the prompts of evaluation suites, in `heldout.jsonl`, by name."""
    return _folders(config, SUITE)


def pass_folders(config: Config) -> dict[str, Path]:
    """Return the folders of the store with the conversations of calibration passes, by name."""
    return _folders(config, PASS)


def versioned(name: str, *steps: str) -> str:
    """Return a name with the format's version, because users of one store may have different versions of posttrain."""
    versions = [str(FORMAT_VERSIONS[step]) for step in steps]
    return f"{name}-v{'.'.join(versions)}" if set(versions) != {"1"} else name


def _folders(config: Config, kind: str) -> dict[str, Path]:
    return {
        name: Path(config.site.store) / "datasets" / versioned(f"{kind}-{digest8(rows_of(rows))}", f"download_{kind}")
        for name, rows in wanted_rows(config, kind).items()
    }
