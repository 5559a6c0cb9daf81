"""Kinds of nodes and splits: each row of the table is what a plan with this split says."""

from __future__ import annotations

import dataclasses
import html
from functools import cache

import pytest

from posttrain.plan.forecast.plan import build_plan
from posttrain.plan.forecast.plan_nodes import nodes_part, splits_part
from posttrain.plan.forecast.plan_page import render_plan
from posttrain.plan.forecast.plan_table import print_plan
from posttrain.plan.sizing.memory_phases import capacity_gib
from posttrain.plan.timing.duration import Bandwidths

STORAGE = Bandwidths().shared_storage


@pytest.fixture(scope="module")
def plan_of(resolved):
    return cache(lambda model, **more: build_plan(resolved(model, **more)))


def test_a_row_is_the_plan_of_its_split(plan_of):
    shared, apart = plan_of("glm5", nodes=24), plan_of("glm5", nodes=24, set="engine.own_nodes=6")
    assert [row["own_nodes"] for row in shared["splits"]] == [0, 6, 12, 18]
    assert [row["train_nodes"] for row in shared["splits"]] == [24, 18, 12, 6]
    assert shared["splits"][:2] == apart["splits"][:2], "whichever of them is configured"
    for plan, row in ((shared, shared["splits"][0]), (apart, shared["splits"][1])):
        assert row["seconds"] == plan["step"]["seconds"]
        assert row["rollout"] == plan["durations_seconds"]["step_rollout"]
        engine = plan["engine"]
        assert row["engines"] == f"{engine['num_engines']} x {engine['gpus_per_engine']} GPUs"


def test_a_split_that_cannot_run_ahead_is_synchronous(plan_of, resolved):
    """Engines on the trainer's GPUs cannot run ahead, and engines of their own leave no tail."""
    ahead = "algorithm.preset=tis rollout.max_staleness=2 engine.own_nodes=2"
    tail = ("algorithm.preset=tis rollout.max_staleness=2 engine.own_nodes=0 rollout.tail_fraction=0.5 "
            "rollout.on_new_weights=abort")  # fmt: skip
    for words, is_synchronous in ((ahead, lambda own: own == 0), (tail, lambda own: own > 0)):
        rows = splits_part(resolved("qwen3_4b", nodes=4, set=words).config, STORAGE)
        assert {row["own_nodes"] for row in rows} >= {0, 2}
        for row in rows:
            assert row["engines"].endswith(", synchronous") == is_synchronous(row["own_nodes"]), row
    plain = splits_part(resolved("qwen3_4b", nodes=4, set="algorithm.preset=tis engine.own_nodes=2").config, STORAGE)
    rows = splits_part(resolved("qwen3_4b", nodes=4, set=ahead).config, STORAGE)
    assert rows[0]["rollout"] == plain[0]["rollout"]


def test_why_there_is_no_split(plan_of, resolved):
    whys = [row["why"] for row in plan_of("glm5", nodes=24)["splits"]]
    assert whys[:2] == [None, None]
    assert whys[2] == "no layout of the trainer fits on 12 nodes"
    assert whys[3] == "weights, gradients and optimizer state do not fit on 6 nodes"
    config = resolved("glm5", nodes=32).config
    hungry = dataclasses.replace(config.engine, mem_fraction_static=0.95)
    reasons = {row["why"] for row in splits_part(dataclasses.replace(config, engine=hungry), STORAGE)[1:3]}
    assert reasons == {"engines do not fit (engine.mem_fraction_static)"}
    small = dataclasses.replace(config.engine, mem_fraction_static=0.1)
    reasons = {row["why"] for row in splits_part(dataclasses.replace(config, engine=small), STORAGE)[1:]}
    assert reasons == {f"no engine on {count} nodes holds the weights and a response" for count in (8, 16, 24)}


@pytest.mark.parametrize(
    ("model", "more"), [("tiny", {"nodes": 4}), ("glm5_4layer", {}), ("qwen3_4b", {"recipe": "sft"})]
)
def test_there_may_be_nothing_to_split(resolved, model, more):
    assert splits_part(resolved(model, **more).config, STORAGE) == []


def test_kinds_of_nodes(resolved):
    apart = resolved("glm5", nodes=24, set="engine.own_nodes=8").config
    trainer, engines = nodes_part(apart)
    assert [(kind["kind"], kind["nodes"], kind["fits"]) for kind in (trainer, engines)] == [
        ("trainer", 16, True),
        ("engines", 8, True),
    ]
    for kind in (trainer, engines):
        assert kind["gpu_gib"] == pytest.approx(sum(kind["gpu"].values()), abs=0.01)
    tight = dataclasses.replace(apart.hardware, memory_gib_per_gpu=engines["gpu_gib"] - 1)
    narrow = nodes_part(dataclasses.replace(apart, hardware=tight))
    assert [kind["fits"] for kind in narrow] == [False, True], "an engine takes its share of what is there"
    assert capacity_gib(apart) == 140.4
    (both,) = nodes_part(resolved("glm5").config)
    assert (both["kind"], both["nodes"]) == ("trainer and engines", 16)
    (alone,) = nodes_part(resolved("qwen3_4b", recipe="sft").config)
    assert alone["kind"] == "trainer"


def test_page_and_table_tell_it(plan_of, resolved, capsys):
    more = {"nodes": 24, "set": "engine.own_nodes=6"}
    plan = plan_of("glm5", **more)
    page = html.unescape(render_plan(plan, resolved("glm5", **more)))
    print_plan(plan)
    printed = capsys.readouterr().out
    assert "Engines have 6 nodes of their own: nothing sleeps, and a GPU there holds 110.3 GiB in weight sync" in page
    assert "3 x 16 GPUs" in page
    assert "no layout of the trainer fits on 12 nodes" in page
    assert page.count("no rank; engine 0") == 16
    assert "on 18 of 24 nodes, 144 ranks" in printed
    assert "6, 110.3 of 140.4 GiB per GPU in weight_sync: fits" in printed
    assert "engines, or why not" in printed
    shared = html.unescape(render_plan(plan_of("glm5", nodes=24), resolved("glm5", nodes=24)))
    assert "nodes of their own" not in shared
