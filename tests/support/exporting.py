"""An export from beginning to end, as the two rules make it."""

from __future__ import annotations

from pathlib import Path

from tests.support.folders_in_parts import make_folder

from posttrain.checkpoint.export import FINALIZE_STEP, STEP, HubExport, open_trained
from posttrain.config.schema import Architecture


def export_in_parts(
    checkpoint: Path, origin: Path, arch: Architecture, folder: Path, num_parts: int = 2, num_threads: int = 1
) -> Path:
    """Export to `folder` and return it."""
    trained, inputs = open_trained(checkpoint, origin, arch), {"train": str(checkpoint)}
    making = HubExport(trained.origin, inputs, trained)
    make_folder(making, folder, num_parts, num_threads, (STEP, FINALIZE_STEP), inputs)
    return folder
