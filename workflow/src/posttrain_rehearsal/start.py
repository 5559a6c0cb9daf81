"""Starts the ranks of a rehearsal in an environment with a CUDA build of torch, and reads their traces."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from posttrain.config.command_line import CONFIG_DIR
from posttrain.config.load import Resolved
from posttrain.config.schema import Config
from posttrain.errors import ConfigError, Problem
from posttrain.plan.flags.environment import trainer_environment
from posttrain.plan.flags.flag import as_environment
from posttrain.store.resolved_file import write_resolved
from posttrain_rehearsal.outcome import outcome
from posttrain_rehearsal.rank_subset import is_quick, members, rehearsed_config
from posttrain_rehearsal.sampled_shapes import sampled_shapes_of
from posttrain_rehearsal.traces import read_traces

# Folder of that environment, if it is outside of the clone.
VARIABLE = "POSTTRAIN_REHEARSAL_ENV"
# Variables of a rank that its Python code reads; the others are for hardware that does not exist here.
ASKED_PREFIXES = ("NVTE_", "CUDA_DEVICE_MAX_CONNECTIONS")
# Variables of the shell about another Python, or about real devices.
FORGOTTEN = ("PYTHONHOME", "VIRTUAL_ENV", "CUDA_VISIBLE_DEVICES")


def require_rehearsable(resolved: Resolved) -> None:
    """Check requirements that can be checked before ranks start.

    Raises:
        ConfigError: The hardware has no NVIDIA GPUs, the environment is missing, or lengths are invalid.
    """
    if resolved.config.hardware.device != "cuda":
        found = f"{resolved.config.hardware.name}, which has no GPUs"
        raise ConfigError(
            [Problem("nothing-to-rehearse", "hardware", found, "one with GPUs", "train: nothing is left to rehearse")]
        )
    if not resolved.config.hardware.compute_capability:
        found = f"none for {resolved.config.hardware.name}"
        remedy = "set it; a GPU that is not NVIDIA's cannot be rehearsed: its kernels and libraries are others"
        allowed = "that of an NVIDIA GPU, such as 9.0"
        raise ConfigError([Problem("kernel-needs-nvidia", "hardware.compute_capability", found, allowed, remedy)])
    sampled_shapes_of(resolved)
    home()


def rehearse(resolved: Resolved, library: Path | None = None) -> dict[str, Any]:
    """Run two steps on some ranks, and return the result.

    Args:
        resolved: The configuration, already checked by `require_rehearsable`.
        library: Folder to import before this library, for tests of seeded faults.

    Raises:
        ConfigError: The environment is missing.
        RuntimeError: No rank started.
    """
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _run_gang(write_resolved(resolved, folder / "resolved"), folder, resolved.config, library)
        traces = read_traces(folder)
    if not traces:
        raise RuntimeError("no rank of the rehearsal has left a trace; what it printed stands above")
    missing = {*members(resolved.config, is_quick(resolved))} - {trace.rank for trace in traces}
    if missing and not any(trace.error for trace in traces):
        # Without the trace of a killed rank (killed by a user, or for memory) there is no result.
        raise RuntimeError(f"ranks {', '.join(map(str, sorted(missing)))} of the rehearsal were killed: run it again")
    return outcome(resolved, rehearsed_config(resolved), traces, time.perf_counter() - started)


def home() -> Path:
    """Return the folder of the environment for rehearsed ranks.

    Raises:
        ConfigError: It was not created.
    """
    folder = Path(os.environ.get(VARIABLE) or CONFIG_DIR.parent / ".envs" / "rehearsal").absolute()
    if not (folder / ".ready").exists():
        allowed = "an environment with a CUDA build of torch"
        raise ConfigError(
            [Problem("environment-missing", VARIABLE, str(folder), allowed, "`make env-rehearsal` makes it")]
        )
    return folder


def simulated(config: Config, folder: Path) -> dict[str, str]:
    """Return the environment of a process that sees a configuration's simulated GPUs.

    Args:
        config: The resolved configuration.
        folder: See `home`.
    """
    environment = {name: value for name, value in os.environ.items() if name not in FORGOTTEN}
    asked = {
        name: value
        for name, value in as_environment(trainer_environment(config)).items()
        if name.startswith(ASKED_PREFIXES)
    }
    libraries, hardware = folder / "fake", config.hardware
    return {
        **environment,
        **asked,
        "LD_LIBRARY_PATH": str(libraries),
        "LD_PRELOAD": str(libraries / "libfakecuda.so"),
        "SIMULATED_GIB": str(int(hardware.memory_gib_per_gpu)),
        "SIMULATED_CAPABILITY": hardware.compute_capability.replace(".", ""),
        "TORCHDYNAMO_DISABLE": "1",
        # Ranks may wait longer for others than torch expects; suppress its warnings.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
        # Values of up to 16 MiB (`device.MIRROR_BYTES`) are allocated by every operation, so their pages are kept.
        # Weights created on the host are large and on many ranks at once, so their pages are returned to the system.
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
        "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
        "PYTHONWARNINGS": "ignore",
    }


def _run_gang(path: Path, folder: Path, config: Config, library: Path | None) -> None:
    environment = simulated(config, home()) | {"TMPDIR": str(folder)}
    if library:
        environment["PYTHONPATH"] = str(library)
    words = [str(home() / "bin" / "python"), "-m", "posttrain_rehearsal.gang", str(path), str(folder)]
    subprocess.run(words, env=environment, check=False, stdout=sys.stderr)
