"""The GPU-hours of a run, and their price where the site configures one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from posttrain.config.schema import Config
from posttrain.plan.job_needs import job_needs


def cost_part(config: Config, jobs: Iterable[tuple[str, float]]) -> dict[str, Any]:
    """Return the "gpu_hours" of jobs and their "cost" in "currency"; None for unknown values.

    Args:
        config: The resolved configuration.
        jobs: Rule and seconds of each job. Training also occupies its spare nodes.
    """
    unknown = {"gpu_hours": None, "cost": None, "currency": config.site.currency}
    if config.hardware.device == "cpu":
        return unknown
    hours = math.fsum(job_needs(config, rule).gpus * seconds for rule, seconds in jobs) / 3600
    price = config.site.price_per_gpu_hour
    return unknown | {"gpu_hours": round(hours, 2), "cost": round(hours * price, 2) if price else None}
