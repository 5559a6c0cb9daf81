"""Engines on a node of their own: the run has the bits of one in which they share the trainer's.

Nodes are pods of a Kubernetes API server on loopback, which runs them as processes of this machine.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.end_to_end.test_engine_faults import IN_FIRST_ROLLOUT, MANY_CHUNKS, kill_within
from tests.end_to_end.test_kubernetes import folder_of_pods
from tests.support.interruptions import (
    assert_gone,
    assert_same_training,
    attempts_of,
    rank_process,
    start,
)
from tests.support.kubernetes_server import KubernetesServer
from tests.support.workflow_runs import FAST, WorkflowFolder

from posttrain.rl.rollout.rollout_store import RolloutStore

pytestmark = [pytest.mark.slow, pytest.mark.faults("slow")]
# Mean |trainer - engine| in nats of equal weights in FP32.
SAME_WEIGHTS = 1e-5
APART = FAST | {"engine.own_nodes": 1, "launch.preflight": "false"}


def test_the_bits_are_those_of_engines_on_the_trainers_node(store: Path, tmp_path: Path) -> None:
    """An engine that dies in a rollout starts again on its node; a rank that dies takes all along; then it resumes."""
    with KubernetesServer(tmp_path) as server:
        straight = WorkflowFolder(tmp_path / "straight", store, FAST | MANY_CHUNKS)
        straight.run("train", timeout=900)
        run = folder_of_pods(server, store, APART | MANY_CHUNKS, nodes=2)
        driver = start(run, "train")
        kill_within(driver, IN_FIRST_ROLLOUT)
        driver.wait_for_file("checkpoints/step_000002")
        rank_process(run, 0).kill()
        code, output = driver.finish()
        assert code == 0, output[-4000:]
        assert_gone(run)
    assert_same_training(run, straight)
    attempts = attempts_of(run)
    assert len(attempts) == 2, attempts
    killed, done = attempts
    assert "on node-0: trainer rank 0 was ended by SIGKILL" in killed["reason"]
    assert (done["reason"], done["nodes"]) == ("done", ["node-0", "node-1"])
    attempt = run.run_folder / "train" / "attempts" / "001"
    assert "it starts again" in (attempt / "node-node-1.log").read_text()
    assert sorted(path.name for path in attempt.glob("[et]*.log")) == ["engine0.log", "trainer0.log"]


def test_engines_on_a_node_of_their_own_run_ahead(store: Path, tmp_path: Path) -> None:
    """No token is older than the bound, each group is trained on once, and the trainer agrees with what engines had."""
    ahead = {"rollout.max_staleness": 1, "algorithm.preset": "tis", "logging.keep_rollouts": "true"}
    with KubernetesServer(tmp_path) as server:
        run = folder_of_pods(server, store, APART | ahead, nodes=2)
        run.run("train", timeout=900)
    train = run.run_folder / "train"
    rows = [json.loads(line) for line in (train / "metrics.jsonl").read_text().splitlines()]
    num_steps, num_groups = FAST["training.num_steps"], FAST["rollout.rollout_batch_size"]
    steps = [RolloutStore(train / "rollouts").read_step(step, num_groups) for step in range(num_steps)]
    ages = {
        step - (span.version or 0)
        for step, groups in enumerate(steps)
        for group in groups
        for one in group.trajectories
        for span in one.versions
    }
    assert ages == {0, 1}
    assert {row["queue/staleness_max"] for row in rows} <= {0, 1}
    assert sorted(group.position for groups in steps for group in groups) == [*range(num_steps * num_groups)]
    assert max(row["mismatch/abs_diff_mean"] for row in rows if "mismatch/abs_diff_mean" in row) < SAME_WEIGHTS
    (attempt,) = attempts_of(run)
    assert (attempt["reason"], attempt["nodes"]) == ("done", ["node-0", "node-1"])
