"""Run two training steps of a configuration, at full size and without a GPU, and say what would fail on one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from posttrain.artifacts import Paths, write_json, write_text
from posttrain.artifacts.resolved_file import write_resolved
from posttrain.config.command_line import CONFIG_DIR
from posttrain.errors import ConfigError, Problem, raise_if_any
from posttrain.forecast.plan_page import plan_title
from posttrain.rehearsal.members import shallow
from posttrain.rehearsal.outcome import judge, outcome, render
from posttrain.rehearsal.traces import read_traces

ENVIRONMENT = "POSTTRAIN_REHEARSAL_ENV"


def main(paths: Paths) -> None:
    """Rehearse, write JSON and page, and end with the problems."""
    resolved = paths.resolved
    if resolved.config.hardware.device != "cuda":
        found = f"{resolved.config.hardware.name}, which has no GPUs"
        raise ConfigError([Problem("hardware", found, "one with GPUs", "train: nothing is left to rehearse")])
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        _run_gang(write_resolved(resolved, Path(folder) / "resolved"), Path(folder))
        traces = read_traces(Path(folder))
    if not traces:
        raise RuntimeError("no rank of the rehearsal has left a trace; what it printed stands above")
    found_out = outcome(resolved, shallow(resolved.config), traces, time.perf_counter() - started)
    page = paths.rehearsal.with_suffix(".html")
    write_text(page, render(found_out, plan_title(resolved.config)))
    write_json(paths.rehearsal, found_out)
    judge(found_out).print()
    print(f"rehearsal: {page.resolve()}", flush=True)
    raise_if_any([Problem(**problem) for problem in found_out["problems"]])


def _run_gang(resolved: Path, folder: Path) -> None:
    """Start the ranks where a CUDA build of torch is."""
    home = Path(os.environ.get(ENVIRONMENT) or CONFIG_DIR.parent / ".envs" / "rehearsal").absolute()
    if not (home / ".ready").exists():
        raise ConfigError(
            [Problem(ENVIRONMENT, str(home), "an environment with a CUDA build of torch", "`make env-rehearsal`")]
        )
    libraries = home / "fake"
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "VIRTUAL_ENV")}
    environment |= {
        "LD_LIBRARY_PATH": str(libraries),
        "LD_PRELOAD": str(libraries / "libfakecuda.so"),
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    words = [str(home / "bin" / "python"), "-m", "posttrain.rehearsal.gang", str(resolved), str(folder)]
    subprocess.run(words, env=environment, check=False, stdout=sys.stderr)
