"""Metrics of the ages of a step's tokens: updates between the weights that sampled a token and those trained on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from posttrain.types import TrajectoryGroup


def staleness_metrics(step: int, groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Return the metrics `queue/...` of a step's groups.

    Args:
        step: From 0; equals the version of the weights that train on the groups.
        groups: Their engines report versions; None stands for the initial weights, version 0.

    Raises:
        ValueError: A token is from weights that the trainer does not have yet.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    ages = Counter[int]()
    for trajectory in trajectories:
        for span in trajectory.versions:
            ages[step - (span.version or 0)] += span.num_tokens
    if min(ages) < 0:
        raise ValueError(f"step {step + 1} got tokens of weight version {step - min(ages)}")
    total = ages.total()
    return {
        "queue/staleness_mean": sum(age * count for age, count in ages.items()) / total,
        "queue/staleness_max": max(ages),
        "queue/mixed_version_fraction": sum(len(one.versions) > 1 for one in trajectories) / len(trajectories),
        **{f"queue/age_{age}": count / total for age, count in sorted(ages.items())},
    }
