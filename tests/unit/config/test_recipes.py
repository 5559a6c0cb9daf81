"""The numbers of the recipes, by meaning, against the facts that are published of them.

Sources: radixark/miles at 31f1ca961, scripts/run_glm5_744b_a40b.py (1, 6 and 16 nodes); THUDM/slime at 624b824a8,
scripts/run-glm5-744B-A40B.sh (32 nodes). `docs/coming-from.md` maps their flags to ours.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from posttrain.config.derived import (
    data_parallel_size,
    engine_gpus,
    layers_per_stage,
    num_updates_per_step,
    rollout_samples_per_step,
)
from posttrain.config.request import WORKFLOW_KEYS
from posttrain.config.schema import Parallel
from posttrain.errors import ConfigError
from posttrain.plan.flags.sglang_flags import DECODE, PREFILL, UNIFIED, environment_flags, sglang_flags
from posttrain.plan.forecast.plan_speculation import speculation_part
from posttrain.plan.problems import find_problems
from posttrain.plan.resolve import resolve
from posttrain.plan.sizing.engine import engine_memory
from posttrain.plan.sizing.layout import assess_layout
from posttrain.plan.sizing.memory_phases import capacity_gib, phase_memory
from posttrain.plan.timing.duration import Bandwidths
from posttrain.plan.timing.rollout_of_step import workload
from posttrain.plan.timing.step_time import step_durations

ROOT = Path(__file__).resolve().parents[3]
CONFIG_DIR = ROOT / "config"
TWO_CHUNKS = "parallel.virtual_pipeline_model_parallel_size=2"
EVERY_ENGINE_DOES_BOTH = "engine.pd.num_prefill_engines=0 engine.num_engines=2"
DEEPEP_TOKENS = "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"
# (model, nodes): TP, PP, CP, EP, ETP, layers of the last stage where the cut is uneven; layers per stage
LAYOUTS = {
    ("glm5_4layer", 1): (Parallel(4, 1, 1, 8, 1, 0), [4]),
    ("glm5_20layer", 6): (Parallel(4, 3, 1, 16, 1, 6), [7, 7, 6]),
    # Published with CP2 and 16,384 tokens a rank: `docs/planning.md` says what four ranks for a row gain.
    ("glm5", 16): (Parallel(4, 4, 4, 32, 1, 18), [20, 20, 20, 18]),
    ("glm5.1", 16): (Parallel(4, 4, 4, 32, 1, 18), [20, 20, 20, 18]),
    ("glm5", 32): (Parallel(4, 4, 4, 32, 1, 18), [20, 20, 20, 18]),
}
# GPUs of an engine, engines, of which only prefill: one wherever there are several nodes
ENGINES = {
    ("glm5_4layer", 1): (8, 1, 0),
    ("glm5_20layer", 6): (16, 3, 1),
    ("glm5", 16): (64, 2, 1),
    ("glm5.1", 16): (64, 2, 1),
    ("glm5", 32): (64, 4, 1),
}
# Small models on a few nodes, whose trainer and engines lie side by side: layout, GPUs of an engine, engines.
SMALL = {
    ("qwen3_4b", 1): (Parallel(2, 1, 1, 1, 1, 0), 1, 8),
    ("moonlight", 1): (Parallel(4, 1, 1, 8, 1, 0), 1, 8),
    ("qwen3_30b_a3b", 2): (Parallel(4, 1, 1, 16, 1, 0), 8, 2),
    ("glm4.5_air", 4): (Parallel(4, 2, 1, 16, 1, 0), 8, 4),
    ("qwen3.5_4b", 1): (Parallel(2, 1, 1, 1, 1, 0), 1, 8),
    ("qwen3.5_35b_a3b", 2): (Parallel(2, 1, 1, 16, 1, 0), 1, 16),
}
# Models that can be planned: layout and layers per stage.
PLANNED = {
    ("deepseek_v3", 16): (Parallel(8, 4, 2, 32, 1, 13), [16, 16, 16, 13]),
    ("deepseek_v3.2", 16): (Parallel(8, 4, 4, 32, 1, 13), [16, 16, 16, 13]),
    **dict.fromkeys((("glm5.2", 16), ("glm5.3", 16)), (Parallel(8, 2, 2, 64, 1, 40), [38, 40])),
    **dict.fromkeys(
        (("glm5.2", 32), ("glm5.3", 32)), (Parallel(4, 8, 8, 32, 1, 16, 1, 14), [14, 8, 8, 8, 8, 8, 8, 16])
    ),
}


def recipe(model, nodes, **more):
    return resolve({"model": model, "nodes": nodes, "site": "local", **more}, CONFIG_DIR)


def fits_without_sleep(config):
    awake = dataclasses.replace(config, engine=dataclasses.replace(config.engine, sleep="never"))
    return max(row.gpu_gib for row in phase_memory(awake)) <= capacity_gib(awake)


def without_chunks(parallel):
    """Return a layout without the interleaved chunks that the planner adds."""
    return dataclasses.replace(parallel, virtual_pipeline_model_parallel_size=1)


def flags(config, role=UNIFIED):
    return {item.name: item.value for item in sglang_flags(config, role)}


def environment(config, role):
    return {item.name: item.value for item in environment_flags(config, role)}


def test_every_recipe_stands_here():
    files = {path.stem for path in (CONFIG_DIR / "nodes").glob("*.yaml")}
    assert LAYOUTS.keys() == ENGINES.keys()
    assert files == {f"{model}_{nodes}" for model, nodes in (*LAYOUTS, *SMALL, *PLANNED)}


@pytest.mark.parametrize(("model", "nodes"), PLANNED)
def test_the_layouts_of_models_that_can_be_planned(model, nodes):
    config = recipe(model, nodes).config
    assert (without_chunks(config.parallel), layers_per_stage(config)) == PLANNED[model, nodes]
    assert find_problems(config) == []


@pytest.mark.parametrize(("model", "nodes"), SMALL)
def test_small_models_fit_beside_engines_that_do_not_sleep(model, nodes):
    resolved = recipe(model, nodes)
    config, (layout, size, count) = resolved.config, SMALL[model, nodes]
    assert (config.parallel, config.engine.gpus_per_engine, config.engine.num_engines) == (layout, size, count)
    assert resolved.config.nodes == resolve({"model": model, "site": "local"}, CONFIG_DIR).config.nodes
    assert find_problems(config) == []
    assert fits_without_sleep(config)
    # A sample of the longest response fits into a micro-batch with a prompt of 2,048 tokens.
    assert config.trainer.max_tokens_per_gpu >= config.rollout.max_response_tokens + 2048
    # All samples of a step decode at once, even if all are the longest.
    held = engine_memory(config).kv_tokens_per_gpu * count
    assert held >= rollout_samples_per_step(config) / 8 * (config.rollout.max_response_tokens + 2048)


def test_the_smallest_model_fits_on_one_gpu():
    config = recipe("qwen3_0.6b", 1, set="hardware.gpus_per_node=1").config
    assert engine_gpus(config) == 1
    assert find_problems(config) == []
    assert fits_without_sleep(config)


@pytest.mark.parametrize(("model", "nodes"), LAYOUTS)
def test_the_trainer(model, nodes):
    resolved = recipe(model, nodes)
    config = resolved.config
    assert (without_chunks(config.parallel), layers_per_stage(config)) == LAYOUTS[model, nodes]
    is_pruned = "layer" in model
    assert config.trainer.max_tokens_per_gpu == (2048 if is_pruned else 8192)
    assert config.trainer.log_probs_chunk_size == 1024
    if is_pruned:
        recompute = (config.trainer.recompute_granularity, config.trainer.recompute_method)
        assert (*recompute, config.trainer.recompute_num_layers) == ("full", "uniform", 1)
        assert not config.trainer.optimizer_cpu_offload
    else:
        assert resolved.origins["trainer.recompute_granularity"] == "planner"
    assert config.trainer.save_interval == (2 if nodes >= 16 else 20)
    assert config.trainer.deepep


@pytest.mark.parametrize(("model", "nodes"), LAYOUTS)
def test_the_experiment(model, nodes):
    config = recipe(model, nodes).config
    algorithm, optimizer, rollout = config.algorithm, config.optimizer, config.rollout
    assert (algorithm.advantage_estimator, algorithm.clip_ratio_low, algorithm.clip_ratio_high) == ("grpo", 0.2, 0.28)
    assert (algorithm.preset, algorithm.ratio_level, algorithm.clip, algorithm.correction) == (
        *("grpo", "token", "decoupled", "none"),
    )
    assert (optimizer.lr, optimizer.beta1, optimizer.beta2, optimizer.weight_decay) == (1e-6, 0.9, 0.98, 0.1)
    assert optimizer.lr_warmup_steps == 0
    assert (rollout.rollout_batch_size, rollout.num_samples_per_prompt) == (8, 8)
    assert rollout.temperature == 1
    # The 4-layer model runs as the source's debug mode, with 100; of the 20-layer model none is longer than a
    # micro-batch, where the source lets a sample exceed it.
    longest = {"glm5_4layer": 100, "glm5_20layer": 2048}.get(model, 32768)
    assert rollout.max_response_tokens == longest
    assert (config.training.num_steps, config.training.global_batch_size) == (3000, 64)


@pytest.mark.parametrize(("model", "nodes"), ENGINES)
def test_the_engines(model, nodes):
    config = recipe(model, nodes).config
    size, count, prefill = ENGINES[model, nodes]
    engine = config.engine
    assert (engine.gpus_per_engine, engine.num_engines) == (size, count - prefill)
    assert engine.pd.num_prefill_engines == prefill
    if prefill:
        assert (engine.pd.gpus_per_prefill_engine, engine.pd.max_running_requests) == (size, 512)
    assert size * count == engine_gpus(config) == 8 * nodes, "all GPUs serve"
    expected = {
        "--mem-fraction-static": 0.7,
        "--tp-size": size,
        "--ep-size": size,
        "--attn-dp-size": size,
        "--moe-dense-tp-size": 1,
        "--enable-dp-lm-head": True,
        "--attention-backend": "dsa",
        "--dsa-prefill-backend": "flashmla_sparse",
        "--dsa-decode-backend": "flashmla_sparse",
        "--kv-cache-dtype": "bf16",
        "--page-size": 64,
        "--max-running-requests": 512,
        "--chunked-prefill-size": 2048 * size,
        "--watchdog-timeout": 3600,
        "--moe-a2a-backend": "deepep",
        "--deepep-mode": "auto",
    }
    for role in (PREFILL, DECODE) if prefill else (UNIFIED,):
        given = flags(config, role)
        assert {name: given.get(name) for name in expected} == expected
        modes = (given.get("--disaggregation-mode"), environment(config, role)[DEEPEP_TOKENS])
        assert modes == ((role, 32) if prefill else (None, 256))
    assert flags(config, DECODE if prefill else UNIFIED)["--cuda-graph-max-bs-decode"] == (8 if prefill else 256)


def test_eagle_at_32_nodes():
    eagle = {
        "--speculative-algorithm": "EAGLE",
        "--speculative-num-steps": 3,
        "--speculative-eagle-topk": 1,
        "--speculative-num-draft-tokens": 4,
    }
    given = flags(recipe("glm5", 32).config, DECODE)
    assert {name: given.get(name) for name in eagle} == eagle
    assert not eagle.keys() & flags(recipe("glm5", 16).config, DECODE).keys()


def test_recipes_are_for_nodes_of_eight_gpus():
    assert recipe("glm5", 32).origins["parallel.tensor_model_parallel_size"] == "config/nodes/glm5_32.yaml"
    other = recipe("glm5", 32, hardware="gb300", set="parallel.context_parallel_size=2")
    assert other.config.hardware.gpus_per_node == 4
    assert "config/nodes/glm5_32.yaml" not in other.origins.values()
    assert other.config.engine.mtp_steps == 0


def test_production_is_the_same_recipe_with_a_larger_batch():
    """What differs from the smoke-sized recipe, and nothing else of it."""
    small, large = recipe("glm5", 16), recipe("glm5", 16, recipe="production")
    changed = {key for key, origin in large.origins.items() if origin == "config/recipes/production.yaml"}
    assert changed == {
        "rollout.rollout_batch_size",
        "rollout.num_samples_per_prompt",
        "training.global_batch_size",
        "trainer.save_interval",
        "engine.max_running_requests",
    }
    assert without_chunks(small.config.parallel) == without_chunks(large.config.parallel)
    for section in ("algorithm", "optimizer", "data"):
        assert getattr(small.config, section) == getattr(large.config, section)
    assert dataclasses.replace(large.config.rollout, rollout_batch_size=8, num_samples_per_prompt=8) == (
        small.config.rollout
    )
    assert large.run != small.run, "another experiment, another run"


@pytest.mark.parametrize("nodes", [16, 32])
def test_the_production_batch_is_shared_evenly(nodes):
    config = recipe("glm5", nodes, recipe="production").config
    assert num_updates_per_step(config) == 2
    assert config.training.global_batch_size % data_parallel_size(config) == 0


def test_no_recipe_unless_it_is_asked_for():
    assert "recipe" in WORKFLOW_KEYS
    assert recipe("glm5", 16).config == recipe("glm5", 16, recipe=None).config
    with pytest.raises(ConfigError) as caught:
        recipe("glm5", 16, recipe="prodction")
    (problem,) = caught.value.problems
    assert (problem.key, problem.remedy) == ("recipe", "did you mean 'production'?")


def figures(config):
    """Return the planner's figures of a recipe, as they stand in docs/planning.md."""
    served, work, engine = engine_memory(config), workload(config), config.engine
    cost = assess_layout(config, served).cost
    seconds = step_durations(config, Bandwidths().shared_storage)
    samples = rollout_samples_per_step(config)
    on_gpu = samples / (engine.num_engines * engine.gpus_per_engine)
    tokens = samples * work.mean_tokens
    longest = on_gpu * (work.prompt_tokens + work.longest_response)
    return {
        "samples of a step": f"{samples:,}",
        "updates of a step, samples of each": f"{num_updates_per_step(config)} x {config.training.global_batch_size}",
        "tokens of an update": f"{tokens / num_updates_per_step(config) / 1e6:.2f} M",
        "micro-batches of a pipeline": f"{cost.num_micro_batches}",
        "pipeline idle": f"{cost.idle_fraction:.0%}",
        "requests of the engine that decodes": f"{samples / engine.num_engines:,g} of {engine.max_running_requests:,}",
        "requests of each of its GPUs": f"{on_gpu:g}",
        "KV cache used when all are at their longest": f"{longest / served.kv_tokens_per_gpu:.0%}",
        "rollout": f"{seconds['step_rollout']:.0f} s",
        "log-probabilities": f"{seconds['step_old_logprobs']:.0f} s",
        "training": f"{seconds['step_train']:.0f} s",
        "new weights to the engines": f"{seconds['step_weight_sync']:.0f} s",
        "a checkpoint, during a rollout": f"{seconds['step_save']:.0f} s",
        "step": f"{seconds['step']:.0f} s",
        "step with speculation": f"{speculation_part(config, Bandwidths().shared_storage)['with']['step']:.0f} s",
        "GPU time that is idle": f"{seconds['step_idle'] / seconds['step']:.0%}",
        "of which rollout": f"{seconds['step_rollout'] / seconds['step']:.0%}",
        "trained tokens per second": f"{tokens / seconds['step']:,.0f}",
    }


def test_the_figures_of_the_planning_page_are_the_planners():
    text = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    small, large = figures(recipe("glm5", 16).config), figures(recipe("glm5", 16, recipe="production").config)
    for name, value in small.items():
        assert f"| {name} | {value} | {large[name]} |" in text, name
    both = figures(recipe("glm5", 16, recipe="production", set=EVERY_ENGINE_DOES_BOTH).config)
    assert f"`set='{EVERY_ENGINE_DOES_BOTH}'`" in text
    assert f"of {both['rollout']} instead of {large['rollout']}" in " ".join(text.split())
    plain = figures(recipe("glm5", 16, set=TWO_CHUNKS.replace("=2", "=1")).config)
    chunked = figures(recipe("glm5", 16, recipe="production", set=TWO_CHUNKS).config)
    idle = f"idle for {plain['pipeline idle']} instead of {small['pipeline idle']}".replace("%", " %")
    assert f"(`{TWO_CHUNKS}`) for the published batch, whose pipeline would otherwise {idle}." in " ".join(text.split())
    assert f"a step would take {chunked['step']} instead of {large['step']}" in " ".join(text.split())
