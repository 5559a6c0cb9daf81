"""Show the state of runs: step, speed, reward, last checkpoint, attempts, holder, queued groups, and queued jobs."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from posttrain.cluster.queue import QueuedJob, queued_jobs
from posttrain.cluster.status import RunStatus, find_runs, read_status
from posttrain.config.fields import did_you_mean
from posttrain.config.load import Resolved
from posttrain.errors import ConfigError, Problem
from posttrain.readable import format_number, format_seconds
from posttrain.store import Paths


def main(paths: Paths) -> None:
    """Show every run, or the named one; write nothing."""
    resolved, results = paths.resolved, paths.run.parent
    runs = choose(find_runs(results), resolved, results, is_named=bool(resolved.request.get("run")))
    found = [read_status(Paths(dataclasses.replace(resolved, run=name))) for name in runs]
    show_runs(found, results)
    show_groups(found)
    show_queue(queued_jobs(resolved.config.site.launcher, Path.cwd()))


def choose(runs: list[str], resolved: Resolved, results: Path, is_named: bool) -> list[str]:
    """Return all runs, or the run of `--config run=`."""
    if not is_named:
        return runs
    if resolved.run in runs:
        return [resolved.run]
    remedy = did_you_mean(resolved.run, runs) or "leave run= out to see all"
    raise ConfigError(
        [Problem("no-such-run", "run", repr(resolved.run), ", ".join(runs) or f"none is in {results}", remedy)]
    )


def show_runs(found: list[RunStatus], results: Path) -> None:
    """Print one row per run on stdout."""
    if not found:
        print(f"no run in {results}")
        return
    table = Table("run", "state", show_edge=False, header_style="bold")
    for name in ("step", "tokens/s", "reward", "checkpoint", "attempts"):
        table.add_column(name, justify="right")
    table.add_column("who works on it, or how the last attempt ended")
    for status in found:
        table.add_row(
            f"{status.run}\n  fork of {status.fork}" if status.fork else status.run,
            status.state,
            f"{status.step} of {status.num_steps}",
            format_number(status.tokens_per_second),
            format_number(status.reward),
            describe_checkpoint(status),
            str(status.num_attempts),
            describe_holder(status),
        )
    Console(width=160).print(table)


def show_groups(found: list[RunStatus]) -> None:
    """Print one row per run that has a queue of groups between engines and trainer, if any."""
    queues = [(status.run, status.queue) for status in found if status.queue]
    if not queues:
        return
    table = Table("run", show_edge=False, header_style="bold")
    for name in ("groups ready", "running at the last step"):
        table.add_column(name, justify="right")
    table.add_column("age of its tokens in updates")
    table.add_column("groups dropped")
    for run, queue in queues:
        ages = ", ".join(f"{age}: {share:.0%}" for age, share in sorted(queue.ages.items()))
        dropped = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in queue.dropped.items())
        running = format_number(queue.num_running)
        table.add_row(run, format_number(queue.num_ready), running, ages or "–", dropped or "none")
    Console(width=160).print(table)


def describe_checkpoint(status: RunStatus) -> str:
    """Return the step and the age of the newest checkpoint as text."""
    if status.checkpoint_unix is None:
        return "none"
    return f"step {status.checkpoint}, {format_seconds(time.time() - status.checkpoint_unix)} ago"


def describe_holder(status: RunStatus) -> str:
    """Return the run's holder, or the outcome of its last attempt."""
    if status.running:
        return "; ".join(status.running)
    if status.holder is None:
        return status.last_end.partition("\n")[0]
    return f"{status.holder}, alive {format_seconds(status.heartbeat_age_seconds)} ago"


def show_queue(jobs: list[QueuedJob]) -> None:
    """Print the jobs that were submitted from here, if any."""
    if not jobs:
        return
    table = Table("job", "state", "has run", "nodes", "waits for", "rule", show_edge=False, header_style="bold")
    for job in jobs:
        table.add_row(*dataclasses.astuple(job))
    Console(width=160).print(table)
