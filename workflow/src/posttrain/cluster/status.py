"""Reads the state of a run from its folder, without writing.

A run trains while a live process holds its lease. Other steps are found among this machine's processes; on other nodes
they are jobs in a queue. The rest comes from training's files: metrics, committed checkpoints, the log of attempts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from posttrain.cluster.rollout_queue import QueueStatus, read_queue
from posttrain.cluster.slurm_query import job_is_alive
from posttrain.config.load import read_yaml
from posttrain.report.sinks import read_rows
from posttrain.rl.training.checkpoints import committed_checkpoints
from posttrain.rl.training.lineage import read_lineage
from posttrain.store import Paths, read_json
from posttrain.store.lease import Holder, heartbeat_age_seconds, living_holder

# Reward and speed are averaged over this many steps.
LAST_STEPS = 10


@dataclass(frozen=True)
class RunStatus:
    """The state of one run.

    Args:
        run: The run's name.
        state: "training", "running" (another step), "finished" (with its report), "trained", or "stopped" (the same
            command resumes it).
        step: Number of steps with metrics.
        num_steps: Number of all steps.
        tokens_per_second: Trained tokens per second over the last steps; None before the first.
        reward: Mean reward of the last steps; None before the first.
        checkpoint: Steps finished at the newest committed checkpoint, 0 without one.
        checkpoint_unix: Unix time of its commit.
        num_attempts: Number of ended attempts.
        last_end: Reason of the last attempt's end; "" before the first.
        fork: The run and step of which it is a fork; "" if it began with the model.
        holder: Holder of the run's lease; None if no live process holds it.
        heartbeat_age_seconds: Seconds since the holder's last heartbeat.
        running: The run's steps other than training on this machine, each with its process.
        queue: The groups between engines and trainer; None without a queue.
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
    queue: QueueStatus | None


def read_status(paths: Paths) -> RunStatus:
    """Return a run's state.

    Args:
        paths: The run's; its `experiment.yaml` exists.
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
        queue=read_queue(paths.train, rows, newest),
    )


def running_steps(paths: Paths) -> list[str]:
    """Return a run's running steps on this machine: "evaluate, process 4711"."""
    found = []
    for process in psutil.process_iter():
        try:
            words, folder = process.cmdline(), Path(process.cwd())
            script = next((Path(word).stem for word in words if word.endswith(".py")), "")
            if not script or "--resolved" not in words[:-1]:
                continue
            resolved = read_json(folder / words[words.index("--resolved") + 1])
        except (psutil.Error, OSError, ValueError):
            continue  # it ended, or belongs to another user
        if (folder / resolved["config"]["site"]["results"] / resolved["run"]).resolve() == paths.run.resolve():
            found.append(f"{script}, process {process.pid}")
    return found


def read_attempts(paths: Paths) -> list[dict[str, Any]]:
    """Return the ended attempts of training; an incomplete last line is skipped."""
    if not paths.attempts.exists():
        return []
    return [json.loads(line) for line in paths.attempts.read_text(encoding="utf-8").split("\n")[:-1]]


def find_runs(results: Path) -> list[str]:
    """Return the names of all runs in a folder, oldest first."""
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
