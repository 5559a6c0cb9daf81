from functools import cache
from pathlib import Path

import pytest

from posttrain.plan.forecast.plan_layout import engines_by_gpu, layout_picture, rank_place, rank_places
from posttrain.plan.resolve import resolve

CONFIG_DIR = Path(__file__).resolve().parents[4] / "config"
LAYOUTS = [("glm5", {}), ("glm5", {"nodes": 32}), ("glm5_20layer", {}), ("glm5_4layer", {}), ("glm5", {"nodes": 24})]


@cache
def resolve_model(model, **more):
    return resolve({"model": model, "site": "local", **more}, CONFIG_DIR)


@pytest.fixture
def resolved():
    """Return resolve(model, **more of the workflow's configuration), with the planner's layout where none is given."""
    return resolve_model


@pytest.mark.parametrize(("model", "more"), LAYOUTS)
def test_groups_are_those_of_megatron(resolved, model, more):
    parallel_state = pytest.importorskip("megatron.core.parallel_state")
    config = resolved(model, **more).config
    parallel, places = config.parallel, rank_places(config)
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    context, expert = parallel.context_parallel_size, parallel.expert_model_parallel_size
    expert_tensor, order = parallel.expert_tensor_parallel_size, "tp-cp-ep-dp-pp"
    data, ranks = len(places) // (tensor * context * pipeline), len(places)
    dense = parallel_state.RankGenerator(tp=tensor, ep=1, dp=data, pp=pipeline, cp=context, order=order)
    expert_data = ranks // (expert_tensor * expert * pipeline)
    experts = parallel_state.RankGenerator(tp=expert_tensor, ep=expert, dp=expert_data, pp=pipeline, cp=1, order=order)
    for group, name in (("tp", "tensor"), ("cp", "context"), ("dp", "data"), ("pp", "stage")):
        for members in dense.get_ranks(group):
            assert [getattr(places[rank], name) for rank in members] == list(range(len(members)))
    for members in experts.get_ranks("ep"):
        assert [places[rank].expert for rank in members] == list(range(expert))


def test_a_rank_of_the_recipe_by_hand(resolved):
    # 37 = 32 + 5: the second stage's sixth rank; 5 = 1 x TP4 + 1.
    place = rank_place(resolved("glm5").config, 37)
    assert (place.tensor, place.context, place.data, place.stage, place.expert) == (1, 1, 0, 1, 5)


def test_a_gpu_without_an_engine_is_left_out(resolved):
    values = "engine.num_engines=1 engine.gpus_per_engine=32 engine.pd.num_prefill_engines=0"
    assert engines_by_gpu(resolved("glm5", set=values).config) == dict.fromkeys(range(32), "engine 0")


def test_prefill_engines_come_first(resolved):
    values = "engine.num_engines=1 engine.pd.num_prefill_engines=1 engine.pd.gpus_per_prefill_engine=64"
    engines = engines_by_gpu(resolved("glm5", set=values).config)
    assert [engines[0], engines[63], engines[64], engines[127], len(engines)] == [
        "prefill 0",
        "prefill 0",
        "decode 0",
        "decode 0",
        128,
    ]


def test_the_picture_shows_nodes_that_only_engines_have(resolved):
    config = resolved("glm5", nodes=24, set="engine.own_nodes=8 engine.gpus_per_engine=16 engine.num_engines=3").config
    nodes = layout_picture(config)
    assert [node.name for node in nodes] == [f"node {number}" for number in range(24)]
    assert all(node.stages and not node.engines for node in nodes[:16])
    assert [node.engines for node in nodes[16:]] == [*(f"engine {number // 2}" for number in range(6)), "", ""]
    assert {cell.title for node in nodes[22:] for cell in node.cells} == {"no rank; no engine"}
    assert {len(node.cells) for node in nodes} == {8}


@pytest.mark.parametrize(("model", "more"), [*LAYOUTS, ("tiny", {}), ("glm5", {"hardware": "gb300", "nodes": 32})])
def test_the_picture_shows_every_gpu_once_inside_its_node(resolved, model, more):
    config = resolved(model, **more).config
    nodes = layout_picture(config)
    titles = [cell.title.partition(":")[0] for node in nodes for cell in node.cells]
    assert titles == [f"rank {place.rank}" for place in rank_places(config)]
    assert [node.name for node in nodes] == [f"node {number}" for number in range(config.nodes)]
    assert {len(node.cells) for node in nodes} == {config.hardware.gpus_per_node}
    shades = [cell.shade for node in nodes for cell in node.cells]
    stages = config.parallel.pipeline_model_parallel_size
    assert shades[0] == 0.0
    assert shades[-1] == (1.0 if stages > 1 else 0.0)
    assert len(set(shades)) == stages


def test_a_node_names_its_stages_and_engines(resolved):
    values = "engine.num_engines=2 engine.gpus_per_engine=64 engine.pd.num_prefill_engines=0"
    nodes = layout_picture(resolved("glm5", set=values).config)
    assert [(nodes[n].name, nodes[n].stages) for n in (0, 15)] == [("node 0", "stage 0"), ("node 15", "stage 3")]
    assert [nodes[7].engines, nodes[8].engines] == ["engine 0", "engine 1"]
    assert layout_picture(resolved("glm5_4layer").config)[0].stages.startswith("stage")
