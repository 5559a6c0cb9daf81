"""Trains stored steps again, without engines, and compares the results bit by bit with the run's.

A step depends only on the weights before it, its rollout and its number. So replay loads the newest checkpoint before
the step and the stored rollouts from there on, and trains in a folder of its own, with the run's layout of ranks.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from posttrain.cluster.ranks import Rendezvous, running_ranks
from posttrain.config.derived import uses_engines
from posttrain.config.load import dump_resolved, load_resolved
from posttrain.errors import ConfigError, Problem
from posttrain.report.metrics import without_timings
from posttrain.report.sinks import read_rows
from posttrain.rl.rollout.rollout_store import RolloutStore
from posttrain.rl.training.checkpoints import CheckpointFolder, committed_checkpoints
from posttrain.rl.training.fork import copy_metrics, take_checkpoint
from posttrain.store import Paths, write_text
from posttrain.store.lease import Lease

POLL_SECONDS = 0.1
# Counts over a whole attempt, which a replay of some steps does not reproduce.
NOT_OF_A_STEP = ("train/non_finite_steps",)


@dataclasses.dataclass(frozen=True)
class Replay:
    """Result of a replay.

    Args:
        steps: Numbers of the steps, from 1.
        num_tensors: Number of compared tensors of weights and optimizer; 0: no checkpoint after the last step.
        differences: Descriptions of differing metrics and tensors; empty: all are equal.
    """

    steps: range
    num_tensors: int
    differences: tuple[str, ...]


def replay(paths: Paths, last: int | None = None) -> Replay:
    """Replay steps from the newest checkpoint before a step up to that step.

    Args:
        paths: The run's paths; its stored configuration is used.
        last: The step, from 1; by default the newest.

    Raises:
        ConfigError: The run cannot be replayed here.
        CheckpointError: A checkpoint or a rollout is damaged or missing.
        LeaseHeldError: Another process trains or replays the run.
        RuntimeError: A rank failed.
    """
    if not paths.config.exists():
        remedy = "`posttrain status` lists the runs"
        raise ConfigError([Problem("no-such-run", "run", paths.resolved.run, f"a run in {paths.run.parent}", remedy)])
    with Lease(paths.train, paths.lease):
        return _replay(Paths(dataclasses.replace(paths.resolved, config=load_resolved(paths.config))), last)


def _replay(paths: Paths, last: int | None) -> Replay:
    config, rows = paths.resolved.config, {int(row["step"]): row for row in read_rows(paths.metrics)}
    last = max(rows, default=0) if last is None else last
    if last not in rows:
        trained = f"a step that was trained: 1 to {max(rows, default=0)}"
        raise ConfigError([Problem("no-such-step", "--step", str(last), trained, "name one of them")])
    if config.nodes > 1:
        remedy = "a layout of several nodes cannot be started from here"
        raise ConfigError(
            [Problem("replay-needs-one-node", "nodes", str(config.nodes), "1, to be trained again", remedy)]
        )
    first = max((step for step, _ in committed_checkpoints(paths.checkpoints) if step < last), default=0)
    for step in range(first, last) if uses_engines(config) else ():
        RolloutStore(paths.train / "rollouts").read_step(step, config.rollout.rollout_batch_size)
    folder = paths.train / "replay"
    _prepare(paths, first, folder)
    _train(paths, folder, last)
    again = {int(row["step"]): row for row in read_rows(folder / "metrics.jsonl")}
    steps = range(first + 1, last + 1)
    metrics = [found for step in steps for found in _differing_metrics(rows[step], again[step])]
    num_tensors, tensors = _differing_tensors(paths.checkpoints, folder / "checkpoints", last)
    return Replay(steps, num_tensors, (*metrics, *tensors))


def _prepare(paths: Paths, first: int, folder: Path) -> None:
    """Create the folder with the run's checkpoint, earlier metrics, rollouts and configuration."""
    config = paths.resolved.config
    shutil.rmtree(folder, ignore_errors=True)
    checkpoints = CheckpointFolder(folder / "checkpoints", config.trainer.keep_checkpoints)
    (folder / "rollouts").symlink_to((paths.train / "rollouts").absolute())
    copy_metrics(paths.metrics, folder / "metrics.jsonl", first)
    if first:
        take_checkpoint(paths.checkpoints / checkpoints.path(first).name, checkpoints, first)
    logging = dataclasses.replace(config.logging, wandb=False, keep_rollouts=True, profile_steps=[])
    resolved = dataclasses.replace(paths.resolved, config=dataclasses.replace(config, logging=logging))
    write_text(folder / "config.resolved.yaml", dump_resolved(resolved))


def _train(paths: Paths, folder: Path, last: int) -> None:
    """Run the trainer's ranks until they end.

    Raises:
        RuntimeError: A rank failed.
    """
    arguments = {
        "--config": folder / "config.resolved.yaml",
        "--run-name": paths.resolved.run,
        "--run-folder": folder,
        "--torch-dist": paths.torch_dist,
        "--model-folder": paths.hf_patched,
        "--dataset": paths.dataset,
        **({"--data-check": paths.data_check} if paths.data_check.exists() else {}),
        "--until": last,
    }
    command = [str(word) for pair in arguments.items() for word in pair]
    nobody = Rendezvous("", 0)  # ranks on one machine use a file
    with running_ranks(paths.resolved.config, 0, command, nobody, folder, engine_secret="") as ranks:
        is_running = True
        while is_running:
            is_running = any(rank.process.poll() is None for rank in ranks)
            if endings := [ending for rank in ranks if (ending := rank.ending())]:
                raise RuntimeError(min(endings, key=lambda ending: ending.order).reason)
            time.sleep(POLL_SECONDS)


def _differing_metrics(wrote: Mapping[str, float], again: Mapping[str, float]) -> Iterator[str]:
    # Evaluations need engines, which a replay does not have.
    wrote = {name: value for name, value in without_timings(wrote).items() if not name.startswith("evaluation/")}
    again = without_timings(again)
    for name in sorted({*wrote, *again} - {*NOT_OF_A_STEP}):
        if wrote.get(name) != again.get(name):
            yield f"step {wrote['step']:.0f}: {name} {wrote.get(name)!r}, trained again {again.get(name)!r}"


def _differing_tensors(wrote: Path, again: Path, step: int) -> tuple[int, list[str]]:
    """Return the number of compared tensors and those that differ; (0, []) if a checkpoint is missing."""
    # Imported here, because the driver's small environment has no torch.
    import torch

    from posttrain.checkpoint.formats.torch_dist_reader import TorchDistReader

    folders = [CheckpointFolder(folder, 1).path(step) for folder in (wrote, again)]
    if not all(folder.exists() for folder in folders):
        return 0, []
    ours, theirs = map(TorchDistReader, folders)
    missing = {*ours.keys} ^ {*theirs.keys}
    differing = [key for key in ours.keys if key not in missing and not torch.equal(ours.read(key), theirs.read(key))]
    return len(ours.keys), [f"after step {step}: {key}" for key in (*differing, *sorted(missing))]
