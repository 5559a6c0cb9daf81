"""A run that has begun, as files: no model, no training; what status, attach and forks read of one."""

from __future__ import annotations

import json
from pathlib import Path

from posttrain.config.load import dump_resolved, dump_yaml
from posttrain.plan.resolve import resolve
from posttrain.rl.training.checkpoints import CheckpointFolder
from posttrain.store import Paths, write_json, write_text

CONFIG_DIR = Path(__file__).resolve().parents[2] / "config"
WEIGHTS = {"torch_dist-12345678": "a" * 64}


def workflow_of(results: Path, overrides: str = "", **more: str) -> dict[str, str]:
    """Return what `--config` of a run of the tiny model holds."""
    return {
        "model": "tiny",
        "site": "local",
        "set": f"site.results={results} training.num_steps=40 {overrides}",
        **more,
    }


def paths_of(results: Path, overrides: str = "", **more: str) -> Paths:
    """Return where the files of such a run lie."""
    return Paths(resolve(workflow_of(results, overrides, **more), CONFIG_DIR))


def begin_run(results: Path, name: str) -> Paths:
    """Make a run with the metrics of six steps, checkpoints after steps 2 and 4, and an attempt that has ended."""
    paths = paths_of(results, run=name)
    write_text(paths.experiment, dump_yaml(paths.resolved.experiment))
    write_text(paths.config, dump_resolved(paths.resolved))
    checkpoints = CheckpointFolder(paths.checkpoints, keep=2)
    write_json(paths.checkpoints / "begun_from.json", {**WEIGHTS, "rollout_fp8-1": "b" * 64, "dataset": "c" * 64})
    for step in (2, 4):
        checkpoints.begin(step)
        for rank in range(2):
            (checkpoints.partial(step) / f"__{rank}_0.distcp").write_bytes(bytes([step, rank]) * 1000)
        checkpoints.write_manifest(step, [r for rank in range(2) for r in checkpoints.record_share(step, rank)])
        checkpoints.commit(step)
    row = {"train/num_tokens": 500, "perf/step_seconds": 2.0}
    rows = [{"step": step, "rollout/reward_mean": step / 10, **row} for step in range(1, 7)]
    write_text(paths.metrics, "".join(json.dumps(row) + "\n" for row in rows))
    attempt = {"attempt": 1, "epoch": 1, "started_unix": 1.0, "ended_unix": 2.0, "reason": "trainer rank 0 was ended"}
    write_text(paths.attempts, json.dumps(attempt) + "\n")
    return paths
