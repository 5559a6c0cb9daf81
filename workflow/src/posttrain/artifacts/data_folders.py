"""Where rows lie that are not trained on: prompts of evaluation suites, conversations of calibration passes."""

from __future__ import annotations

from pathlib import Path

from posttrain.artifacts.format_versions import FORMAT_VERSIONS
from posttrain.config.derived import calibration_passes
from posttrain.config.load import digest8
from posttrain.config.schema import Config
from posttrain.config.suites import rows_of


def suite_folders(config: Config) -> dict[str, Path]:
    """Return the folders of the store with the prompts of evaluation suites, in `heldout.jsonl`, by name."""
    return {
        name: Path(config.site.store) / "datasets" / versioned(f"suite-{digest8(rows_of(suite))}", "download_suite")
        for name, suite in config.evaluation.suites.items()
    }


def pass_folders(config: Config) -> dict[str, Path]:
    """Return the folders of the store with the conversations of calibration passes, by name."""
    return {
        name: Path(config.site.store) / "datasets" / versioned(f"pass-{digest8(vars(wanted))}", "download_pass")
        for name, wanted in calibration_passes(config).items()
    }


def versioned(name: str, *steps: str) -> str:
    """Return a name that later formats do not share: users of one store may have different versions of us."""
    versions = [str(FORMAT_VERSIONS[step]) for step in steps]
    return f"{name}-v{'.'.join(versions)}" if set(versions) != {"1"} else name
