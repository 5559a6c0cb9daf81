"""The plan's page on failures: effective training time, the best save interval, what each feature gains.

Published rates:
    466 interruptions in 54 days on 16,384 GPUs, 419 of them unexpected, and about 78 % of those with a confirmed or
    suspected fault of hardware: The Llama 3 Herd of Models, arXiv 2407.21783, section 3.3.4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.config.derived import nodes_with_spares
from posttrain.config.schema import Config
from posttrain.observability.report_charts import Chart, Series
from posttrain.planner.duration import Bandwidths
from posttrain.planner.goodput import (
    RestartSeconds,
    Scenario,
    best_of,
    effective_shares,
    with_intervals,
)
from posttrain.planner.plan_rules import counted
from posttrain.planner.restart import STATE, WEIGHTS, RestartPart, checkpoint_reads, restart_parts, total
from posttrain.planner.step_time import IN_EVERY_STEP
from posttrain.planner.storage import Storage

GOAL = 0.95
# Share of the failures after which another node is needed; see the head of this file.
NODE_LOSS_SHARE = 0.78
INTERVALS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 18, 20, 25, 30, 40, 50, 65, 80, 100, 130, 160, 200)
NODE_COUNTS = (16, 32, 64, 128, 256, 512, 1024)
SPARES = (0, 1, 2, 4, 8)
# What the simulation takes for granted when nothing else is said: one spare node for so many.
NODES_PER_SPARE = 32
NOT_MODELLED = (
    "failures: time limits of a queue, hangs and slow nodes that nobody notices, failures that come together, the "
    "first start of a run, evaluation and export",
)


@dataclass(frozen=True)
class FailureRate:
    """How often something fails.

    Args:
        name: Short name.
        source: Where it is from.
        failures: So many
        hours: in so many hours
        num_gpus: on so many GPUs.
    """

    name: str
    source: str
    failures: float
    hours: float
    num_gpus: int

    def per_second(self, num_gpus: int) -> float:
        """Return the failures per second of a job of so many GPUs."""
        return self.failures / (self.hours * 3600) * num_gpus / self.num_gpus


RATES = (
    FailureRate("every 6 hours per 256 GPUs", "assumed, to be on the safe side", 1, 6, 256),
    FailureRate("as published for Llama 3", "466 in 54 days on 16,384 GPUs, arXiv 2407.21783", 466, 54 * 24, 16384),
)


def goodput_part(
    config: Config, needed: Storage, rates: Bandwidths, durations: Mapping[str, float]
) -> dict[str, Any] | None:
    """Return the simulation as it stands in `plan.json`; None for a machine whose step time is not planned.

    Args:
        config: The resolved configuration.
        needed: Bytes on disk.
        rates: What is assumed of lines and disks.
        durations: `duration.durations_seconds` of it.
    """
    if "step" not in durations:
        return None
    parts = restart_parts(config, needed, rates, durations)
    scenario = scenario_of(config, total(parts), durations)
    return {
        "goal": GOAL,
        "step_seconds": round(scenario.step, 3),
        "redone_step_seconds": round(scenario.redone_step, 3),
        "save_seconds": scenario.save,
        "node_loss_share": NODE_LOSS_SHARE,
        "spares": scenario.spares,
        "nodes_per_spare": NODES_PER_SPARE,
        "restart_seconds": dataclasses.asdict(total(parts)),
        "restart_parts": [dataclasses.asdict(part) for part in parts],
        "rates": [_rate_part(config, rate, scenario, parts, checkpoint_reads(config, needed)) for rate in RATES],
    }


def scenario_of(config: Config, restart: RestartSeconds, durations: Mapping[str, float]) -> Scenario:
    """Return the run of a configuration with all features, at the first of `RATES`."""
    step = sum(durations[f"step_{phase}"] for phase in IN_EVERY_STEP)
    return Scenario(
        step=step,
        redone_step=step - durations["step_rollout"],
        save=durations["step_save"],
        save_interval=config.trainer.save_interval,
        failures_per_second=RATES[0].per_second(config.nodes * config.hardware.gpus_per_node),
        node_loss_share=NODE_LOSS_SHARE,
        spares=nodes_with_spares(config) - config.nodes
        if config.site.launcher == "slurm"
        else spares_for(config.nodes),
        restart=restart,
    )


def spares_for(nodes: int) -> int:
    """Return the spare nodes that are assumed for so many nodes."""
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
    config: Config, rate: FailureRate, run: Scenario, parts: Sequence[RestartPart], reads: int
) -> dict[str, Any]:
    """Return what is known at one rate of failures; `reads` of the training state at a restart."""
    per_node = rate.per_second(config.hardware.gpus_per_node)
    run = dataclasses.replace(run, failures_per_second=per_node * config.nodes)
    (best,) = _best([run])
    features, missing = _features(run), _what_is_missing(run, parts, reads)
    shares = effective_shares(list(features.values()))
    found = {name: (run.save_interval, share) for name, share in zip(features, shares, strict=True)}
    by_interval = effective_shares(with_intervals(run, INTERVALS))
    return {
        "name": rate.name,
        "source": rate.source,
        "hours_between_failures": round(1 / run.failures_per_second / 3600, 3),
        "configured": _share_part(run.save_interval, shares[-1]),
        "best": _share_part(*best),
        "reaches_goal": best[1] >= GOAL,
        "by_interval": [_share_part(*pair) for pair in zip(INTERVALS, by_interval, strict=True)],
        "features": _gains({**found, "best save interval": best}),
        "missing": _gains(dict(zip(missing, _best(missing.values()), strict=True)), best[1]),
        "by_spares": _by_spares(run, config.nodes),
        "by_nodes": _by_nodes(run, per_node),
    }


def _by_spares(run: Scenario, nodes: int) -> list[dict[str, Any]]:
    """Return the share with each number of spare nodes, of the nodes that train and of all."""
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
    """Return the share of the same run where more nodes fail more often."""
    found = _best(
        dataclasses.replace(run, failures_per_second=failures_per_second_and_node * nodes, spares=spares_for(nodes))
        for nodes in NODE_COUNTS
    )
    return [
        {"nodes": nodes, "spares": spares_for(nodes), **_share_part(interval, share)}
        for nodes, (interval, share) in zip(NODE_COUNTS, found, strict=True)
    ]


def _features(run: Scenario) -> dict[str, Scenario]:
    """Return the run as it would be with nothing, then with one feature more each, at its own save interval."""
    requeued = RestartSeconds(*[run.restart.requeued] * 3)
    bare = dataclasses.replace(run, restart=requeued, spares=0, redone_step=run.step)
    inside = dataclasses.replace(bare, restart=run.restart)
    with_spares = {
        f"{counted(run.spares, 'spare node')} in the allocation": dataclasses.replace(inside, spares=run.spares)
    }
    return {
        "every failure requeued, all steps since the last checkpoint done again": bare,
        "restart inside the allocation": inside,
        **(with_spares if run.spares else {}),
        "replay of finished groups": run,
    }


def _what_is_missing(run: Scenario, parts: Sequence[RestartPart], reads: int) -> dict[str, Scenario]:
    """Return what the run could be with more than there is today, one thing more each."""
    state = parts[STATE].seconds
    background = dataclasses.replace(run, save=0.0)
    missing = {"steps go on while a checkpoint is written (at most)": background}
    once = _faster(background, state, 1 - 1 / reads)
    if reads > 1:
        missing["nodes with the memory to read the training state once"] = once
    no_weights = _faster(once, parts[WEIGHTS].seconds, 1.0)
    return missing | {
        "a restart does not read the engines' weights again": no_weights,
        "it finds the training state in the nodes' memory (at most)": _faster(no_weights, state, 1 / reads),
    }


def _faster(run: Scenario, part: RestartSeconds, share: float) -> Scenario:
    kinds = ("in_place", "on_spare", "requeued")
    left = RestartSeconds(*(getattr(run.restart, kind) - share * getattr(part, kind) for kind in kinds))
    return dataclasses.replace(run, restart=left)


def _best(scenarios: Iterable[Scenario]) -> list[tuple[int, float]]:
    """Return the best save interval of each scenario, and its share there."""
    return [best_of(INTERVALS, effective_shares(with_intervals(scenario, INTERVALS))) for scenario in scenarios]


def _gains(found: Mapping[str, tuple[int, float]], before: float | None = None) -> list[dict[str, Any]]:
    """Return a row for each, with what it gains over the one before."""
    rows = []
    for name, (interval, share) in found.items():
        gain = None if before is None else round(share - before, 4)
        rows.append({"what": name, **_share_part(interval, share), "gain": gain})
        before = share
    return rows


def _share_part(interval: int, share: float) -> dict[str, Any]:
    return {"save_interval": interval, "effective_share": round(share, 4)}
