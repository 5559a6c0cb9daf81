"""Repeat a training step of a run on its stored rollout, without engines, and compare the bits."""

from __future__ import annotations

from posttrain.cluster.replay import replay
from posttrain.errors import CheckpointError
from posttrain.store import Paths


def main(paths: Paths, step: int | None) -> None:
    """Report the repeated step; fail with the names of everything whose bits differ."""
    done = replay(paths, step)
    if done.differences:
        listed = "\n  ".join(done.differences)
        raise CheckpointError("replay-differs", f"trained again, and the bits differ from {paths.run}:\n  {listed}")
    compared = (
        f"{done.num_tensors} tensors of weights and optimizer" if done.num_tensors else "no checkpoint to compare"
    )
    print(f"steps {done.steps[0]} to {done.steps[-1]} trained again: the same metrics, {compared}", flush=True)
