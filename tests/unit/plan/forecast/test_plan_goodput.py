import dataclasses
import json

import pytest
from tests.conftest import resolve_model
from tests.support.workflow_runs import ROOT

from posttrain.plan.forecast.plan import build_plan
from posttrain.plan.forecast.plan_goodput import GOAL, INTERVALS, NODE_COUNTS, RATES, goodput_chart
from posttrain.plan.forecast.plan_page import render_plan
from posttrain.plan.forecast.plan_table import print_plan
from posttrain.plan.forecast.restart import means_today, restart_parts
from posttrain.plan.sizing.storage import storage
from posttrain.plan.timing.duration import Bandwidths, durations_seconds


@pytest.fixture(scope="module")
def plan():
    more = {"nodes": 32}
    return build_plan(resolve_model("glm5", **more))


def test_failures_come_as_often_as_stated():
    assumed, published = RATES
    assert assumed.per_second(256) * 6 * 3600 == pytest.approx(1)
    assert published.per_second(16384) * 54 * 86400 == pytest.approx(466)
    assert published.per_second(256) * 178 * 3600 == pytest.approx(1, rel=0.001)


def test_a_restart_is_the_sum_of_its_parts(plan):
    goodput = plan["goodput"]
    for kind, seconds in goodput["restart_seconds"].items():
        assert seconds == pytest.approx(sum(part["seconds"][kind] for part in goodput["restart_parts"]))
    kinds = goodput["restart_seconds"]
    assert kinds["in_place"] < kinds["on_spare"] < kinds["requeued"]


def test_the_state_is_read_while_engines_start_and_nothing_else_is_read(plan):
    parts = plan["goodput"]["restart_parts"]
    assert not [part for part in parts if "weights on each node" in part["part"]]
    (start,), (state,) = ([part for part in parts if word in part["part"]] for word in ("start engines", "state"))
    for kind, seconds in start["seconds"].items():
        longer = seconds + state["seconds"][kind]
        assert longer == pytest.approx(plan["durations_seconds"]["step_save"], rel=1e-4), "the state takes longer"


def test_a_state_that_does_not_fit_into_the_nodes_memory_is_read_twice(plan):
    small = resolve_model("glm5", nodes=32, set="site.host_memory_gib=1024")
    (found,) = (part for part in parts_of(small) if "training state" in part["part"])
    (usual,) = (part for part in plan["goodput"]["restart_parts"] if "training state" in part["part"])
    more = found["seconds"]["in_place"] - usual["seconds"]["in_place"]
    assert more == pytest.approx(plan["durations_seconds"]["step_save"], rel=1e-4)
    assert "read twice" in found["note"]


def test_a_state_that_is_read_before_engines_have_started_adds_nothing():
    fast = resolve_model("qwen3_4b", hardware="h200")
    (found,) = (part for part in parts_of(fast) if "training state" in part["part"])
    assert set(found["seconds"].values()) == {0.0}


@pytest.mark.parametrize("rollouts", [True, False])
def test_engines_that_read_weights_read_those_of_rollouts(rollouts):
    """Not those that an evaluation has in FP8."""
    words = f"rollout.fp8={str(rollouts).lower()} evaluation.precision=fp8"
    config = resolve_model("glm5", nodes=32, set=words).config
    needed, rates = storage(config), Bandwidths()
    means = dataclasses.replace(means_today(config, needed), reads_weights=True)
    parts = restart_parts(config, needed, rates, durations_seconds(config, needed, rates), means)
    (found,) = (part for part in parts if "weights on each node" in part.part)
    size = needed.rollout_fp8 if rollouts else needed.hf
    assert found.note.startswith(f"{size / 1e9:,.0f} GB")


def test_spare_nodes_are_those_that_the_site_asks_for():
    for spares in (0, 3):
        resolved = resolve_model("glm5", nodes=32, site="example_slurm", set=f"site.slurm.spare_nodes={spares}")
        goodput = build_plan(resolved)["goodput"]
        names = [row["what"] for row in goodput["rates"][0]["features"]]
        assert goodput["spares"] == spares
        assert ("3 spare nodes in the allocation" in names) == bool(spares)


def parts_of(resolved):
    return build_plan(resolved)["goodput"]["restart_parts"]


def test_a_step_without_its_rollout_is_what_is_done_again(plan):
    goodput, seconds = plan["goodput"], plan["durations_seconds"]
    assert goodput["step_seconds"] - goodput["redone_step_seconds"] == pytest.approx(seconds["step_rollout"])
    assert goodput["save_seconds"] == seconds["step_save"] < seconds["step_rollout"]
    assert goodput["waits_for_save_seconds"] == 0


def test_what_a_save_takes_longer_than_a_rollout_is_missing():
    slow = resolve_model("glm5", nodes=32, set="rollout.max_response_tokens=4096")
    plan = build_plan(slow)
    seconds, goodput = plan["durations_seconds"], plan["goodput"]
    assert goodput["waits_for_save_seconds"] > 0
    assert goodput["waits_for_save_seconds"] == pytest.approx(seconds["step_save"] - seconds["step_rollout"])
    assert goodput["rates"][0]["missing"][0]["what"].startswith("steps do not wait for a checkpoint")


def test_every_feature_and_every_missing_thing_gains(plan):
    for rate in plan["goodput"]["rates"]:
        rows = [*rate["features"], *rate["missing"]]
        assert [row["what"] for row in rate["features"]][4:] == [
            "replay of finished groups",
            "engines start without weights",
            "the training state is read while engines start",
            "checkpoints are written during the next rollout",
        ]
        assert rate["best"]["effective_share"] == rate["features"][-1]["effective_share"]
        assert all(row["gain"] >= 0 for row in rows[1:]), rows
        assert rate["best"]["effective_share"] == max(row["effective_share"] for row in rate["by_interval"])
        assert [row["save_interval"] for row in rate["by_interval"]] == list(INTERVALS)
        assert rate["configured"]["save_interval"] == 2


def test_it_says_whether_the_goal_is_reached(plan):
    assumed, published = plan["goodput"]["rates"]
    assert plan["goodput"]["goal"] == GOAL
    assert published["reaches_goal"]
    assert published["best"]["effective_share"] >= GOAL
    assert assumed["reaches_goal"]
    for rate in (assumed, published):
        assert rate["best"]["effective_share"] - rate["configured"]["effective_share"] < 0.005


def test_more_nodes_fail_more_often(plan):
    for rate in plan["goodput"]["rates"]:
        shares = [row["effective_share"] for row in rate["by_nodes"]]
        assert [row["nodes"] for row in rate["by_nodes"]] == list(NODE_COUNTS)
        assert shares == sorted(shares, reverse=True)
        spares = [row["effective_share"] for row in rate["by_spares"]]
        assert spares == sorted(spares)


def test_the_page_the_table_and_the_chart_show_it(plan, capsys):
    page = render_plan(plan, resolve_model("glm5", nodes=32))
    for text in ('id="failures"', "466 in 54 days", "replay of finished groups", "what is missing", "goal is reached"):
        assert text in page
    print_plan(plan)
    assert "replay of finished groups" in capsys.readouterr().out
    svg = goodput_chart(plan["goodput"]).svg()
    assert svg.count('<path class="line') == len(RATES)
    assert ">save interval<" in svg


def test_without_a_step_time_nothing_is_simulated(resolved):
    plan = build_plan(resolved("tiny"))
    assert plan["goodput"] is None
    page = render_plan(plan, resolved("tiny"))
    assert f"Not simulated: {plan['why_no_step']}" in page


def test_it_is_the_same_every_time(plan):
    again = build_plan(resolve_model("glm5", nodes=32))
    assert json.dumps(again["goodput"]) == json.dumps(plan["goodput"])


def test_the_docs_have_these_figures(plan):
    text = (ROOT / "docs" / "planning.md").read_text()
    lines = [line for line in text.splitlines() if line.endswith(" % |")]
    rates = plan["goodput"]["rates"]
    expected = [
        " | ".join(f"{100 * row['effective_share']:.1f} %" for row in rows)
        for rows in zip(*(rate["features"] for rate in rates), strict=True)
    ]
    assert [line.split(" | ", 1)[1].removesuffix(" |") for line in lines] == expected
    for rate in rates:
        assert f"{100 * rate['configured']['effective_share']:.1f} %" in text.split("as configured")[0][-200:]
    for row in rates[0]["missing"]:
        assert f"({100 * row['effective_share']:.0f} %)" in text
