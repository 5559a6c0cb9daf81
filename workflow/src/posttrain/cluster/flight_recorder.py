"""What torch remembers of a rank's collectives over NCCL: where it writes it, how it is asked, and how people are told.

A rank that waits for its GPU hears no signal: torch's own thread reads a pipe, and writes the record. Over gloo there
is none. Names are those of torch 2.14.1: `TORCH_FR_DUMP_TEMP_FILE` in `FlightRecorder.cpp`, the pipe in
`ProcessGroupNCCL.hpp`, both in `torch/csrc/distributed/c10d`; torch puts the rank behind each.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from posttrain.config.schema import Config

PREFIX, PIPE = "nccl_trace_rank_", "pipe-"
# torch looks into the pipe once a second, and writes some hundred kilobytes.
ANSWER_SECONDS = 4.0


def recorder_environment(config: Config, own_folder: Path, folder: Path) -> dict[str, str]:
    """Return where a rank's torch listens and writes.

    Args:
        config: The resolved configuration; on CPUs nothing is recorded.
        own_folder: On the node's own disk: gets the pipes.
        folder: Gets the records.
    """
    if config.hardware.device != "cuda":
        return {}
    return {
        "TORCH_FR_DUMP_TEMP_FILE": str(folder / PREFIX),
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(own_folder / PIPE),
    }


def ask_for_record(own_folder: Path, rank: int) -> bool:
    """Have torch dump a rank's flight record; returns whether a process listens."""
    try:
        descriptor = os.open(own_folder / f"{PIPE}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # no pipe, or nobody has opened its other end
        return False
    try:
        return os.write(descriptor, b"1") == 1
    finally:
        os.close(descriptor)


def record_of(folder: Path, rank: int) -> Path | None:
    """Return what torch has written of a rank, because it was asked or because a collective took too long."""
    path = folder / f"{PREFIX}{rank}"
    return path if path.exists() and path.stat().st_size else None


def describe_records(records: Sequence[Path]) -> str:
    """Return where records of one folder are and how they are read; empty where there are none."""
    if not records:
        return ""
    folder = records[0].parent
    names = records[0].name if len(records) == 1 else f"{PREFIX}* ({len(records)} files)"
    return f"NCCL's last calls are in {folder / names}, which `torchfrtrace --prefix {PREFIX} {folder}` compares"
