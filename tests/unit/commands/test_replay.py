from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.begun_runs import begin_run, paths_of
from tests.support.rejections import rejected

from posttrain.cluster.replay import _differing_metrics
from posttrain.commands.replay import main
from posttrain.config.load import dump_resolved
from posttrain.store.lease import Lease, LeaseHeldError


def test_what_cannot_be_trained_again_is_refused(tmp_path: Path) -> None:
    paths = begin_run(tmp_path, "old")
    with rejected("no-such-step", "1 to 6", key="--step"):
        main(paths, 7)
    with rejected("no-such-run", "nobody", key="run"):
        main(paths_of(tmp_path, run="nobody"), None)
    paths.config.write_text(dump_resolved(paths.resolved).replace("nodes: 1 ", "nodes: 2 "))
    with rejected("replay-needs-one-node", "nodes = 2", key="nodes"):
        main(paths, None)
    paths.config.write_text(dump_resolved(paths.resolved))
    with rejected("rollout-incomplete", "step_000004: 0 of 16 groups"):
        main(paths, None)
    assert not (paths.train / "replay").exists()


def test_a_run_that_somebody_trains_is_refused(tmp_path: Path) -> None:
    paths = begin_run(tmp_path, "old")
    with Lease(paths.train, paths.lease), pytest.raises(LeaseHeldError, match="is being written by process"):
        main(paths, None)
    assert not (paths.train / "replay").exists()


def test_only_what_a_step_computes_is_compared() -> None:
    wrote = {"step": 3, "train/loss": 0.5, "perf/step_seconds": 2.0, "train/non_finite_steps": 1}
    again = {"step": 3, "train/loss": 0.5, "perf/step_seconds": 9.0, "train/non_finite_steps": 0}
    assert list(_differing_metrics(wrote, again)) == []
    again["train/loss"] = 0.5000000001
    assert list(_differing_metrics(wrote, again)) == ["step 3: train/loss 0.5, trained again 0.5000000001"]
