"""Starts the ranks of a rehearsal where a CUDA build of torch is, and reads what they have done."""

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

# Where that environment is, if it is not in the clone.
VARIABLE = "POSTTRAIN_REHEARSAL_ENV"
# Of a rank's own variables those that its Python asks for; the others are for what is not there.
ASKED_PREFIXES = ("NVTE_", "CUDA_DEVICE_MAX_CONNECTIONS")
# What the shell says of another Python, and of devices that are there.
FORGOTTEN = ("PYTHONHOME", "VIRTUAL_ENV", "CUDA_VISIBLE_DEVICES")


def require_rehearsable(resolved: Resolved) -> None:
    """Check what can be known before ranks start.

    Raises:
        ConfigError: There are no GPUs of NVIDIA's to rehearse for, no environment to do it in, or lengths that there
            cannot be.
    """
    if resolved.config.hardware.device != "cuda":
        found = f"{resolved.config.hardware.name}, which has no GPUs"
        raise ConfigError([Problem("hardware", found, "one with GPUs", "train: nothing is left to rehearse")])
    if not resolved.config.hardware.compute_capability:
        found = f"none for {resolved.config.hardware.name}"
        remedy = "set it; a GPU that is not NVIDIA's cannot be rehearsed: its kernels and libraries are others"
        raise ConfigError([Problem("hardware.compute_capability", found, "that of an NVIDIA GPU, such as 9.0", remedy)])
    sampled_shapes_of(resolved)
    home()


def rehearse(resolved: Resolved, library: Path | None = None) -> dict[str, Any]:
    """Run two steps of some ranks, and return what was found.

    Args:
        resolved: The configuration, which `require_rehearsable` takes.
        library: A folder in front of this library, for tests of one that has a fault.

    Raises:
        ConfigError: There is no environment to do it in.
        RuntimeError: No rank has begun.
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
        # Nothing may be said of ranks that somebody, or the system for want of memory, has killed.
        raise RuntimeError(f"ranks {', '.join(map(str, sorted(missing)))} of the rehearsal were killed: run it again")
    return outcome(resolved, rehearsed_config(resolved), traces, time.perf_counter() - started)


def home() -> Path:
    """Return where the environment is in which ranks are rehearsed.

    Raises:
        ConfigError: Nobody has made it.
    """
    folder = Path(os.environ.get(VARIABLE) or CONFIG_DIR.parent / ".envs" / "rehearsal").absolute()
    if not (folder / ".ready").exists():
        allowed = "an environment with a CUDA build of torch"
        raise ConfigError([Problem(VARIABLE, str(folder), allowed, "`make env-rehearsal` makes it")])
    return folder


def simulated(config: Config, folder: Path) -> dict[str, str]:
    """Return the environment of a process that finds the GPUs of a configuration.

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
        # A rank that waits longer than others compute is nothing to warn of.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
        # Values of up to 16 MiB (`device.MIRROR_BYTES`) come and go with every operation: their pages are kept. Weights
        # that are made on the host are many ranks' at a time: the system gets them back.
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
