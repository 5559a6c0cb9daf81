"""Made-up metrics of a queue and of episodes, for `synthetic_run`."""

from __future__ import annotations

import math
import random
from typing import Any

from posttrain.report.distributions import curve, percentile
from posttrain.report.metrics import PERCENTS, percentile_name


def queue_row(step: int, bound: int, rng: random.Random) -> dict[str, float]:
    """Return the metrics of a queue: from the first step on the age rises to its bound."""
    oldest = min(step - 1, bound)
    weights = [rng.uniform(0.1, 1) for _ in range(oldest + 1)]
    shares = {age: weight / sum(weights) for age, weight in enumerate(weights)}
    return {
        "queue/staleness_mean": sum(age * share for age, share in shares.items()),
        "queue/staleness_max": oldest,
        "queue/mixed_version_fraction": rng.uniform(0, 0.3),
        "queue/groups_ready": rng.randrange(16),
        "queue/groups_running": 16,
        **{f"queue/age_{age}": share for age, share in shares.items()},
    }


def episode_row(progress: float, rng: random.Random) -> dict[str, float]:
    episodes = _episodes(0.25 + 0.7 * progress, rng)
    return {
        "episode/segments": 1.0,
        "perf/prefix_hit_rate": rng.uniform(0.1, 0.4),
        **{name: math.fsum(values) / len(values) for name, values in episodes.items()},
        **{
            percentile_name(name, percent): percentile(values, percent)
            for name, values in episodes.items()
            for percent in PERCENTS
        },
    }


def _episodes(calling: float, rng: random.Random) -> dict[str, list[float]]:
    """Return the numbers of 64 episodes, of which a share calls a tool once."""
    calls = [float(rng.random() < calling) for _ in range(64)]
    return {
        "episode/turns": [1 + called for called in calls],
        "episode/tool_calls": calls,
        "episode/observed_tokens": [called * rng.randrange(4, 9) for called in calls],
        "perf/environment_seconds": [called * rng.lognormvariate(-6, 1) for called in calls],
        "perf/engine_seconds": [rng.lognormvariate(-1.5, 0.5) for _ in calls],
    }


def episode_summary(calling: float, rng: random.Random) -> dict[str, Any]:
    short = {name.rpartition("/")[2]: values for name, values in _episodes(calling, rng).items()}
    return {
        **{name: math.fsum(values) / len(values) for name, values in short.items()},
        "curves": {name: curve(values) for name, values in short.items()},
        "by_turns": {str(count): short["turns"].count(count) for count in (1, 2)},
    }
