"""Claim: `snakemake -n` of any branch takes at most 2.5 times what it takes for a workflow of one rule.

Both run in the same environment, one after the other, so that a busy moment hits both. Run from the repository's root:

    python -m benchmarks.dry_run
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tests.workflow_runs import ROOT, run_snakemake

GOAL = 2.5
REPEATS = 5
ONE_RULE = 'rule all:\n    output:\n        "done",\n    shell:\n        "touch {output}"\n'


def main() -> None:
    """Measure, print the table and the line of JSON."""
    from tests.workflow.branches import OTHER_BRANCHES, main_branches

    with tempfile.TemporaryDirectory() as folder:
        seconds = measure(Path(folder), main_branches() | OTHER_BRANCHES, REPEATS)
    one_rule = statistics.median(seconds["one rule"])
    ratios = {name: statistics.median(times) / one_rule for name, times in seconds.items()}
    print(f"{'branch':24} {'median s':>9} {'ratio':>6}   limit {GOAL}")
    for name, times in seconds.items():
        print(f"{name:24} {statistics.median(times):9.2f} {ratios[name]:6.2f}")
    worst = round(max(ratios.values()), 3)
    claim = "snakemake -n of any branch takes at most 2.5 times that of a one-rule workflow"
    print(json.dumps({"claim": claim, "value": worst, "goal": GOAL, "met": worst <= GOAL}))


def measure(folder: Path, branches: Mapping[str, Mapping[str, object]], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each dry run, by branch and for "one rule", interleaved.

    Args:
        folder: Where snakemake runs.
        branches: Name -> what `--config` gives.
        repeats: Runs of each; one more comes before them and is not counted.
    """
    one_rule = folder / "one_rule.smk"
    one_rule.write_text(ONE_RULE)
    seconds: dict[str, list[float]] = {"one rule": []} | {name: [] for name in branches}
    for repeat in range(repeats + 1):
        for name, times in seconds.items():
            pairs = [f"{key}={value}" for key, value in branches.get(name, {}).items()]
            snakefile = one_rule if name == "one rule" else ROOT / "Snakefile"
            started = time.perf_counter()
            ended = run_snakemake(folder, "-n", *(["--config", *pairs] if pairs else []), snakefile=snakefile)
            elapsed = time.perf_counter() - started
            assert ended.returncode == 0, ended.stdout
            if repeat:
                times.append(elapsed)
    return seconds


if __name__ == "__main__":
    main()
