"""A step's metrics, under their names in `report.metrics`."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Sequence

from posttrain.config.reward_sum import has_passed
from posttrain.report.distributions import percentile
from posttrain.report.metrics import EPISODE_NUMBERS, METRICS, PERCENTS, percentile_name
from posttrain.rl.algorithm.mismatch import Mismatch
from posttrain.rl.algorithm.statistics import MEAN, STATISTICS
from posttrain.rl.megatron_backend.train_step import NO_SIGNAL, UpdateStatistics
from posttrain.rl.rollout.group_builder import has_equal_rewards
from posttrain.rl.training.phases import PhaseClock
from posttrain.types import RolloutResult, TrajectoryGroup

log = logging.getLogger(__name__)

# Limit on grader metrics per step: each answer may bring new names, and each name becomes a chart.
MAX_NAMES = 1000


def step_metrics(
    rollout: RolloutResult,
    statistics: Sequence[UpdateStatistics],
    mismatch: tuple[Mismatch | None, Mismatch | None],
    clock: PhaseClock,
    is_graded: bool,
) -> dict[str, float]:
    """Return the metrics of one step's rollout, updates and engine comparison.

    Args:
        rollout: The step's groups.
        statistics: One per optimizer update, in order.
        mismatch: Against the trainer's own weights and (at intervals) the served weights; None if not compared.
        clock: Times of the phases.
        is_graded: The trajectories have rewards.
    """
    timings = clock.metrics()
    num_tokens = sum(one.num_tokens for group in rollout.groups for one in group.trajectories)
    return {
        **_rollout_metrics(rollout, is_graded),
        **_update_metrics(statistics, is_compared=mismatch[1] is not None),
        **_mismatch_metrics(*mismatch),
        **timings,
        "train/num_tokens": num_tokens,
        "train/num_response_tokens": (num_response_tokens := sum(s.num_tokens for s in statistics)),
        "perf/tokens_per_second": num_tokens / timings["perf/step_seconds"],
        "perf/response_tokens_per_second": num_response_tokens / timings["perf/step_seconds"],
    }


def _rollout_metrics(rollout: RolloutResult, is_graded: bool) -> dict[str, float]:
    trajectories = [trajectory for group in rollout.groups for trajectory in group.trajectories]
    lengths = [trajectory.num_sampled for trajectory in trajectories]
    metrics = {
        "rollout/response_tokens_mean": sum(lengths) / len(lengths),
        "rollout/response_tokens_max": max(lengths),
        "rollout/truncated_fraction": sum(one.finish_reason == "length" for one in trajectories) / len(trajectories),
    }
    if not is_graded:
        return metrics
    equal_groups = sum(map(has_equal_rewards, rollout.groups))
    return {
        **_reward_metrics(rollout.groups),
        "rollout/reward_std_zero_fraction": equal_groups / len(rollout.groups),
        "rollout/grader_failures": sum(bool(one.failure) for one in trajectories),
        "rollout/ungraded_samples": sum(one.reward is None for one in trajectories),
        **metrics,
    }


def _reward_metrics(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Return the metrics logged by graders."""
    values: dict[str, list[float]] = {}
    for group in groups:
        for trajectory in group.trajectories:
            if trajectory.reward is not None:
                values.setdefault("rollout/reward_mean", []).append(trajectory.reward)
                passed = float(has_passed(trajectory.scores, trajectory.reward))
                values.setdefault("rollout/pass_rate", []).append(passed)
                if group.prompt.source:
                    values.setdefault(f"source/{group.prompt.source}/pass_rate", []).append(passed)
            of_episode = trajectory.parts.keys() & METRICS.keys()
            told = {name: value for name, value in trajectory.parts.items() if name not in of_episode}
            for name, score in ({**trajectory.scores, **told} if len(trajectory.scores) > 1 or told else {}).items():
                values.setdefault(f"reward/{name}", []).extend([] if score is None else [score])
            for name in sorted(of_episode):
                values.setdefault(name, []).append(trajectory.parts[name])
    if len(values) > MAX_NAMES:
        log.warning("graders gave %d names of metrics in this step; the first %d are kept", len(values), MAX_NAMES)
    kept = itertools.islice(values.items(), MAX_NAMES)
    means = {name: math.fsum(of_samples) / len(of_samples) for name, of_samples in kept if of_samples}
    return means | {
        percentile_name(name, percent): percentile(values[name], percent)
        for name in EPISODE_NUMBERS
        if name in means
        for percent in PERCENTS
    }


def _update_metrics(statistics: Sequence[UpdateStatistics], is_compared: bool) -> dict[str, float]:
    """Average statistics over a step's updates; means over tokens are weighted by tokens.

    Args:
        statistics: One per optimizer update.
        is_compared: The first update's old log-probabilities come from a separate pass; else its ratio is always 1.
    """
    tokens = sum(s.num_tokens for s in statistics)
    named = {
        f"train/{name}": sum(s.named[name] * s.num_tokens for s in statistics) / tokens
        if STATISTICS[name].over_tokens == MEAN
        else first
        for name, first in statistics[0].named.items()
        if is_compared or name != "first_update_ratio_max_abs_deviation"
    }
    if second_moment := named.get("train/importance_ratio_square_mean"):
        named["train/effective_sample_size"] = named["train/importance_ratio_mean"] ** 2 / second_moment
    if (logprob := named.get("train/logprob_mean")) is not None:
        named["train/perplexity"] = math.exp(-logprob)
    return {
        "train/loss": sum(s.loss for s in statistics) / len(statistics),
        "train/grad_norm": sum(s.grad_norm for s in statistics) / len(statistics),
        "train/zero_advantage_updates": sum(s.outcome == NO_SIGNAL for s in statistics),
        **named,
    }


def _mismatch_metrics(own: Mismatch | None, served: Mismatch | None) -> dict[str, float]:
    if own is None:
        return {}
    metrics = {
        "mismatch/quantised_abs_diff_mean": own.abs_diff_mean,
        "mismatch/kl_k3": own.kl_k3,
        "mismatch/effective_sample_size": own.effective_sample_size,
    }
    if served is not None:
        metrics |= {"mismatch/abs_diff_mean": served.abs_diff_mean, "mismatch/abs_diff_max": served.abs_diff_max}
    return metrics
