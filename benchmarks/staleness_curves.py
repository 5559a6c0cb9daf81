"""Claim: the demo learns as well from engines that run ahead: staleness 0, 1 and 4, three seeds each, reach 0.9 reward.

Runs the real workflow with the demo's model nine times, three to six minutes each on two cores, and draws all rewards
into one figure. All runs have the objective of asynchronous ones (`algorithm.preset=tis`).

    python -m benchmarks.staleness_curves
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.claims import report, report_table, start
from tests.support.branches import dry_run
from tests.support.workflow_runs import WorkflowFolder

from posttrain.report.sinks import read_rows

FIGURE = Path(__file__).parents[1] / "docs" / "staleness.svg"
COLOURS = {0: "#2563eb", 1: "#d97706", 4: "#059669"}
SEEDS = (42, 43, 44)
GOAL, LAST = 0.9, 8
# The figure's size, its plot, and the steps of a point, which is their mean.
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM, POINT = 760, 260, 44, 744, 14, 214, 4

Curves = dict[int, list[list[float]]]


def main() -> None:
    """Train nine times, draw the figure, and compare the last steps' rewards with the goal."""
    with tempfile.TemporaryDirectory() as folder:
        curves = {
            staleness: [run_demo(Path(folder), settings(staleness, seed)) for seed in SEEDS] for staleness in COLOURS
        }
    show(curves)


def quick() -> None:
    """Plan one of the runs, and draw curves that nobody has measured to nowhere."""
    with tempfile.TemporaryDirectory() as folder:
        words = " ".join(f"{key}={value}" for key, value in settings(1, 42).items())
        code, output = dry_run(Path(folder), {"set": words})
    assert code == 0, output
    assert "polyline" in figure({staleness: [[0.0, 0.5] * POINT] for staleness in COLOURS})


def settings(staleness: int, seed: int) -> dict[str, object]:
    """Return what a run sets."""
    return {"rollout.max_staleness": staleness, "algorithm.preset": "tis", "training.seed": seed}


def run_demo(folder: Path, words: dict[str, object]) -> list[float]:
    """Return the mean reward of each step of a whole run; runs share the store, so the model is made once."""
    workflow = WorkflowFolder(folder / "-".join(map(str, words.values())), folder / "store", words)
    workflow.run(timeout=3600)
    return rewards_of(workflow.run_folder)


def rewards_of(run_folder: Path) -> list[float]:
    """Return the mean reward of each step of a run."""
    return [row["rollout/reward_mean"] for row in read_rows(run_folder / "train" / "metrics.jsonl")]


def show(curves: Curves) -> None:
    """Write the figure and report the last steps."""
    FIGURE.write_text(figure(curves))
    last = {staleness: [_mean(rewards[-LAST:]) for rewards in of_seeds] for staleness, of_seeds in curves.items()}
    rows = [(staleness, *(f"{reward:.3f}" for reward in rewards)) for staleness, rewards in last.items()]
    report_table(("max_staleness", *(f"seed {seed}" for seed in SEEDS)), rows)
    for staleness, rewards in last.items():
        report(
            f"reward of the last {LAST} steps at staleness {staleness}, worst seed", min(rewards), GOAL, at_least=True
        )


def figure(curves: Curves) -> str:
    """Return the rewards over the steps as an SVG, one line for each run."""
    num_steps = max(len(rewards) for of_seeds in curves.values() for rewards in of_seeds)

    def place(step: float, reward: float) -> str:
        return f"{LEFT + (RIGHT - LEFT) * step / num_steps:.1f},{BOTTOM - (BOTTOM - TOP) * reward:.1f}"

    name = f"Training reward of the demo over {num_steps} steps, at staleness {', '.join(map(str, curves))}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name}">',
        "<style>text{font:12px system-ui,sans-serif;fill:#6b7280}.grid{stroke:#9ca3af;stroke-opacity:.3}"
        ".curve{fill:none;stroke-width:1.5;stroke-linejoin:round}</style>",
    ]
    for percent in (0, 25, 50, 75, 90, 100):
        y = BOTTOM - (BOTTOM - TOP) * percent / 100
        parts.append(f'<line x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{percent} %</text>')
    for step in range(0, num_steps + 1, 20):
        x = place(step, 0).partition(",")[0]
        parts.append(f'<text x="{x}" y="{BOTTOM + 18}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{(LEFT + RIGHT) / 2:g}" y="{BOTTOM + 36}" text-anchor="middle">step</text>')
    for number, (staleness, of_seeds) in enumerate(curves.items()):
        colour, y = COLOURS[staleness], BOTTOM - 20 - 18 * (len(curves) - 1 - number)
        for rewards in of_seeds:
            starts = range(0, len(rewards) - POINT + 1, POINT)
            points = " ".join(place(begin + POINT / 2, _mean(rewards[begin : begin + POINT])) for begin in starts)
            parts.append(f'<polyline class="curve" stroke="{colour}" points="{points}"/>')
        parts.append(f'<line x1="{RIGHT - 150}" x2="{RIGHT - 126}" y1="{y}" y2="{y}" class="curve" stroke="{colour}"/>')
        parts.append(f'<text x="{RIGHT - 118}" y="{y + 4}">staleness {staleness}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    start(main, quick)
