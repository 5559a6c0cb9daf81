"""The pages in a browser, at two widths, in light and dark: no text meets another, no curve runs through one."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.support.chromium import measure_pages
from tests.support.synthetic_run import REPOSITORY, make_run

from posttrain.plan.forecast.plan import build_plan
from posttrain.plan.forecast.plan_page import plan_title, render_plan
from posttrain.plan.resolve import resolve
from posttrain.report.report import render_report
from posttrain.report.report_data import read_run, read_run_so_far
from posttrain.report.report_summary import summarize
from posttrain.report.verdict import judge_run

WIDTHS = (1400, 700)
# A plan of a run as large as this takes a page of this height at first sight.
TALLEST_PLAN = 5000


def write_report(root: Path, folder: Path, so_far: bool = False, **arguments: Any) -> None:
    made = make_run(root, **arguments)
    if so_far:
        made.paths.train_done.unlink()
        made.paths.evaluation("after").unlink()
    run = read_run_so_far(made.paths, made.inputs.logs, 1.0) if so_far else read_run(made.inputs)
    (folder / f"{root.name}.html").write_text(render_report(run, summarize(run), judge_run(run)))


def write_plan(path: Path, **workflow: Any) -> None:
    resolved = resolve({"site": "local", **workflow}, REPOSITORY / "config")
    path.write_text(render_plan(build_plan(resolved), resolved))


def write_rehearsal(path: Path) -> None:
    from posttrain_rehearsal.outcome import outcome, render
    from posttrain_rehearsal.traces import Call, Trace

    resolved = resolve({"site": "local", "model": "glm5_4layer"}, REPOSITORY / "config")
    holders = [["weights", "rl/megatron_backend/model.py:103", 1 << 32]]
    call = ("allreduce_", "7", tuple(range(8)), ((8,),), "torch.float32", 32, None)
    traces = []
    for rank in (0, 1, 4):
        phases = [
            {"step": 1, "name": name, "peak": 1 << 33, "holders": holders, "host_peak": 0, "flops": 1, "moved": 1}
            | {"kernels": 1, "waits": {"rl/megatron_backend/train_step.py:217 (aten.index.Tensor)": 50}}
            for name in ("rollout", "old_logprobs", "mismatch", "train", "weight_sync")
        ]
        calls = [Call(*call, f"1 {phase['name']}", "rl/megatron_backend/train_step.py:9") for phase in phases]
        traces.append(Trace(rank, 1.0, None, phases, [[0, 1]], calls))
    path.write_text(render(outcome(resolved, resolved.config, traces, 61.0), plan_title(resolved.config)))


def write_serving(path: Path) -> None:
    from posttrain_serving.benchmark.serving_page import render_serving
    from posttrain_serving.benchmark.serving_results import Table, tables_beside

    (published,) = tables_beside(["published"])
    name = "glm5-1a2b3c4d, sglang on eight H200, FP8, prefill apart from decode, of a cluster with a long name"
    mine = Table(name, published.rows[:6])
    path.write_text(render_serving("zai-org/GLM-5-FP8", [mine, published]))


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    runs, folder = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("pages")
    write_report(runs / "demo", folder)
    write_report(runs / "no_reward", folder, reward=0.0)
    write_report(runs / "so_far", folder, so_far=True)
    write_report(runs / "one_step", folder, num_steps=1)
    ahead = "rollout.max_staleness=4 algorithm.preset=tis"
    write_report(runs / "episodes", folder, num_steps=40, recipe="calculator", more=ahead)
    # Two held-out rates so near to each other that their labels would meet, and a learning rate of its own.
    write_report(runs / "unchanged", folder, reward=0.5, num_steps=3000)
    write_plan(folder / "plan_glm5.html", model="glm5", nodes=24)
    write_plan(folder / "plan_that_cannot_run.html", model="glm5", set="parallel.expert_model_parallel_size=8")
    write_plan(folder / "plan_demo.html", model="tiny")
    # Those of annexes, which may be missing.
    if find_spec("posttrain_rehearsal"):
        write_rehearsal(folder / "rehearsal.html")
    if find_spec("posttrain_serving"):
        write_serving(folder / "serving.html")
    return {path.stem: path for path in sorted(folder.glob("*.html"))}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_of_every_drawing_can_be_read(pages: dict[str, Path], scheme: str) -> None:
    measured = measure_pages(pages, WIDTHS, scheme)
    assert {place: result["problems"] for place, result in measured.items() if result["problems"]} == {}
    for (page, width), result in measured.items():
        if page != "rehearsal":  # its bars have no text of their own
            assert result["texts"] >= 50, f"{page} at {width}: the drawings were not found"
        assert result["background"] == ("rgb(247, 247, 245)" if scheme == "light" else "rgb(16, 19, 23)")
    for page in ("plan_glm5", "plan_that_cannot_run", "plan_demo"):
        assert measured[page, 1400]["height"] < TALLEST_PLAN
