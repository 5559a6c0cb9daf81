"""Where a run stands, read from its folder; nothing is written, so a run that is alive does not notice.

A run trains while somebody alive holds its lease. The steps before and after are found among the processes of this
machine; those on other nodes are jobs of a queue. The rest is what training leaves on disk anyway: metrics, committed
checkpoints, the log of attempts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from posttrain.cluster.slurm_query import job_is_alive
from posttrain.config.load import read_yaml
from posttrain.report.sinks import read_rows
from posttrain.rl.training.checkpoints import committed_checkpoints
from posttrain.rl.training.lineage import read_lineage
from posttrain.store import Paths, read_json
from posttrain.store.lease import Holder, heartbeat_age_seconds, living_holder

# Steps of which reward and speed are shown.
LAST_STEPS = 10


@dataclass(frozen=True)
class RunStatus:
    """Where one run stands.

    Args:
        run: Its name.
        state: "training", "running" (another step), "finished" (with its report), "trained", or "stopped" (the same
            command resumes it).
        step: Steps with metrics.
        num_steps: Steps in all.
        tokens_per_second: Trained tokens per second over the last steps; None before the first.
        reward: Mean reward of the last steps; None before the first.
        checkpoint: Finished steps of the newest committed checkpoint, 0 without one.
        checkpoint_unix: When it was committed.
        num_attempts: Ended attempts.
        last_end: Why the last of them ended; "" before the first.
        fork: The run and step that it was forked from; "" where it began with the model.
        holder: Who holds the run's lease; None where nobody alive does.
        heartbeat_age_seconds: Since the holder's last sign of life.
        running: Steps other than training that run for it on this machine, each with its process.
    """

    run: str
    state: str
    step: int
    num_steps: int
    tokens_per_second: float | None
    reward: float | None
    checkpoint: int
    checkpoint_unix: float | None
    num_attempts: int
    last_end: str
    fork: str
    holder: Holder | None
    heartbeat_age_seconds: float | None
    running: Sequence[str]


def read_status(paths: Paths) -> RunStatus:
    """Return where a run stands.

    Args:
        paths: Of the run; its `experiment.yaml` exists.
    """
    rows, attempts = read_rows(paths.metrics), read_attempts(paths)
    checkpoints = committed_checkpoints(paths.checkpoints)
    newest, folder = checkpoints[-1] if checkpoints else (0, None)
    holder = living_holder(paths.lease, job_is_alive=job_is_alive)
    running = [] if holder else running_steps(paths)
    return RunStatus(
        run=paths.run.name,
        state=_state(paths, holder, running),
        step=int(rows[-1]["step"]) if rows else 0,
        num_steps=read_yaml(paths.experiment)["training"]["num_steps"],
        tokens_per_second=_speed(rows[-LAST_STEPS:]),
        reward=_mean([row["rollout/reward_mean"] for row in rows[-LAST_STEPS:] if "rollout/reward_mean" in row]),
        checkpoint=newest,
        checkpoint_unix=folder.stat().st_mtime if folder else None,
        num_attempts=len(attempts),
        last_end=attempts[-1]["reason"] if attempts else "",
        fork=_fork_of(paths),
        holder=holder,
        heartbeat_age_seconds=heartbeat_age_seconds(paths.lease, holder) if holder else None,
        running=running,
    )


def running_steps(paths: Paths) -> list[str]:
    """Return the steps that run for a run on this machine: "evaluate, process 4711"."""
    found = []
    for process in psutil.process_iter():
        try:
            words, folder = process.cmdline(), Path(process.cwd())
            script = next((Path(word).stem for word in words if word.endswith(".py")), "")
            if not script or "--resolved" not in words[:-1]:
                continue
            resolved = read_json(folder / words[words.index("--resolved") + 1])
        except (psutil.Error, OSError, ValueError):
            continue  # it has ended, or is somebody else's
        if (folder / resolved["config"]["site"]["results"] / resolved["run"]).resolve() == paths.run.resolve():
            found.append(f"{script}, process {process.pid}")
    return found


def read_attempts(paths: Paths) -> list[dict[str, Any]]:
    """Return the ended attempts of training; a last line that is being written is left out."""
    if not paths.attempts.exists():
        return []
    return [json.loads(line) for line in paths.attempts.read_text(encoding="utf-8").split("\n")[:-1]]


def find_runs(results: Path) -> list[str]:
    """Return the names of all runs below a folder, in the order of their begin."""
    begun = results.glob("*/experiment.yaml")
    return [path.parent.name for path in sorted(begun, key=lambda path: path.stat().st_mtime)]


def _state(paths: Paths, holder: Holder | None, running: Sequence[str]) -> str:
    if holder or running:
        return "training" if holder else "running"
    if paths.summary.exists():
        return "finished"
    return "trained" if paths.train_done.exists() else "stopped"


def _fork_of(paths: Paths) -> str:
    lineage = read_lineage(paths.fork_receipt)
    return f"{lineage[-1]['run']}@{lineage[-1]['step']}" if lineage else ""


def _speed(rows: Sequence[dict[str, float]]) -> float | None:
    tokens = math.fsum(row.get("train/num_tokens", 0.0) for row in rows)
    seconds = math.fsum(row.get("perf/step_seconds", 0.0) for row in rows)
    return tokens / seconds if seconds else None


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
