from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.synthetic_run import make_run

from posttrain.plan.resolve import resolve
from posttrain.report.cost import cost_part
from posttrain.report.report_data import read_run
from posttrain.report.report_summary import summarize

CONFIG_DIR = Path(__file__).resolve().parents[3] / "config"


def cost_of(jobs: list[tuple[str, float]], site: str = "local", more: str = "", **choice: Any) -> dict[str, Any]:
    workflow = {"model": "glm5", "site": site, "set": f"site.node_names=[] {more}", **choice}
    return cost_part(resolve(workflow, CONFIG_DIR).config, jobs)


def test_a_gpu_counts_for_as_long_as_it_is_held() -> None:
    # 16 nodes of 8 GPUs train for two hours; a download of ten hours holds none.
    jobs = [("train", 3600.0), ("train", 3600.0), ("download_hf_checkpoint", 36_000.0), ("unknown", 1e9)]
    assert cost_of(jobs) == {"gpu_hours": 256.0, "cost": None, "currency": ""}


def test_spare_nodes_are_held_too() -> None:
    spare = cost_of([("train", 3600.0)], "example_slurm", "site.slurm.spare_nodes=2")
    assert spare["gpu_hours"] == 18 * 8


def test_a_price_makes_costs() -> None:
    priced = cost_of([("train", 1800.0)], more="site.price_per_gpu_hour=2.5 site.currency=EUR")
    assert priced == {"gpu_hours": 64.0, "cost": 160.0, "currency": "EUR"}
    # 12,800 GPU-seconds: 3.5555... hours, 8.8888... EUR.
    rounded = cost_of([("train", 100.0)], more="site.price_per_gpu_hour=2.5 site.currency=EUR")
    assert (rounded["gpu_hours"], rounded["cost"]) == (3.56, 8.89)


def test_without_gpus_there_is_nothing_to_count() -> None:
    assert cost_of([("train", 3600.0)], model="tiny") == {"gpu_hours": None, "cost": None, "currency": ""}


def test_every_attempt_of_a_run_holds_its_gpus(tmp_path: Path) -> None:
    """Two attempts of 71.4 s and 79.9 s, and two evaluations of 11.5 s; the benchmark has the last attempt only."""
    made = make_run(tmp_path, num_steps=4, more="site.price_per_gpu_hour=100 site.currency=EUR", hardware="h200")
    config = made.paths.resolved.config
    evaluations = 2 * 11.5 * config.hardware.gpus_per_node
    training = (71.4 + 79.9) * config.nodes * config.hardware.gpus_per_node
    summary = summarize(read_run(made.inputs))
    assert summary["gpu_hours"] == pytest.approx((training + evaluations) / 3600, abs=0.006)
    assert summary["cost"] == pytest.approx(100 * (training + evaluations) / 3600, abs=0.6)
