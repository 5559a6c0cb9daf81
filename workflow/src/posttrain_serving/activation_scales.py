"""Checks that a checkpoint in NVFP4 has measured activation scales."""

from __future__ import annotations

import os
from pathlib import Path

from posttrain.checkpoint.formats.safetensors_io import CheckpointReader
from posttrain.errors import ConfigError, Problem

# Set it to 1 to serve a checkpoint without calibration.
UNCALIBRATED_VARIABLE = "POSTTRAIN_SERVE_UNCALIBRATED"
_SCALE = ".input_scale"


def check_scales(folder: Path) -> None:
    """Reject a checkpoint whose activation scales are all 1, which means that they were never measured.

    Args:
        folder: A checkpoint in NVFP4; without shards, nothing is checked.

    Raises:
        CheckpointError: A shard is missing or truncated; the message names it.
        ConfigError: All of its `input_scale` are 1.
    """
    if not any(folder.glob("*.safetensors")):
        return
    reader = CheckpointReader(folder)
    names = [name for name in reader.names if name.endswith(_SCALE)]
    is_measured = not names or any(float(reader.tensor(name)) != 1 for name in names)
    if is_measured or os.environ.get(UNCALIBRATED_VARIABLE) == "1":
        return
    allowed = "scales that a calibration has measured: with 1, small activations are lost"
    remedy = f"make it with `snakemake finalize_serving`, which calibrates, or set {UNCALIBRATED_VARIABLE}=1"
    raise ConfigError(
        [
            Problem(
                "scales-not-calibrated", "checkpoint", f"{folder}: all {len(names)} input_scale are 1", allowed, remedy
            )
        ]
    )
