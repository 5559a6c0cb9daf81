"""torch's flight recorder of NCCL collectives: its output path, how to trigger a dump, and how to read it.

A rank that waits for its GPU handles no signal, so one of torch's threads reads a pipe and writes the record. Gloo has
no recorder. Names are those of torch 2.14.1: `TORCH_FR_DUMP_TEMP_FILE` in `FlightRecorder.cpp`, the pipe in
`ProcessGroupNCCL.hpp`, both in `torch/csrc/distributed/c10d`; torch appends the rank to each.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from posttrain.config.schema import Config

PREFIX, PIPE = "nccl_trace_rank_", "pipe-"
# torch polls the pipe once a second, and writes some hundred kilobytes.
ANSWER_SECONDS = 4.0


def recorder_environment(config: Config, own_folder: Path, folder: Path) -> dict[str, str]:
    """Return the environment variables that set a rank's pipe and record path.

    Args:
        config: The resolved configuration; empty on CPUs, which have no recorder.
        own_folder: On the node's own disk; gets the pipes.
        folder: Gets the records.
    """
    if config.hardware.device != "cuda":
        return {}
    return {
        "TORCH_FR_DUMP_TEMP_FILE": str(folder / PREFIX),
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(own_folder / PIPE),
    }


def ask_for_record(own_folder: Path, rank: int) -> bool:
    """Trigger a dump of a rank's flight record; return whether a process reads the pipe."""
    try:
        descriptor = os.open(own_folder / f"{PIPE}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # no pipe, or no reader
        return False
    try:
        return os.write(descriptor, b"1") == 1
    finally:
        os.close(descriptor)


def record_of(folder: Path, rank: int) -> Path | None:
    """Return the path of a rank's record, written on request or after a collective's timeout; None without one."""
    path = folder / f"{PREFIX}{rank}"
    return path if path.exists() and path.stat().st_size else None


def describe_records(records: Sequence[Path]) -> str:
    """Return a message with the records' folder and the command that reads them; empty without records."""
    if not records:
        return ""
    folder = records[0].parent
    names = records[0].name if len(records) == 1 else f"{PREFIX}* ({len(records)} files)"
    return f"NCCL's last calls are in {folder / names}, which `torchfrtrace --prefix {PREFIX} {folder}` compares"
