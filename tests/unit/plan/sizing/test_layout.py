import dataclasses
import itertools
import time
from pathlib import Path

import pytest
from tests.support.published_layout import PUBLISHED_LAYOUT

from posttrain.config.derived import world_size
from posttrain.config.engine import PrefillDecode
from posttrain.config.rules import check_consistency
from posttrain.config.schema import Parallel
from posttrain.plan.sizing.activations import fullest_micro_batch
from posttrain.plan.sizing.assumptions import ASSUMPTIONS
from posttrain.plan.sizing.engine import engine_memory
from posttrain.plan.sizing.layout import assess_layout, best_fitting_layout, propose_layouts
from posttrain.plan.sizing.layout_choice import choose_layout
from posttrain.plan.sizing.layout_cost import Rates, layout_cost
from posttrain.plan.sizing.memory import stage_memory
from posttrain.plan.sizing.memory_phases import capacity_gib

CONFIG_DIR = Path(__file__).resolve().parents[4] / "config"
MODELS = sorted(path.stem for path in (CONFIG_DIR / "models").glob("*.yaml"))
NODE_COUNTS = (*range(1, 17), 20, 24, 31, 32, 48, 63, 64)


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
    config = resolved("glm5", set=PUBLISHED_LAYOUT).config
    proposals = propose_layouts(config)
    place = [p.parallel for p in proposals].index(config.parallel)
    assert proposals[place].fits
    # Those before it are estimated to take at most a tenth less, but for three of sixteen stages.
    faster = [p for p in proposals[:place] if p.cost.seconds < 0.9 * proposals[place].cost.seconds]
    assert place < 13
    assert [p.parallel.pipeline_model_parallel_size for p in faster] == [16, 16, 16]
    assert 0 < sum(p.fits for p in proposals) < len(proposals)


def test_idle_share_of_a_pipeline(resolved):
    config = resolved("glm5", set=PUBLISHED_LAYOUT).config
    cost = assess_layout(config, engine_memory(config)).cost
    # 64 samples, one per micro-batch, over 4 data-parallel ranks; 16 turns of 78 / 4 layers in 19 turns of 20.
    assert cost.num_micro_batches == 16
    assert cost.idle_fraction == pytest.approx(1 - 16 * 78 / 4 / (19 * 20))


def test_interleaved_stages_idle_for_less_and_send_more(resolved):
    config = resolved("glm5", set=PUBLISHED_LAYOUT).config
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
    config = resolved("glm5", set=PUBLISHED_LAYOUT).config
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


def test_the_last_stage_may_have_a_single_layer(resolved):
    config = dataclasses.replace(resolved("tiny").config, nodes=4)
    arch = dataclasses.replace(config.model.architecture, num_hidden_layers=7, first_k_dense_replace=1)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, architecture=arch))
    cuts = {p.parallel.pipeline_model_parallel_size: p.layers_per_stage for p in propose_layouts(config)}
    assert cuts == {1: (7,), 2: (4, 3), 4: (2, 2, 2, 1)}


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
    tight = dataclasses.replace(config.hardware, memory_gib_per_gpu=120.0)
    config = dataclasses.replace(config, hardware=tight)
    assert not propose_layouts(config)[0].has_headroom
    assert best_fitting_layout(config) == propose_layouts(config)[0]
    small = dataclasses.replace(config, hardware=dataclasses.replace(tight, memory_gib_per_gpu=100.0))
    assert best_fitting_layout(small) is None
