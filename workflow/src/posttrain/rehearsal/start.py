"""Starts the ranks of a rehearsal where a CUDA build of torch is, and reads what they have done."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from posttrain.artifacts.resolved_file import write_resolved
from posttrain.config.command_line import CONFIG_DIR
from posttrain.config.load import Resolved
from posttrain.errors import ConfigError, Problem
from posttrain.rehearsal.members import members, shallow
from posttrain.rehearsal.outcome import outcome
from posttrain.rehearsal.traces import read_traces

# Where that environment is, if it is not in the clone.
VARIABLE = "POSTTRAIN_REHEARSAL_ENV"


def rehearse(resolved: Resolved, library: Path | None = None) -> dict[str, Any]:
    """Run two steps of some ranks, and return what was found.

    Args:
        resolved: The configuration.
        library: A folder in front of this library, for tests of one that has a fault.

    Raises:
        ConfigError: There are no GPUs to rehearse for, or no environment to do it in.
        RuntimeError: No rank has begun.
    """
    if resolved.config.hardware.device != "cuda":
        found = f"{resolved.config.hardware.name}, which has no GPUs"
        raise ConfigError([Problem("hardware", found, "one with GPUs", "train: nothing is left to rehearse")])
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _run_gang(write_resolved(resolved, folder / "resolved"), folder, resolved, library)
        traces = read_traces(folder)
    if not traces:
        raise RuntimeError("no rank of the rehearsal has left a trace; what it printed stands above")
    missing = {*members(resolved.config)} - {trace.rank for trace in traces}
    if missing and not any(trace.error for trace in traces):
        # Nothing may be said of ranks that somebody, or the system for want of memory, has killed.
        raise RuntimeError(f"ranks {', '.join(map(str, sorted(missing)))} of the rehearsal were killed: run it again")
    return outcome(resolved, shallow(resolved.config), traces, time.perf_counter() - started)


def _run_gang(path: Path, folder: Path, resolved: Resolved, library: Path | None) -> None:
    home = Path(os.environ.get(VARIABLE) or CONFIG_DIR.parent / ".envs" / "rehearsal").absolute()
    if not (home / ".ready").exists():
        allowed = "an environment with a CUDA build of torch"
        raise ConfigError([Problem(VARIABLE, str(home), allowed, "`make env-rehearsal` makes it")])
    libraries = home / "fake"
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "VIRTUAL_ENV")}
    environment |= {
        "LD_LIBRARY_PATH": str(libraries),
        "LD_PRELOAD": str(libraries / "libfakecuda.so"),
        "SIMULATED_GIB": str(int(resolved.config.hardware.memory_gib_per_gpu)),
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    if library:
        environment["PYTHONPATH"] = str(library)
    words = [str(home / "bin" / "python"), "-m", "posttrain.rehearsal.gang", str(path), str(folder)]
    subprocess.run(words, env=environment, check=False, stdout=sys.stderr)
