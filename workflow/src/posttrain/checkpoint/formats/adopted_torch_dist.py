"""Checks that an existing torch_dist checkpoint is complete and belongs to this model."""

from __future__ import annotations

from pathlib import Path

from posttrain.checkpoint.formats.shard_writer import TORCH_DTYPES
from posttrain.checkpoint.formats.torch_dist import FORMAT_FILES
from posttrain.checkpoint.formats.torch_dist_format import COMMON_NAME
from posttrain.checkpoint.formats.torch_dist_reader import TorchDistReader
from posttrain.checkpoint.hub.listed_files import ListedFile
from posttrain.checkpoint.hub.local_folder import place_files
from posttrain.checkpoint.param_names import by_key
from posttrain.checkpoint.quantization.tiling import find_misfit
from posttrain.config.schema import Architecture
from posttrain.errors import CheckpointError, ConfigError, Problem
from posttrain.store import FileRecord, RelativeName

# About a terminal's height; with another model, all tensors differ.
MAX_NAMED_TENSORS = 20


def check_adoptable(folder: Path, arch: Architecture) -> list[str]:
    """Check the names and shapes of all tensors, and that every file exists; reads no tensor.

    Args:
        folder: Has `.metadata`; is never written to.
        arch: Dimensions of the model.

    Returns:
        The checkpoint's files, sorted.

    Raises:
        ConfigError: The folder does not exist.
        CheckpointError: Lists tensors that are missing, not covered by the chunks, or of another shape or precision; or
            files that are missing or too short.
    """
    if not folder.is_dir():
        remedy = "check the path and that it is mounted here; an iter_ folder is given itself, not its parent"
        raise ConfigError(
            [
                Problem(
                    "no-such-checkpoint", "download.torch_dist_folder", str(folder), "a torch_dist checkpoint", remedy
                )
            ]
        )
    reader = TorchDistReader(folder)
    reader.check_files()
    needed = [name for name in FORMAT_FILES if name != COMMON_NAME or not reader.holds_common_state]
    if lacking := [name for name in needed if not (folder / name).is_file()]:
        raise CheckpointError(
            "files-missing", f"{folder}: {', '.join(lacking)} missing; not a torch_dist checkpoint of Megatron"
        )
    if wrong := _differences(reader, arch):
        raise CheckpointError(
            "tensors-differ-from-model",
            f"{folder}: not a checkpoint of this model ({len(wrong)} tensors differ):\n  "
            + "\n  ".join(wrong[:MAX_NAMED_TENSORS]),
        )
    return sorted(path.name for path in folder.iterdir() if path.name in FORMAT_FILES or path.suffix == ".distcp")


def _differences(reader: TorchDistReader, arch: Architecture) -> list[str]:
    wrong = []
    for key, placements in by_key(arch).items():
        shape, dtype = placements[0].global_shape, TORCH_DTYPES[placements[0].dtype]
        if key not in reader:
            wrong.append(f"{key}: missing")
        elif (reader.shape(key), reader.dtype(key)) != (shape, dtype):
            found = f"{reader.dtype(key)} {list(reader.shape(key))}"
            wrong.append(f"{key}: {found}, expected {dtype} {list(shape)}")
        elif misfit := find_misfit(shape, reader.chunks(key)):
            wrong.append(f"{key}: {misfit} of {list(shape)}")
    return wrong


def place_torch_dist(origin: Path, folder: Path, names: list[str], num_workers: int) -> tuple[FileRecord, ...]:
    """Link or copy a checkpoint's files into `folder`; return their records, sorted by path."""
    return place_files(
        origin, folder, [ListedFile(RelativeName(name), (origin / name).stat().st_size) for name in names], num_workers
    )
