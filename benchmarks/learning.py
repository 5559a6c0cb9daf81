"""Claim: on the demo the held-out pass rate rises from below 0.4 to above 0.8, for three seeds, from the reward alone.

Runs the real workflow with the demo's settings once per pair of seeds, about three minutes each on two cores. One
decides every sample (`training.seed`), the other the prompts and their order (`data.seed`); the first pair is the
demo's own. The model is the same, made once. Run from the repository's root:

    python -m benchmarks.learning
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.claims import report, start
from tests.support.branches import dry_run
from tests.support.workflow_runs import WorkflowFolder

SEEDS = {42: 7, 43: 8, 44: 9}
BEFORE_AT_MOST, GOAL = 0.4, 0.8


def main() -> None:
    """Run the demo per seed, print the table and the line of JSON."""
    with tempfile.TemporaryDirectory() as folder:
        summaries = {seed: run_demo(Path(folder), seed, data_seed) for seed, data_seed in SEEDS.items()}
    print(f"{'seed':>6} {'before':>8} {'after':>8} {'steps':>6} {'seconds':>8}   limits {BEFORE_AT_MOST}, {GOAL}")
    for seed, row in summaries.items():
        before, after = row["pass_rate_before"], row["pass_rate_after"]
        print(f"{seed:6} {before:8.3f} {after:8.3f} {row['num_steps']:6} {row['seconds_total']:8.0f}")
    worst_before = max(row["pass_rate_before"] for row in summaries.values())
    worst_after = min(row["pass_rate_after"] for row in summaries.values())
    report("held-out pass rate before training, worst of three seeds", worst_before, BEFORE_AT_MOST)
    report("held-out pass rate after training, worst of three seeds", worst_after, GOAL, at_least=True)


def quick() -> None:
    """Plan the demo for a pair of seeds, without running it."""
    seed, data_seed = next(iter(SEEDS.items()))
    with tempfile.TemporaryDirectory() as folder:
        settings = f"training.seed={seed} data.seed={data_seed}"
        code, output = dry_run(Path(folder), {"set": settings})
    assert code == 0, output
    assert "train" in output


def run_demo(folder: Path, seed: int, data_seed: int) -> dict:
    """Return the summary of a whole run; runs share the store, so the model is made once."""
    settings: dict[str, object] = {"training.seed": seed, "data.seed": data_seed}
    workflow = WorkflowFolder(folder / f"seed{seed}", folder / "store", settings)
    workflow.run(timeout=3600)
    return workflow.summary


if __name__ == "__main__":
    start(main, quick)
