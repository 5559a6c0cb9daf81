"""The layout and the engines that the planner chooses where no recipe names them, and what a refusal says."""

import dataclasses
from pathlib import Path

import pytest

from posttrain.config import load
from posttrain.config.derived import world_size
from posttrain.config.schema import Parallel
from posttrain.errors import ConfigError
from posttrain.plan.resolve import resolve
from posttrain.plan.sizing.engine import engine_memory
from posttrain.plan.sizing.layout import assess_layout, propose_layouts
from posttrain.plan.sizing.layout_choice import (
    ENGINE_KEYS,
    can_be_held,
    choose_engine,
    choose_layout,
    nearest_nodes,
    requests_that_fit,
)

CONFIG_DIR = Path(__file__).resolve().parents[4] / "config"
SIZES = {f"parallel.{field.name}" for field in dataclasses.fields(Parallel)}


def refusal_of(**workflow):
    with pytest.raises(ConfigError) as caught:
        resolve({"site": "local", **workflow}, CONFIG_DIR)
    return {problem.key: problem for problem in caught.value.problems}


def test_counts_without_a_recipe_get_the_planners_layout():
    resolved = resolve({"model": "glm5", "site": "local", "nodes": 24}, CONFIG_DIR)
    config, origins = resolved.config, resolved.origins
    assert {origins[f"parallel.{name}"] for name in dataclasses.asdict(config.parallel)} == {"planner"}
    assert (
        f"pipeline_model_parallel_size: {config.parallel.pipeline_model_parallel_size}  # planner"
        in load.dump_resolved(resolved)
    )
    assert assess_layout(config, engine_memory(config)).fits
    assert config.engine.num_engines * config.engine.gpus_per_engine == world_size(config) == 192
    assert origins["engine.gpus_per_engine"] == "planner"


@pytest.mark.parametrize(("model", "nodes"), [("tiny", 1), ("deepseek_v3", 16)])
def test_recipes_and_single_ranks_resolve_as_without_a_planner(tmp_path, monkeypatch, model, nodes):
    monkeypatch.chdir(tmp_path)  # where no older run is
    workflow = {"model": model, "site": "local", "nodes": nodes}
    assert resolve(workflow, CONFIG_DIR) == load.merge(workflow, CONFIG_DIR)


def test_sizes_that_the_user_gives_stay():
    chosen = "parallel.tensor_model_parallel_size=8 engine.gpus_per_engine=64"
    resolved = resolve({"model": "glm5", "site": "local", "nodes": 24, "set": chosen}, CONFIG_DIR)
    assert resolved.config.parallel.tensor_model_parallel_size == 8
    assert resolved.config.engine.gpus_per_engine == 64
    assert resolved.origins["parallel.tensor_model_parallel_size"] == "set="
    assert resolved.origins["parallel.pipeline_model_parallel_size"] == "planner"


def test_too_few_gpus_are_refused_with_the_nearest_that_fit():
    problems = refusal_of(model="glm5", nodes=8)
    assert list(problems) == ["nodes"]
    assert problems["nodes"].code == "trainer-exceeds-memory"
    assert "140.4 GiB" in problems["nodes"].allowed
    assert problems["nodes"].remedy == "nearest that fit: nodes=14; trainer.optimizer_cpu_offload=true"
    resolve({"model": "glm5", "site": "local", "nodes": 8, "set": "trainer.optimizer_cpu_offload=true"}, CONFIG_DIR)


def test_a_count_without_layout_names_the_rules_and_the_nearest_counts():
    problems = refusal_of(model="tiny", nodes=5)
    assert problems["nodes"].code == "no-layout"
    assert problems["nodes"].remedy == "nearest that work: 4, 6"
    assert problems["training.global_batch_size"].code == "batch-divides-ranks"


def test_a_size_that_cannot_work_is_refused_by_its_rule():
    problems = refusal_of(model="tiny", nodes=6, set="parallel.tensor_model_parallel_size=3")
    assert "parallel.tensor_model_parallel_size" in problems
    assert problems["nodes"].remedy == "nearest that work: none"


def test_nodes_for_engines_alone_are_left_when_a_count_is_looked_for(resolved):
    config = resolved("tiny", nodes=6, set="engine.own_nodes=2").config
    assert nearest_nodes(config, lambda variant: True) == [5, 7]
    assert nearest_nodes(config, lambda variant: variant.nodes <= 2) == []
    problem = refusal_of(model="glm5", nodes=12, set="engine.own_nodes=4")["nodes"]
    assert problem.value.startswith("12 (64 ranks, engines on 4 nodes of their own)")


def test_nearest_counts_on_both_sides(resolved):
    config = dataclasses.replace(resolved("tiny").config, nodes=10)
    assert nearest_nodes(config, lambda variant: variant.nodes in (3, 7, 12, 20)) == [7, 12]
    assert nearest_nodes(config, lambda variant: variant.nodes == 11) == [11]
    assert nearest_nodes(config, lambda variant: False) == []


def test_the_search_for_a_count_goes_one_by_one_up_to_128_nodes(resolved):
    config = dataclasses.replace(resolved("tiny").config, nodes=10)
    for nodes, found in ((8, [8]), (128, [128]), (129, [])):
        assert nearest_nodes(config, lambda variant, nodes=nodes: variant.nodes == nodes) == found


def test_one_rank_needs_no_choice_and_two_do(resolved):
    config = resolved("tiny").config
    assert choose_layout(config, {}) == load.Chosen({})
    assert choose_layout(dataclasses.replace(config, nodes=2), {}).values.keys() == SIZES


def test_nodes_that_are_all_for_engines_are_left_to_a_rule(resolved):
    config = dataclasses.replace(resolved("qwen3_30b_a3b").config, nodes=2)
    own = dataclasses.replace(config.engine, own_nodes=2)
    assert choose_layout(dataclasses.replace(config, engine=own), {}) == load.Chosen({})


@pytest.mark.parametrize("key", ENGINE_KEYS)
def test_engines_are_chosen_whole_or_not_at_all(resolved, key):
    config = resolved("qwen3_30b_a3b").config
    assert choose_layout(config, {}).values.keys() == {*SIZES, *ENGINE_KEYS}
    assert choose_layout(config, {key: "set="}).values.keys() == SIZES


@pytest.mark.parametrize(
    ("memory", "refused"),
    [
        (
            60,
            "1 (8 ranks): 64.1 GiB of weights, gradients and optimizer state per rank at best; at most 60 GiB per rank "
            "(h200); nearest that fit: nodes=2; trainer.optimizer_cpu_offload=true",
        ),
        (
            30,
            "1 (8 ranks): 64.1 GiB of weights, gradients and optimizer state per rank at best; at most 30 GiB per rank "
            "(h200); nearest that fit: nodes=4; nodes=2 with trainer.optimizer_cpu_offload=true",
        ),
        # It may fit: what is held does, and the rest is an estimate.
        (66, None),
    ],
)
def test_a_layout_is_refused_where_what_is_held_is_too_large_and_not_on_a_guess(resolved, memory, refused):
    config = dataclasses.replace(resolved("qwen3_30b_a3b").config, nodes=1)
    config = dataclasses.replace(config, hardware=dataclasses.replace(config.hardware, memory_gib_per_gpu=memory))
    chosen, best = choose_layout(config, {}), propose_layouts(config)[0]
    assert not best.fits
    assert chosen.values.items() >= {f"parallel.{name}": size for name, size in best.sizes.items()}.items()
    assert chosen.values.keys() == {*SIZES, *ENGINE_KEYS}
    assert [f"{p.value}; {p.allowed}; {p.remedy}" for p in chosen.problems] == ([refused] if refused else [])
    if refused:
        trainer = dataclasses.replace(config.trainer, optimizer_cpu_offload=True)
        assert "offload" not in requests_that_fit(dataclasses.replace(config, trainer=trainer), {})


def test_what_is_held_may_fill_a_gpu(resolved):
    best = propose_layouts(resolved("qwen3_30b_a3b").config)[0]
    assert can_be_held([dataclasses.replace(best, capacity_gib=best.held_gib)])


def test_a_count_without_layout_keeps_the_sizes_that_are_given_and_chooses_the_engines(resolved):
    config, given = resolved("qwen3_30b_a3b").config, "parallel.expert_tensor_parallel_size"
    parallel = dataclasses.replace(config.parallel, expert_tensor_parallel_size=3)
    chosen = choose_layout(dataclasses.replace(config, nodes=1, parallel=parallel), {given: "set="})
    assert chosen.values.keys() == {*SIZES, *ENGINE_KEYS} - {given}
    (problem,) = chosen.problems
    assert problem.value == "1 (8 ranks)"
    assert problem.code == "no-layout"


def test_an_engine_has_memory_for_a_prompt_and_a_response(resolved):
    """On 4 of the GPUs 364,160 tokens have room: a response of 291,328 with a prompt of a quarter of it, exactly."""
    config = resolved("qwen3_30b_a3b").config
    for longest, gpus in ((291_328, 4), (291_329, 8)):
        rollout = dataclasses.replace(config.rollout, max_response_tokens=longest)
        chosen = choose_engine(dataclasses.replace(config, rollout=rollout), {1: False, 2: False})
        assert chosen == {"engine.gpus_per_engine": gpus, "engine.num_engines": 16 // gpus}
    assert choose_engine(config) == {"engine.gpus_per_engine": 1, "engine.num_engines": 16}


def test_an_engine_spans_whole_nodes_or_parts_of_one(resolved):
    """Neither 4 nor 8 GPUs of nodes with 6 do."""
    config = resolved("qwen3_30b_a3b").config
    config = dataclasses.replace(config, hardware=dataclasses.replace(config.hardware, gpus_per_node=6))
    assert choose_engine(config, {1: False, 2: False, 4: True, 8: True}) == {}
    assert choose_engine(config, {1: False, 2: True})["engine.gpus_per_engine"] == 2


def test_an_engines_gpus_share_the_experts_evenly(resolved):
    """12 experts on engines of 8 GPUs would leave some with two and some with one."""
    config = resolved("glm5").config
    only_eight = {1: False, 2: False, 4: False, 8: True, 16: True, 32: True, 64: True, 128: True}

    def with_experts(count):
        architecture = dataclasses.replace(config.model.architecture, n_routed_experts=count)
        return dataclasses.replace(config, model=dataclasses.replace(config.model, architecture=architecture))

    assert choose_engine(with_experts(256), dict(only_eight))["engine.gpus_per_engine"] == 8
    assert choose_engine(with_experts(24), dict(only_eight))["engine.gpus_per_engine"] == 8
    assert choose_engine(with_experts(12), dict(only_eight)) == {}
    assert choose_engine(with_experts(16), only_eight | {8: False})["engine.gpus_per_engine"] == 16
