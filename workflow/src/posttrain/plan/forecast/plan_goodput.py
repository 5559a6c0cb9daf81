"""The plan's page on failures: effective training time, the best save interval, and the gain of each feature.

Published rates:
    466 interruptions in 54 days on 16,384 GPUs, 419 of them unexpected, and about 78 % of those with a confirmed or
    suspected fault of hardware: The Llama 3 Herd of Models, arXiv 2407.21783, section 3.3.4.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from posttrain.config.derived import nodes_with_spares
from posttrain.config.schema import Config
from posttrain.plan.forecast.goodput import (
    RestartSeconds,
    Scenario,
    best_of,
    effective_shares,
)
from posttrain.plan.forecast.restart import KINDS, Means, means_today, restart_parts, total
from posttrain.plan.sizing.assumptions import ASSUMPTIONS
from posttrain.plan.sizing.storage import Storage
from posttrain.plan.timing.duration import Bandwidths
from posttrain.plan.timing.step_time import IN_EVERY_STEP
from posttrain.readable import counted
from posttrain.report.report_charts import Chart, Series

# The project's goal (benchmarks/README.md).
GOAL = 0.95
# Share of the failures that require another node; see the module's docstring.
NODE_LOSS_SHARE = 0.78
INTERVALS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 18, 20, 25, 30, 40, 50, 65, 80, 100, 130, 160, 200)
NODE_COUNTS = (16, 32, 64, 128, 256, 512, 1024)
SPARES = (0, 1, 2, 4, 8)
# Default of the simulation: nodes per spare node.
NODES_PER_SPARE = 32
NOT_MODELLED = (
    "failures: time limits of a queue, hangs and slow nodes that nobody notices, failures that come together, loading "
    "a state that was read, the first start of a run, evaluation and export",
)


@dataclass(frozen=True)
class FailureRate:
    """A published failure rate.

    Args:
        name: Short name.
        source: Source of the rate.
        failures: Number of failures,
        hours: in this many hours,
        num_gpus: on this many GPUs.
    """

    name: str
    source: str
    failures: float
    hours: float
    num_gpus: int

    def per_second(self, num_gpus: int) -> float:
        """Return the failures per second of a job with `num_gpus` GPUs."""
        return self.failures / (self.hours * 3600) * num_gpus / self.num_gpus


RATES = (
    FailureRate("every 6 hours per 256 GPUs", "assumed, to be on the safe side", 1, 6, 256),
    FailureRate("as published for Llama 3", "466 in 54 days on 16,384 GPUs, arXiv 2407.21783", 466, 54 * 24, 16384),
)


def goodput_part(
    config: Config, needed: Storage, rates: Bandwidths, durations: Mapping[str, float]
) -> dict[str, Any] | None:
    """Return the simulation's part of `plan.json`; None for a machine without a planned step time.

    Args:
        config: The resolved configuration.
        needed: Bytes on disk.
        rates: Assumed bandwidths of networks and disks.
        durations: Result of `duration.durations_seconds`.
    """
    if "step" not in durations:
        return None
    today = means_today(config, needed)
    parts = restart_parts(config, needed, rates, durations, today)
    scenario = scenario_of(config, total(parts), durations)

    def restart_with(**means: Any) -> RestartSeconds:
        return total(restart_parts(config, needed, rates, durations, dataclasses.replace(today, **means)))

    features, missing = _features(scenario, restart_with), _what_is_missing(scenario, today, restart_with)
    return {
        "goal": GOAL,
        "step_seconds": round(scenario.step, 3),
        "redone_step_seconds": round(scenario.redone_step, 3),
        "save_seconds": scenario.save,
        "waits_for_save_seconds": round(scenario.save - scenario.hidden_save, 3),
        "node_loss_share": NODE_LOSS_SHARE,
        "spares": scenario.spares,
        "refill_seconds": scenario.refill if math.isfinite(scenario.refill) else None,
        "nodes_per_spare": NODES_PER_SPARE,
        "restart_seconds": dataclasses.asdict(total(parts)),
        "restart_parts": [dataclasses.asdict(part) for part in parts],
        "rates": [_rate_part(config, rate, features, missing) for rate in RATES],
    }


def scenario_of(config: Config, restart: RestartSeconds, durations: Mapping[str, float]) -> Scenario:
    """Return the simulated run of a configuration with all features, at the first of `RATES`."""
    step = sum(durations[f"step_{phase}"] for phase in IN_EVERY_STEP)
    rollout, save = durations["step_rollout"], durations["step_save"]
    is_slurm = config.site.launcher == "slurm"
    return Scenario(
        step=step,
        redone_step=step - rollout,
        save=save,
        hidden_save=min(save, rollout),
        save_interval=config.trainer.save_interval,
        failures_per_second=RATES[0].per_second(config.nodes * config.hardware.gpus_per_node),
        node_loss_share=NODE_LOSS_SHARE,
        spares=nodes_with_spares(config) - config.nodes if is_slurm else spares_for(config.nodes),
        refill=math.inf if is_slurm and not config.site.slurm.refill_spares else ASSUMPTIONS.queue_seconds,
        restart=restart,
    )


def spares_for(nodes: int) -> int:
    """Return the assumed number of spare nodes for `nodes` nodes."""
    return -(-nodes // NODES_PER_SPARE)


def goodput_chart(goodput: Mapping[str, Any]) -> Chart:
    """Return the chart of effective training time over the save interval.

    Args:
        goodput: `plan.json`'s "goodput".
    """
    series = []
    for color, rate in enumerate(goodput["rates"], start=1):
        rows = rate["by_interval"]
        steps, shares = [row["save_interval"] for row in rows], [100 * row["effective_share"] for row in rows]
        series.append(Series(rate["name"], steps, shares, color, is_dashed=color > 1))
    return Chart(
        "Effective training time",
        "Share of wall time that ends in kept steps, with all features.",
        "%",
        series,
        references=((100 * goodput["goal"], "goal"),),
        high=100.0,
        x_label="save interval",
        is_wide=True,
    )


def _rate_part(
    config: Config, rate: FailureRate, features: Mapping[str, Scenario], missing: Mapping[str, Scenario]
) -> dict[str, Any]:
    """Return the results for one failure rate; the last feature is the run's current state."""
    per_node = rate.per_second(config.hardware.gpus_per_node)

    def at_rate(scenarios: Mapping[str, Scenario]) -> dict[str, Scenario]:
        each = per_node * config.nodes
        return {name: dataclasses.replace(scenario, failures_per_second=each) for name, scenario in scenarios.items()}

    features, missing = at_rate(features), at_rate(missing)
    run = [*features.values()][-1]
    gained = dict(zip(features, _best(features.values()), strict=True))
    (configured,), best = effective_shares(run, [run.save_interval]), [*gained.values()][-1]
    return {
        "name": rate.name,
        "source": rate.source,
        "hours_between_failures": round(1 / run.failures_per_second / 3600, 3),
        "configured": _share_part(run.save_interval, configured),
        "best": _share_part(*best),
        "reaches_goal": best[1] >= GOAL,
        "by_interval": [_share_part(*pair) for pair in zip(INTERVALS, _by_interval(run), strict=True)],
        "features": _gains(gained),
        "missing": _gains(dict(zip(missing, _best(missing.values()), strict=True)), best[1]),
        "by_spares": _by_spares(run, config.nodes),
        "by_nodes": _by_nodes(run, per_node),
    }


def _by_spares(run: Scenario, nodes: int) -> list[dict[str, Any]]:
    """Return the share for each number of spare nodes, relative to the training nodes and to all nodes."""
    found = _best(dataclasses.replace(run, spares=spares) for spares in SPARES)
    return [
        {
            "spares": spares,
            **_share_part(interval, share),
            "share_of_all_nodes": round(share * nodes / (nodes + spares), 4),
        }
        for spares, (interval, share) in zip(SPARES, found, strict=True)
    ]


def _by_nodes(run: Scenario, failures_per_second_and_node: float) -> list[dict[str, Any]]:
    """Return the share of the same run for each number of nodes, with a failure rate proportional to it."""
    found = _best(
        dataclasses.replace(run, failures_per_second=failures_per_second_and_node * nodes, spares=spares_for(nodes))
        for nodes in NODE_COUNTS
    )
    return [
        {"nodes": nodes, "spares": spares_for(nodes), **_share_part(interval, share)}
        for nodes, (interval, share) in zip(NODE_COUNTS, found, strict=True)
    ]


def _features(run: Scenario, restart_with: Callable[..., RestartSeconds]) -> dict[str, Scenario]:
    """Return the run without any feature, then with one more feature at a time."""
    slow = restart_with(reads_weights=True, state_waits=True)
    spares: dict[str, dict[str, Any]] = {}
    if run.spares:
        spares[f"{counted(run.spares, 'spare node')} in the allocation"] = {"spares": run.spares, "refill": math.inf}
        if math.isfinite(run.refill):
            spares["a used spare node replaced through the queue"] = {"refill": run.refill}
    changes: dict[str, dict[str, Any]] = {
        "every failure requeued, all steps since the last checkpoint done again": {
            "restart": RestartSeconds(*[slow.requeued] * len(KINDS)),
            "spares": 0,
            "redone_step": run.step,
            "hidden_save": 0.0,
        },
        "restart inside the allocation": {"restart": slow},
        **spares,
        "replay of finished groups": {"redone_step": run.redone_step},
        "engines start without weights": {"restart": restart_with(state_waits=True)},
        "the training state is read while engines start": {"restart": run.restart},
        "checkpoints are written during the next rollout": {"hidden_save": run.hidden_save},
    }
    features = {}
    for feature, change in changes.items():
        run = features[feature] = dataclasses.replace(run, **change)
    return features


def _what_is_missing(run: Scenario, today: Means, restart_with: Callable[..., RestartSeconds]) -> dict[str, Scenario]:
    """Return the run with the features that it lacks today, one more at a time."""
    missing: dict[str, Scenario] = {}
    means: dict[str, Any] = {}
    if run.hidden_save < run.save:
        run = dataclasses.replace(run, hidden_save=run.save)
        missing["steps do not wait for a checkpoint (at most)"] = run
    for name, is_missing, mean in (
        ("nodes with the memory to read the training state once", today.state_reads > 1, {"state_reads": 1}),
        ("it finds the training state in the nodes' memory (at most)", True, {"state_reads": 0}),
        ("engines live on when others fail (at most)", True, {"starts_engines": False}),
    ):
        if is_missing:
            means |= mean
            missing[name] = dataclasses.replace(run, restart=restart_with(**means))
    return missing


def _best(scenarios: Iterable[Scenario]) -> list[tuple[int, float]]:
    """Return the best save interval of each scenario, and its share."""
    return [best_of(INTERVALS, _by_interval(scenario)) for scenario in scenarios]


@lru_cache
def _by_interval(scenario: Scenario) -> list[float]:
    """Return the share of a scenario with each save interval; cached, so do not modify the list."""
    return effective_shares(scenario, INTERVALS)


def _gains(found: Mapping[str, tuple[int, float]], before: float | None = None) -> list[dict[str, Any]]:
    """Return one row each, with the gain over the previous one."""
    rows = []
    for name, (interval, share) in found.items():
        gain = None if before is None else round(share - before, 4)
        rows.append({"what": name, **_share_part(interval, share), "gain": gain})
        before = share
    return rows


def _share_part(interval: int, share: float) -> dict[str, Any]:
    return {"save_interval": interval, "effective_share": round(share, 4)}
