"""An export from beginning to end, as the two rules make it."""

from __future__ import annotations

from pathlib import Path

from posttrain.artifacts import building
from posttrain.checkpoint.export import finalize_folder, open_export, write_part
from posttrain.config.schema import Architecture


def export_in_parts(
    checkpoint: Path, origin: Path, arch: Architecture, folder: Path, num_parts: int = 2, num_threads: int = 1
) -> Path:
    """Export to `folder` and return it."""
    opened, made = open_export(checkpoint, origin, arch), {}
    for part in range(num_parts):
        shards = write_part(opened, {"train": str(checkpoint)}, folder, part, num_parts, num_threads)
        made |= {shard.record.path: shard for shard in shards}
    with building(folder) as partial:
        finalize_folder(opened.origin, made, partial)
    return folder
