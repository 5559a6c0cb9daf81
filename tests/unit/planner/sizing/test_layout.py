import dataclasses
import itertools
import time
from pathlib import Path

import pytest

from posttrain.config import load
from posttrain.config.derived import world_size
from posttrain.config.engine import PrefillDecode
from posttrain.config.rules import check_consistency
from posttrain.config.schema import Parallel
from posttrain.errors import ConfigError
from posttrain.planner.resolve import resolve
from posttrain.planner.sizing.activations import fullest_micro_batch
from posttrain.planner.sizing.assumptions import ASSUMPTIONS
from posttrain.planner.sizing.engine import engine_memory
from posttrain.planner.sizing.layout import assess_layout, best_fitting_layout, propose_layouts
from posttrain.planner.sizing.layout_choice import choose_engine, choose_layout, nearest_nodes
from posttrain.planner.sizing.layout_cost import Rates, layout_cost
from posttrain.planner.sizing.memory import stage_memory
from posttrain.planner.sizing.memory_phases import capacity_gib

CONFIG_DIR = Path(__file__).resolve().parents[4] / "config"
MODELS = sorted(path.stem for path in (CONFIG_DIR / "models").glob("*.yaml"))
NODE_COUNTS = (*range(1, 17), 20, 24, 31, 32, 48, 63, 64)


def refusal_of(**workflow):
    with pytest.raises(ConfigError) as caught:
        resolve({"site": "local", **workflow}, CONFIG_DIR)
    return {problem.key: problem for problem in caught.value.problems}


def with_values(config, values):
    for key, value in values.items():
        section, _, name = key.partition(".")
        config = dataclasses.replace(
            config, **{section: dataclasses.replace(getattr(config, section), **{name: value})}
        )
    return config


@pytest.mark.parametrize("model", MODELS)
def test_every_count_has_a_valid_layout_or_a_reasoned_refusal(model, resolved):
    """A layout in a fraction of a second: what `resolve` does behind the files."""
    started, config = time.process_time(), resolved(model).config
    for nodes in NODE_COUNTS:
        engine = dataclasses.replace(config.engine, pd=PrefillDecode())
        asked = dataclasses.replace(config, nodes=nodes, parallel=Parallel(), engine=engine)
        chosen = choose_layout(asked, {})
        given = with_values(asked, chosen.values)
        problems = check_consistency(given)
        if not chosen.problems:
            assert problems == []
            assert assess_layout(given, engine_memory(given)).held_gib <= capacity_gib(given)
            continue
        (refusal,) = chosen.problems
        assert refusal.key == "nodes"
        assert refusal.remedy.startswith(("nearest that fit: ", "nearest that work: ", "none up to 128 nodes"))
        assert problems or "GiB of weights" in refusal.value, "what fails is named"
    assert time.process_time() - started < len(NODE_COUNTS)


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 6, 8, 12, 16])
def test_no_small_layout_is_missed(resolved, nodes):
    """All products of small sizes, judged by the rules alone."""
    config = dataclasses.replace(resolved("tiny").config, nodes=nodes)
    sizes = range(1, 9)
    valid = set()
    for pipeline, context, expert, last in itertools.product(range(1, 5), (1, 2, 4, 8, 16), sizes, range(4)):
        parallel = Parallel(1, pipeline, context, expert, 1, last)
        variant = dataclasses.replace(config, parallel=parallel)
        fills = world_size(config) % (pipeline * context) == 0 == world_size(config) % (pipeline * expert)
        if fills and not check_consistency(variant):
            valid.add((pipeline, context, expert))
    proposed = {
        (p.pipeline_model_parallel_size, p.context_parallel_size, p.expert_model_parallel_size)
        for p in (proposal.parallel for proposal in propose_layouts(config))
    }
    assert proposed == valid


def test_order_fits_first_then_the_shorter_update(resolved):
    proposals = propose_layouts(resolved("glm5").config)
    verdicts = [(not p.has_headroom, not p.fits) for p in proposals]
    assert verdicts == sorted(verdicts)
    fitting = [p.cost.seconds for p in proposals if p.has_headroom]
    assert fitting == sorted(fitting)
    too_large = [p.peak_gib for p in proposals if not p.fits]
    assert too_large == pytest.approx(sorted(too_large), abs=1e-3)


def test_the_published_recipe_is_among_the_first_that_fit(resolved):
    # Source of the recipe: radixark/miles, scripts/run_glm5_744b_a40b.py, branch of 16 nodes and more.
    config = resolved("glm5").config
    proposals = propose_layouts(config)
    place = [p.parallel for p in proposals].index(config.parallel)
    assert proposals[place].fits
    # Those before it are estimated to take at most a tenth less, but for three of sixteen stages.
    faster = [p for p in proposals[:place] if p.cost.seconds < 0.9 * proposals[place].cost.seconds]
    assert place < 13
    assert [p.parallel.pipeline_model_parallel_size for p in faster] == [16, 16, 16]
    assert 0 < sum(p.fits for p in proposals) < len(proposals)


def test_idle_share_of_a_pipeline(resolved):
    config = resolved("glm5").config
    cost = assess_layout(config, engine_memory(config)).cost
    # 64 samples, one per micro-batch, over 4 data-parallel ranks; 16 turns of 78 / 4 layers in 19 turns of 20.
    assert cost.num_micro_batches == 16
    assert cost.idle_fraction == pytest.approx(1 - 16 * 78 / 4 / (19 * 20))


def test_interleaved_stages_idle_for_less_and_send_more(resolved):
    config = resolved("glm5").config
    parallel = dataclasses.replace(config.parallel, virtual_pipeline_model_parallel_size=2)
    plain, chunked = (
        assess_layout(each, engine_memory(config)).cost
        for each in (config, dataclasses.replace(config, parallel=parallel))
    )
    # 16 turns in 17.5: the others wait for a chunk of 10 layers at a time.
    assert chunked.idle_fraction == pytest.approx(1 - 16 * 78 / 4 / (17.5 * 20))
    assert chunked.seconds < plain.seconds
    assert chunked.communication_fraction > plain.communication_fraction


def test_bytes_sent_in_an_update_of_the_recipe_by_hand(resolved):
    config = resolved("glm5").config
    stages, batch = stage_memory(config), fullest_micro_batch(config, ASSUMPTIONS)
    # A byte takes a second anywhere, and computing takes none.
    rates = Rates(flops=1e40, node_link=1.0, network=1.0, launch_seconds=0.0, latency_seconds=0.0)
    row, tokens = 2 * 6144, 40960  # a response and a prompt of a quarter of it, in a row of its own
    tensor = 4 * (tokens // 2) * row * 3 / 4
    context = tokens * 2 * (512 + 64) / 2
    expert = 2 * (tokens // 8) * 8 * row * 31 / 32
    to_next_stage = 2 * (tokens // 8) * row
    # Experts are on one rank each; of the dense weights a rank keeps an eighth.
    exchange = 6 * 7 / 8 * max(stage.dense_elements for stage in stages)
    expected = 19 * (20 * 3 * (tensor + context + expert) + to_next_stage) + exchange
    cost = layout_cost(config, stages, batch, rates)
    assert cost.seconds == pytest.approx(expected, rel=1e-9)
    assert cost.communication_fraction == pytest.approx(1.0)
    # Two chunks wait for less and send twice as often.
    parallel = dataclasses.replace(config.parallel, virtual_pipeline_model_parallel_size=2)
    expected = 17.5 * (20 * 3 * (tensor + context + expert) + 2 * to_next_stage) + exchange
    chunked = layout_cost(dataclasses.replace(config, parallel=parallel), stages, batch, rates)
    assert chunked.seconds == pytest.approx(expected, rel=1e-9)


def test_stages_are_cut_as_evenly_as_they_can_be(resolved):
    config = dataclasses.replace(resolved("glm5").config, nodes=16)
    cuts = {p.parallel.pipeline_model_parallel_size: p.layers_per_stage for p in propose_layouts(config)}
    assert cuts[4] == (20, 20, 20, 18)
    assert cuts[2] == (39, 39)
    assert cuts[8] == (10,) * 7 + (8,)


def test_rates_are_shares_of_the_hardwares_own(resolved):
    h200, b200 = (Rates.of(resolved("glm5", hardware=name).config.hardware) for name in ("h200", "b200"))
    assert (h200.flops, h200.node_link, h200.network) == (0.4 * 989.5e12, 2 / 3 * 450e9, 0.8 * 50e9)
    assert b200.flops / h200.flops == pytest.approx(2250 / 989.5)
    assert b200.node_link == 2 * h200.node_link


def test_a_small_model_stays_whole(resolved):
    """Unless the network is so slow against the rest that half the gradients are worth a bubble: 16 CPU nodes."""
    for hardware, counts in (("h200", (2, 4, 16)), ("cpu", (2, 4))):
        config = resolved("tiny", hardware=hardware).config
        for nodes in counts:
            best = propose_layouts(dataclasses.replace(config, nodes=nodes))[0]
            assert best.parallel == Parallel(), (hardware, nodes)


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


@pytest.mark.parametrize(("model", "nodes"), [("tiny", 1), ("glm5", 16)])
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
    assert "GiB of weights, gradients and optimizer state per rank at best" in problems["nodes"].value
    assert "140.4 GiB" in problems["nodes"].allowed
    assert problems["nodes"].remedy == "nearest that fit: nodes=16; trainer.optimizer_cpu_offload=true"
    resolve({"model": "glm5", "site": "local", "nodes": 8, "set": "trainer.optimizer_cpu_offload=true"}, CONFIG_DIR)


def test_a_count_without_layout_names_the_rules_and_the_nearest_counts():
    problems = refusal_of(model="tiny", nodes=5)
    assert problems["nodes"].remedy == "nearest that work: 4, 6"
    assert "a multiple of 5" in problems["training.global_batch_size"].allowed


def test_a_size_that_cannot_work_is_refused_by_its_rule():
    problems = refusal_of(model="tiny", nodes=6, set="parallel.tensor_model_parallel_size=3")
    assert "parallel.tensor_model_parallel_size" in problems
    assert problems["nodes"].remedy == "nearest that work: none"


@pytest.mark.parametrize(
    ("model", "more"),
    [("glm5", {}), ("glm5", {"nodes": 24, "set": "engine.own_nodes=8"}), ("qwen3_30b_a3b", {}), ("tiny", {"nodes": 4})],
)
def test_the_best_layout_that_fits_is_the_first_of_all(resolved, model, more):
    config = resolved(model, **more).config
    assert best_fitting_layout(config) == propose_layouts(config)[0]
    pinned = {"tensor_model_parallel_size": 2}
    assert best_fitting_layout(config, pinned) == propose_layouts(config, pinned)[0]


def test_the_best_layout_may_have_little_room_or_there_is_none(resolved):
    config = resolved("glm5", nodes=24, set="engine.own_nodes=8").config
    tight = dataclasses.replace(config.hardware, memory_gib_per_gpu=122.0)
    config = dataclasses.replace(config, hardware=tight)
    assert not propose_layouts(config)[0].has_headroom
    assert best_fitting_layout(config) == propose_layouts(config)[0]
    small = dataclasses.replace(config, hardware=dataclasses.replace(tight, memory_gib_per_gpu=100.0))
    assert best_fitting_layout(small) is None


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


def test_one_rank_needs_no_choice(resolved):
    assert choose_layout(resolved("tiny").config, {}) == load.Chosen({})


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
