import dataclasses
import re

import pytest
from benchmarks.published import machine_of
from tests.support.published_layout import PUBLISHED_LAYOUT

from posttrain.plan.problems import find_problems
from posttrain.plan.sizing.flops import sequence_flops
from posttrain.plan.timing import rates
from posttrain.plan.timing.decoding import DecodingGpus, decode_step_seconds, rollout_time
from posttrain.plan.timing.rates import COMPUTE_SHARE
from posttrain.plan.timing.rollout_of_step import (
    engine_of,
    evaluation_seconds,
    evaluation_share,
    rollout_of,
    workload,
)
from posttrain.plan.timing.step_time import (
    best_split,
    optimizer_seconds,
    step_durations,
    sync_seconds,
    train_seconds,
    trainer_of,
    update_causes,
    update_mfu,
)

SHARED_STORAGE = 20e9


@pytest.fixture
def glm5(resolved):
    return resolved("glm5", set=PUBLISHED_LAYOUT).config


def rollout_seconds(config):
    return rollout_of(engine_of(config), config.engine.num_engines, workload(config)).seconds


@pytest.fixture
def h200(glm5):
    return machine_of("H200", glm5.hardware)


def test_a_decode_step_by_hand(resolved):
    """A dense model in BF16: all weights, and the cache of every request."""
    config = resolved("qwen3_4b").config
    engine = DecodingGpus(config.model.architecture, config.hardware, 1, "bf16", dp_attention=False)
    weights = 2 * 4_022_468_096  # tied: the embedding is read as the output matrix
    cache = 36 * 2 * 8 * 128 * 2 * 1000
    seconds = (weights + 10 * cache) / (config.hardware.hbm_gb_per_s * 1e9 * rates.MEMORY_SHARE)
    assert decode_step_seconds(engine, 10, 1000) == pytest.approx(36 * rates.LAYER_SECONDS + seconds, rel=1e-9)


def test_more_requests_read_more_experts_until_all_are_read(glm5):
    engine = engine_of(glm5)
    assert engine.num_gpus == 64
    one, few, many = (decode_step_seconds(engine, count, 0) for count in (1, 8, 1_000))
    assert one < few < many
    others, experts = engine.weights_bytes()
    all_read = (others + experts) / (glm5.hardware.hbm_gb_per_s * 1e9 * rates.MEMORY_SHARE)
    # 8 copies of a token, FP8 there and BF16 back, at 44 GB/s in the 75 layers that have experts.
    dispatched = 75 * 1_000 / 64 * 8 * 6144 * 3 / 44e9
    assert many == pytest.approx(78 * rates.LAYER_SECONDS + all_read + dispatched, rel=1e-6)


def test_a_rollout_lasts_as_long_as_its_longest_response(glm5):
    engine = engine_of(glm5)
    long, short = (rollout_time(engine, 32, 0, tokens, 0.7) for tokens in (2000, 1000))
    assert long.seconds > 2 * short.seconds  # the cache grows, too
    # a mean of half the longest: the running requests fall in a straight line
    even = rollout_time(engine, 32, 0, 1000, 0.5)
    assert even.busy_share == pytest.approx(0.5, abs=0.02)
    assert long.busy_share > even.busy_share


def test_interleaved_stages_have_a_multiple_of_micro_batches(glm5):
    def found(chunks: int) -> int:
        parallel = dataclasses.replace(glm5.parallel, virtual_pipeline_model_parallel_size=chunks)
        training = dataclasses.replace(glm5.training, global_batch_size=36)
        return trainer_of(dataclasses.replace(glm5, parallel=parallel, training=training)).num_micro_batches

    assert found(1) % 4
    assert found(2) == -(-found(1) // 4) * 4


def test_a_step_waits_for_what_a_checkpoint_takes_longer_than_a_rollout(glm5):
    fast, slow = step_durations(glm5, SHARED_STORAGE), step_durations(glm5, SHARED_STORAGE / 4)
    assert slow["step_save"] == pytest.approx(4 * fast["step_save"])
    wait = slow["step_save"] - slow["step_rollout"]
    assert slow["step"] - fast["step"] == pytest.approx(wait / glm5.trainer.save_interval, abs=0.01)


def test_the_recipe_of_16_nodes(glm5):
    trainer = trainer_of(glm5)
    assert (trainer.num_gpus, trainer.num_stages) == (128, 4)
    # 16 samples a data-parallel rank, (256 + 0.7 32768) tokens each, in budgets of 2 x 16384
    assert trainer.num_micro_batches == 12
    seconds = step_durations(glm5, SHARED_STORAGE)
    parts = ("rollout", "old_logprobs", "train", "weight_sync")
    assert seconds["step_save"] < seconds["step_rollout"], "no step waits for a checkpoint"
    assert seconds["step"] == pytest.approx(sum(seconds[f"step_{part}"] for part in parts), abs=0.01)
    assert seconds["train"] == pytest.approx(3000 * seconds["step"] + seconds["step_save"], rel=1e-5)
    # 32.5 GB for each rank of the engine that decodes, whose attention is data-parallel
    # Quantised at 65 GB/s, and half of what a link gives: 88 % of 50 GB/s.
    assert seconds["step_weight_sync"] == pytest.approx(32.5e9 / 65e9 + 32.5e9 / (0.5 * 0.88 * 50e9), rel=0.01)
    assert 0 < seconds["step_idle"] < seconds["step_rollout"] + seconds["step_train"]
    assert seconds["step_rollout"] > 8 * seconds["step_train"]  # the longest of 64 responses decides
    causes = update_causes(glm5)
    assert seconds["step_train"] == pytest.approx(sum(causes.values()), abs=0.001)
    assert list(causes.values()) == sorted(causes.values(), reverse=True)
    # Attention to chosen keys, stages that wait for few micro-batches, the first pass again.
    assert list(causes)[:4] == ["attention", "pipeline idle", "recomputation", "experts"]
    assert update_mfu(glm5) == pytest.approx(0.0679, abs=0.0005)


def test_in_torch_the_indexer_takes_longer(resolved, glm5):
    in_torch = resolved("glm5", set=f"{PUBLISHED_LAYOUT} trainer.indexer_kernel=torch").config
    assert update_mfu(in_torch) == pytest.approx(0.0560, abs=0.0005)
    assert update_causes(in_torch)["indexer"] > 10 * update_causes(glm5)["indexer"] > 0


def test_evaluation_is_a_rollout_of_the_held_out_prompts(resolved, glm5):
    for words in ("engine.mem_fraction_static=0.1", "evaluation.addresses=[gpu7:30000]"):
        config = resolved("glm5", set=f"{PUBLISHED_LAYOUT} {words}").config
        assert not {"evaluate before", "evaluate after"} & set(step_durations(config, SHARED_STORAGE)), words
    large = resolved("glm5", set=f"{PUBLISHED_LAYOUT} evaluation.precision=source").config
    assert {"evaluate before", "evaluate after"} < set(step_durations(large, SHARED_STORAGE)), "two nodes hold it"
    assert {"evaluate before", "evaluate after"} < set(step_durations(glm5, SHARED_STORAGE))
    seconds = step_durations(resolved("glm5_4layer").config, SHARED_STORAGE)
    assert seconds["evaluate before"] == seconds["evaluate after"] > seconds["step_rollout"]  # 2,048 samples, not 64
    one_node = resolved("glm5_4layer", set="data.num_heldout_prompts=16 evaluation.precision=fp8").config
    fewer = step_durations(one_node, SHARED_STORAGE)
    assert one_node.nodes == 1, "where an evaluation has the engines of training"
    assert fewer["evaluate before"] == pytest.approx(fewer["step_rollout"], abs=0.002)  # 16 x 4 samples


def test_engines_that_prefill_do_not_decode(resolved, glm5):
    """Half of 128 GPUs decode 64 samples at the speed of one engine of two; the prompts are short."""
    both = resolved("glm5", set=f"{PUBLISHED_LAYOUT} engine.num_engines=2 engine.pd.num_prefill_engines=0").config
    apart, together = rollout_seconds(glm5), rollout_seconds(both)
    work = workload(glm5)
    assert apart > together
    half = dataclasses.replace(work, num_samples=work.num_samples // 2)
    # The same 64 GPUs prefill the prompts of all, where each engine prefilled those of its half.
    one = rollout_of(engine_of(both), 1, work).seconds
    assert apart == pytest.approx(one, rel=1e-9)
    assert together == pytest.approx(rollout_of(engine_of(both), 1, half).seconds, rel=1e-9)
    slower = resolved("glm5", set=f"{PUBLISHED_LAYOUT} engine.pd.gpus_per_prefill_engine=8").config
    prompts = work.num_samples * sequence_flops(glm5.model.architecture, work.prompt_tokens).forward
    more = prompts * (1 / 8 - 1 / 64) / (glm5.hardware.bf16_tflops * 1e12 * COMPUTE_SHARE)
    assert rollout_seconds(slower) - apart == pytest.approx(more, rel=1e-6)


def test_a_split_keeps_the_engines_that_prefill(resolved):
    settings = "engine.gpus_per_engine=16 engine.pd.gpus_per_prefill_engine=32 trainer.optimizer_cpu_offload=true"
    config = resolved("glm5", set=f"{PUBLISHED_LAYOUT} {settings}").config
    # 10 of 16 nodes train: of 48 GPUs 32 prefill and one engine decodes; with 11 none is left to decode.
    assert best_split(config, fits=lambda nodes: nodes == 10)
    assert best_split(config, fits=lambda nodes: nodes == 11) is None


def test_few_ranks_take_longer_to_send_to_many_engines(resolved):
    """Each byte crosses once: of 16 ranks each sends what 7 of 112 engines of one GPU keep, of 64 what one keeps."""
    words = "engine.gpus_per_engine=1 engine.num_engines={} engine.own_nodes={}"
    few, many, shared = (
        sync_seconds(resolved("qwen3_4b", nodes=16, set=words.format(count, own)).config, SHARED_STORAGE)
        for count, own in ((112, 14), (64, 8), (128, 0))
    )
    assert few == pytest.approx(7 * many, rel=1e-9)
    assert many == shared


def test_the_trainers_nodes_alone_have_its_offloaded_optimizer(resolved):
    words = "trainer.optimizer_cpu_offload=true engine.own_nodes=8"
    apart, all_of_it = (resolved("glm5", nodes=nodes, set=words).config for nodes in (24, 32))
    assert optimizer_seconds(apart) == pytest.approx(optimizer_seconds(all_of_it) * 24 / 16)


def test_an_offloaded_optimizer_takes_longer(resolved, glm5):
    offloaded = resolved("glm5", set=f"{PUBLISHED_LAYOUT} trainer.optimizer_cpu_offload=true").config
    there, here = (step_durations(config, SHARED_STORAGE)["step_train"] for config in (offloaded, glm5))
    # 744e9 parameters, 4 + 2 12 + 2 bytes, 16 nodes at 200 GB/s
    assert there - here == pytest.approx(743.9 * 30 / (16 * 200), rel=0.05)


def test_a_cpu_has_no_step_time(resolved):
    assert step_durations(resolved("tiny").config, SHARED_STORAGE) == {}


def test_the_best_split_leaves_both_enough(resolved):
    settings = (
        "engine.gpus_per_engine=16 engine.num_engines=8 engine.pd.num_prefill_engines=0 "
        "trainer.optimizer_cpu_offload=true"
    )
    config = resolved("glm5", set=f"{PUBLISHED_LAYOUT} {settings}").config
    split = best_split(config)
    assert split.train_nodes + split.rollout_nodes == 16
    # 744e9 parameters of 6 bytes on GPUs of 140.4 GiB
    assert split.train_nodes >= 4
    others = [best_split(config, fits=lambda nodes, only=count: nodes == only) for count in range(4, 15)]
    assert split.step_seconds == min(other.step_seconds for other in others if other)


def test_there_may_be_no_split(glm5):
    """12 nodes hold the trainer; 4 nodes hold no engine of 64 GPUs, and none that prefills beside it."""
    assert best_split(glm5) is None


def test_a_longer_mean_costs_training_time_only(glm5):
    short = workload(glm5)
    long = dataclasses.replace(short, mean_share=0.9)
    trainer = trainer_of(glm5)
    assert train_seconds(trainer, long) > 1.25 * train_seconds(trainer, short)


def test_measuring_between_steps_is_planned_and_refused_above_its_share(resolved):
    plain = resolved("qwen3_4b", suites="gsm8k,math500").config
    often = resolved("qwen3_4b", set="evaluation.interval=1", suites="gsm8k,math500").config
    seconds, without = (step_durations(config, SHARED_STORAGE) for config in (often, plain))
    assert "step_evaluation" not in without
    measured, steps = seconds["step_evaluation"], often.training.num_steps
    # One after each step but the last, which is measured by itself.
    assert seconds["train"] == pytest.approx(without["train"] + (steps - 1) * measured, rel=1e-6)
    alone = evaluation_seconds(dataclasses.replace(plain, evaluation=dataclasses.replace(plain.evaluation, suites={})))
    assert measured > 2 * alone > 0
    (problem,) = (one for one in find_problems(often) if one.key == "evaluation.interval")
    fits = int(re.search(r"evaluation\.interval=(\d+)", problem.remedy)[1])
    for interval, is_refused in ((fits, False), (fits - 1, True)):
        config = resolved("qwen3_4b", set=f"evaluation.interval={interval}", suites="gsm8k,math500").config
        assert [one.key for one in find_problems(config)] == ["evaluation.interval"] * is_refused
    assert evaluation_share(seconds["step"], measured, fits) <= plain.evaluation.max_share
