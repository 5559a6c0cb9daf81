"""Claims about effective training time under failures: 95 % or better at 32 nodes, and simulated in a second.

Each node count has its own plan: layout, step, save and restart times. The table has the share of wall time that ends
in kept steps, at the best save interval. Run from the repository's root:

    python -m benchmarks.goodput
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.claims import report, start
from tests.support.workflow_runs import ROOT

from posttrain.plan.forecast.plan_goodput import GOAL, NODE_COUNTS, goodput_part
from posttrain.plan.job_needs import RuleNeeds
from posttrain.plan.resolve import resolve

MODEL, NODES_OF_THE_CLAIM = "glm5", 32
GOAL_SECONDS = 1.0


def main() -> None:
    """Simulate, print the table and a line of JSON for each claim."""
    measure(NODE_COUNTS)


def quick() -> None:
    """The node count of the claim alone."""
    measure((NODES_OF_THE_CLAIM,))


def measure(node_counts: Sequence[int]) -> None:
    """Simulate, print the table and a line of JSON for each claim."""
    goodputs, seconds = {}, []
    for nodes in node_counts:
        goodputs[nodes], elapsed = simulate(nodes)
        seconds.append(elapsed)
    print(f"{MODEL}: share of wall time that ends in kept steps, goal {GOAL:.0%}")
    names = [rate["name"] for rate in goodputs[NODES_OF_THE_CLAIM]["rates"]]
    print(f"{'nodes':>6} {'step s':>7}", *(f"{name:>28} {'save every':>10}" for name in names))
    for nodes, goodput in goodputs.items():
        best = [rate["best"] for rate in goodput["rates"]]
        cells = (f"{row['effective_share']:28.1%} {row['save_interval']:10d}" for row in best)
        print(f"{nodes:6d} {goodput['step_seconds']:7.0f}", *cells)
    for rate in goodputs[NODES_OF_THE_CLAIM]["rates"]:
        print_features(rate)
    for rate in goodputs[NODES_OF_THE_CLAIM]["rates"]:
        claim = f"{MODEL} on {NODES_OF_THE_CLAIM} nodes trains {GOAL:.0%} of the time, failures {rate['name']}"
        report(claim, rate["best"]["effective_share"], GOAL, at_least=True)
    report("the simulation of a plan takes at most a second of one core", statistics.median(seconds), GOAL_SECONDS)


def simulate(nodes: int) -> tuple[dict[str, Any], float]:
    """Return `plan.json`'s "goodput" of so many nodes, and the seconds that the simulation kept a core busy."""
    config = resolve({"model": MODEL, "site": "local", "nodes": nodes}, ROOT / "config").config
    needs = RuleNeeds(config)
    durations = needs.seconds
    started = time.process_time()
    goodput = goodput_part(config, needs.storage, needs.rates, durations)
    assert goodput is not None, "a machine with GPUs has a step time"
    return goodput, time.process_time() - started


def print_features(rate: dict[str, Any]) -> None:
    """Print what each feature gains, and what is missing."""
    print(f"\n{NODES_OF_THE_CLAIM} nodes, failures {rate['name']} ({rate['source']})")
    for key in ("features", "missing"):
        for row in rate[key]:
            gain = "" if row["gain"] is None else f"{row['gain']:+.1%}"
            what = f"missing: {row['what']}" if key == "missing" else row["what"]
            print(f"  {what:75} {row['effective_share']:6.1%} {gain:>6}")


if __name__ == "__main__":
    start(main, quick)
