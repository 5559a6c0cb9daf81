"""Two claims about `snakemake -n`, against a workflow of one rule.

A dry run of any branch takes at most 2.5 times as long; one of 128 nodes and 1,000 jobs at most 6 times.

All run in the same environment, one after the other, so that a busy moment hits all. Run from the repository's root:

    python -m benchmarks.dry_run
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.claims import report, start
from tests.support.workflow_runs import ROOT, run_snakemake

GOAL, GOAL_OF_MANY_JOBS = 2.5, 6.0
REPEATS = 5
# 4 x 215 parts, 128 copies to nodes, and the rules that run once or twice.
NODES = 128
MANY_JOBS: dict[str, object] = {
    "model": "glm5",
    "nodes": NODES,
    "set": f"convert.num_parts=215 site.node_names=[{','.join(f'n{node}' for node in range(NODES))}]",
}
ONE_RULE = 'rule all:\n    output:\n        "done",\n    shell:\n        "touch {output}"\n'


def main() -> None:
    """Measure, print the table and a line of JSON for each claim."""
    from tests.support.branches import OTHER_BRANCHES, main_branches

    branches = main_branches() | OTHER_BRANCHES
    many = f"glm5, {NODES} nodes, many jobs"
    with tempfile.TemporaryDirectory() as folder:
        seconds = measure(Path(folder), branches | {many: MANY_JOBS}, REPEATS)
    ratios = ratios_of(seconds)
    print(f"{'branch':28} {'seconds':>9} {'ratio':>6} {'limit':>6}")
    for name, times in seconds.items():
        limit = GOAL_OF_MANY_JOBS if name == many else GOAL
        print(f"{name:28} {min(times):9.2f} {ratios[name]:6.2f} {limit:6.1f}")
    report(
        "snakemake -n of any branch takes at most 2.5 times that of a one-rule workflow",
        max(ratios[name] for name in branches),
        GOAL,
    )
    claim = f"snakemake -n of {NODES} nodes and 1,000 jobs takes at most 6 times that of a one-rule workflow"
    report(claim, ratios[many], GOAL_OF_MANY_JOBS)


def quick() -> None:
    """One branch beside the workflow of one rule, once."""
    from tests.support.branches import main_branches

    with tempfile.TemporaryDirectory() as folder:
        seconds = measure(Path(folder), {"tiny": main_branches()["tiny"]}, repeats=1, warm_up=0)
    report("snakemake -n of the demo, times that of a one-rule workflow", ratios_of(seconds)["tiny"], GOAL)


def ratios_of(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    """Return each shortest run over that of "one rule": what else the machine does only adds to a run."""
    one_rule = min(seconds["one rule"])
    return {name: min(times) / one_rule for name, times in seconds.items()}


def measure(
    folder: Path, branches: Mapping[str, Mapping[str, object]], repeats: int, warm_up: int = 1
) -> dict[str, list[float]]:
    """Return the seconds of each dry run, by branch and for "one rule", interleaved.

    Args:
        folder: Where snakemake runs.
        branches: Name -> what `--config` gives.
        repeats: Runs of each.
        warm_up: Runs before them that are not counted.
    """
    one_rule = folder / "one_rule.smk"
    one_rule.write_text(ONE_RULE)
    seconds: dict[str, list[float]] = {name: [] for name in ("one rule", *branches)}
    for repeat in range(warm_up + repeats):
        for name, times in seconds.items():
            pairs = [f"{key}={value}" for key, value in branches.get(name, {}).items()]
            snakefile = one_rule if name == "one rule" else ROOT / "Snakefile"
            started = time.perf_counter()
            words = ("-n", *(["--config", *pairs] if pairs else []))
            ended = run_snakemake(folder, *words, snakefile=snakefile, python_options=())
            elapsed = time.perf_counter() - started
            assert ended.returncode == 0, ended.stdout
            if repeat >= warm_up:
                times.append(elapsed)
    return seconds


if __name__ == "__main__":
    start(main, quick)
