import dataclasses
from pathlib import Path

import pytest
from tests.support.published_layout import PUBLISHED_LAYOUT

from posttrain.cluster.placement import engines_on_node
from posttrain.config.load import Resolved
from posttrain.plan.forecast.plan import build_plan
from posttrain.plan.forecast.plan_layout import engines_by_gpu
from posttrain.plan.problems import find_problems
from posttrain.plan.resolve import resolve
from posttrain.plan.sizing.activations import (
    MicroBatch,
    forward_bytes,
    fullest_micro_batch,
    most_in_flight,
    saved_bytes,
    stage_activations,
)
from posttrain.plan.sizing.assumptions import ASSUMPTIONS
from posttrain.plan.sizing.engine import engine_memory
from posttrain.plan.sizing.memory import GIB, served_layer_bytes, stage_memory
from posttrain.plan.sizing.memory_phases import (
    NO_STAGE,
    capacity_gib,
    fullest_phase,
    host_gib_by_phase,
    own_engine_memory,
    phase_memory,
    save_staging_bytes,
)
from posttrain.plan.sizing.phases import ASLEEP, ENGINE_CACHE, ENGINE_WEIGHTS, OPTIMIZER, PHASES, TRAINER
from posttrain.plan.timing.step_time import step_durations
from posttrain.rl.training.phases import PhaseClock
from posttrain_weights import COMPARED_AT_ONCE

CONFIG = Path(__file__).parents[4] / "config"
STAGE_1 = range(20, 40)


def rows_of(config, stage):
    return {row.phase: row for row in phase_memory(config) if row.stage == stage}


def test_the_loop_and_the_planner_read_one_table(resolved):
    clock = PhaseClock()
    for name in PHASES:
        with clock.phase(name):
            pass
    with pytest.raises(AssertionError, match="lunch"), clock.phase("lunch"):
        pass
    assert set(rows_of(resolved("glm5").config, 0)) == {*PHASES, ASLEEP.name}


def test_a_layers_own_weights_lie_beside_those_that_engines_have(resolved):
    """GLM-5 on 16 nodes: attention over TP4, 8 of 256 experts, and the shared one; the indexer whole."""
    config = resolved("glm5").config
    attention = (2048 + 576) * 6144 + (2048 * 16384 + 512 * 28672 + 16384 * 6144) // 4
    indexer, expert = 2048 * 4096 + 128 * 6144, 3 * 2048 * 6144
    layer = 2 * (attention + indexer + 8 * expert + expert // 4)
    assert served_layer_bytes(config, 1) == (layer, 10 * 6144 * 16384 // 4)
    rows = rows_of(config, 1)
    assert rows["mismatch"].gpu["served_layer"] == layer / GIB
    # A pass over few tokens takes less than rounding, which has to have room as well.
    few = phase_memory(config, batch=MicroBatch(64, 1, 64))
    (small,) = [row.gpu for row in few if (row.stage, row.phase) == (1, "mismatch")]
    work = small.get("activations", 0.0) + small.get("dispatch", 0.0)
    assert small["served_layer"] == pytest.approx((layer + 10 * 6144 * 16384 // 4) / GIB - work)
    assert [phase for phase, row in rows.items() if "served_layer" in row.gpu] == ["mismatch"]
    never = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, mismatch_interval=0))
    as_trained = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, fp8=False))
    assert served_layer_bytes(never, 1) == served_layer_bytes(as_trained, 1) == (0, 0)


def test_fp32_weights_are_lent_with_embedding_and_output_matrix(resolved):
    config = resolved("tiny", set="rollout.fp8=false").config
    (stage,) = stage_memory(config)
    arch = config.model.architecture
    beside, rounding = served_layer_bytes(config, 0)
    assert rounding == 0
    assert 4 * 2 * arch.vocab_size * arch.hidden_size < beside < stage.weights_bytes


def test_who_is_awake_is_on_the_gpu_and_who_sleeps_in_host_memory(resolved):
    config = resolved("glm5").config
    rows = rows_of(config, 1)
    for name, phase in PHASES.items():
        gpu, host = rows[name].gpu, rows[name].host
        assert (TRAINER in phase.awake) == ("weights" in gpu)
        assert (OPTIMIZER in phase.awake) == ("optimizer" in gpu) == ("gradients" in gpu)
        assert (ENGINE_WEIGHTS in phase.awake) == ("engine_weights" in gpu)
        assert (ENGINE_CACHE in phase.awake) == ("kv_pool" in gpu)
        assert {"sleeping_weights", "sleeping_optimizer"} <= host.keys(), "their place on the host is kept"
    assert set(rows["asleep"].gpu) == {"reserve", "kernels"}
    stage = stage_memory(config)[1]
    held = (stage.weights_bytes + stage.optimizer_bytes) / GIB
    staged = rows["asleep"].host["save_staging"]  # a checkpoint may still be on its way to the disk
    assert rows["asleep"].host_gib == pytest.approx(held + staged)


@pytest.mark.parametrize("model", ["glm5", "qwen3_4b"])
def test_given_responses_leave_the_engines_room_to_the_trainer(model):
    """No engine in any phase, on no GPU and in no host memory, and a trainer that never sleeps."""
    sampled, given = (
        resolve({"model": model, "site": "local", **recipe}, CONFIG).config for recipe in ({}, {"recipe": "sft"})
    )
    parts = {part for item in phase_memory(given) for part in (*item.gpu, *item.host)}
    assert not {part for part in parts if part.startswith(("engine", "kv_pool", "sleeping", "sync"))}
    assert all({"weights", "optimizer"} <= item.gpu.keys() for item in phase_memory(given))
    assert any("engine_weights" in item.gpu for item in phase_memory(sampled))
    huge = dataclasses.replace(given, engine=dataclasses.replace(given.engine, num_engines=999, gpus_per_engine=1))
    assert [problem.key for problem in find_problems(huge)] == []
    seconds = step_durations(given, 1e9)
    assert (seconds["step_rollout"], seconds["step_weight_sync"], seconds["step_old_logprobs"]) == (0, 0, 0)
    assert seconds["step_train"] > 0
    plan = build_plan(Resolved(given, {}, "run"))
    assert (plan["engine"]["num_engines"], plan["best_split"]) == (0, None)
    assert engines_by_gpu(given) == {}
    assert engines_on_node(given, 0) == []


def test_a_trainer_that_does_not_sleep_is_on_the_gpu_in_every_phase(resolved):
    config = resolved("glm5").config
    awake = [row.gpu for row in phase_memory(config, trainer_sleeps=False) if row.stage == 1]
    for part in ("weights", "gradients", "optimizer"):
        assert len({gpu[part] for gpu in awake}) == 1
    assert "weights" not in rows_of(config, 1)["rollout"].gpu


def test_the_pool_and_the_weights_of_an_engine_are_its_static_share(resolved):
    gpu = rows_of(resolved("glm5").config, 0)["rollout"].gpu
    assert gpu["engine_weights"] + gpu["kv_pool"] == pytest.approx(0.7 * 140.4)


def test_saved_activations_of_the_recipe_by_hand(resolved):
    config = resolved("glm5", set=PUBLISHED_LAYOUT).config
    batch = fullest_micro_batch(config, ASSUMPTIONS)
    # The budget is 32,768; a response of as many tokens has a prompt of up to a quarter of that, and a row of its own.
    assert batch == MicroBatch(tokens=40960, num_sequences=1, longest=40960)
    # Full recomputation of single layers: the input of each, 20,480 tokens of this rank over TP4, BF16.
    inputs = 20 * (20480 // 4) * 6144 * 2
    assert saved_bytes(config, STAGE_1, batch) == inputs
    needed = stage_activations(config, 1, [STAGE_1], batch, ASSUMPTIONS)
    assert needed.saved == 3 * inputs
    # Sent and returned, and the same of the rows that arrive, half as many again at the busiest rank.
    assert needed.dispatch == (20480 // 4) * 8 * 6144 * 2 * 2 * 2.5
    assert needed.logprobs == 0
    last = stage_activations(config, 3, [range(60, 78)], batch, ASSUMPTIONS)
    # A chunk of logits, and the matrix's gradient in FP32, each also in BF16; exponentials of a sixteenth of a chunk.
    assert last.logprobs == (154880 // 4) * ((1024 + 6144) * (2 + 4) + 1024 * 4 / 16)


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_what_is_in_flight_is_what_the_schedule_lets_in(stages, chunks):
    """arXiv 2104.04473, section 2.2, and arXiv 2205.05198, section 4.2.3: 1 + (p - 1) / (p v) times as much."""
    of_chunks = [1.0 / chunks] * chunks
    factor = 1 + (stages - 1) / (stages * chunks) if chunks > 1 else 1
    assert most_in_flight(of_chunks, stages, 0) == pytest.approx(stages * factor)
    in_flight = [most_in_flight(of_chunks, stages, stage) for stage in range(stages)]
    assert in_flight == sorted(in_flight, reverse=True)


def test_chunks_in_flight_are_counted_one_by_one():
    """Two stages of two chunks: forward 0 0 1 1 0 0 1 1, backward 1 1 0 0; the first stage is four ahead."""
    assert most_in_flight([1.0, 0.0], stages=2, stage=0) == 4  # 0 0 1 1 0 0, and two have left chunk 1
    assert most_in_flight([0.0, 1.0], stages=2, stage=0) == 2
    assert most_in_flight([1.0, 1.0], stages=2, stage=0) == 5
    assert most_in_flight([1.0, 1.0], stages=2, stage=1) == 3


def test_interleaved_chunks_of_the_recipe(resolved):
    config = resolved("glm5", set=PUBLISHED_LAYOUT).config
    parallel = dataclasses.replace(config.parallel, virtual_pipeline_model_parallel_size=2)
    interleaved = dataclasses.replace(config, parallel=parallel)
    batch = fullest_micro_batch(config, ASSUMPTIONS)
    inputs = 10 * (20480 // 4) * 6144 * 2
    needed = stage_activations(interleaved, 1, [range(10, 20), range(49, 59)], batch, ASSUMPTIONS)
    assert needed.saved == (2 * 2 + 4 + 1) * inputs
    plain, chunked = (rows_of(each, 1)["train"].gpu for each in (config, interleaved))
    assert chunked["activations"] > plain["activations"]
    # The same layers in the middle: a buffer for each chunk is all that differs.
    assert chunked["gradients"] == pytest.approx(plain["gradients"], rel=1e-6)


@pytest.mark.parametrize(
    ("overlong", "prompt", "expected"),
    [
        ("own_row", 1000, MicroBatch(33768, 1, 33768)),
        ("own_row", 0, MicroBatch(40960, 1, 40960)),
        ("cut", 1000, MicroBatch(32768, 1, 32768)),
        ("refuse", 1000, MicroBatch(32768, 1, 32768)),
    ],
)
def test_the_fullest_row_is_the_longest_sample_where_it_exceeds_the_budget(resolved, overlong, prompt, expected):
    config = resolved("glm5").config
    rollout = dataclasses.replace(config.rollout, overlong_samples=overlong, max_prompt_tokens=prompt)
    assert fullest_micro_batch(dataclasses.replace(config, rollout=rollout), ASSUMPTIONS) == expected


def test_recomputation_and_chunks_bound_what_exists_at_a_time(resolved):
    config = resolved("glm5").config
    batch = fullest_micro_batch(config, ASSUMPTIONS)

    def working(**trainer):
        variant = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, **trainer))
        return stage_activations(variant, 1, [STAGE_1], batch, ASSUMPTIONS)

    one, two = working(), working(recompute_num_layers=2)
    kept = working(recompute_granularity="none")
    assert two.working > one.working
    assert two.saved < one.saved
    assert kept.saved > 20 * one.saved
    assert working(attention_chunk_tokens=1024).working > one.working
    # Without a backward pass one layer's tensors exist at a time, and no gradient of a weight.
    assert forward_bytes(config, STAGE_1, batch, ASSUMPTIONS) < one.working


def test_a_save_needs_room_for_one_tensor_of_its_stage(resolved):
    config = resolved("glm5").config
    stages = stage_memory(config)
    first, middle, _, last = (save_staging_bytes(config, stage) for stage in stages)
    # Embedding and output matrix over TP4 are 238 M elements; of their FP32 state a rank has at most its shard.
    assert first == 4 * stages[0].dense_elements // 8 < 4 * (154880 // 4) * 6144
    assert last == 4 * stages[3].dense_elements // 8
    # The output projection over TP4 is whole on some rank: its state in FP32.
    assert middle == 4 * 6144 * (64 * 256 // 4)
    # Of many ranks each has so little of the state that the weight itself is more.
    wide = dataclasses.replace(config, nodes=128)
    assert save_staging_bytes(wide, stage_memory(wide)[0]) == 2 * (154880 // 4) * 6144
    rows = rows_of(config, 0)
    assert rows["save"].gpu_gib < rows["train"].gpu_gib
    assert rows["save"].host["save_staging"] == first / GIB
    assert rows["rollout"].host["save_staging"] == first / GIB, "it is written while the engines generate"


def test_offload_moves_state_to_the_host(resolved):
    inside = rows_of(resolved("glm5", set=PUBLISHED_LAYOUT).config, 1)
    outside = rows_of(resolved("glm5", set=f"{PUBLISHED_LAYOUT} trainer.optimizer_cpu_offload=true").config, 1)
    state = inside["train"].gpu["optimizer"]
    assert inside["train"].gpu_gib - outside["train"].gpu_gib == pytest.approx(state)
    assert all(row.host["offloaded_optimizer"] == pytest.approx(state * 16 / 12) for row in outside.values())


def test_who_never_sleeps_is_planned_beside_the_other_and_refused_where_both_do_not_fit(resolved):
    config = resolved("glm5", set=f"{PUBLISHED_LAYOUT} engine.sleep=never").config
    turns = rows_of(resolved("glm5", set=PUBLISHED_LAYOUT).config, 1)
    trains, rollout = turns["train"], turns["rollout"]
    of_engine = rollout.gpu_gib - rollout.gpu["reserve"] - rollout.gpu["kernels"]
    assert (round(trains.gpu_gib, 1), round(of_engine, 1)) == (126.8, 104.3)
    awake = rows_of(config, 1)["train"]
    assert awake.gpu_gib == pytest.approx(trains.gpu_gib + of_engine)
    assert awake.host == {}
    (problem,) = find_problems(config)
    assert (problem.key, problem.value.split(":")[0]) == ("engine.sleep", "never")
    small = resolved("glm5_4layer", set="engine.mem_fraction_static=0.5 engine.sleep=never").config
    on_cpu = resolved("tiny", set="engine.sleep=never").config
    assert find_problems(small) == find_problems(on_cpu) == []


def test_what_was_sent_is_kept_in_host_memory_where_changes_are_sent(resolved):
    never = "engine.mem_fraction_static=0.5 engine.sleep=never"
    whole = rows_of(resolved("glm5_4layer", set=never).config, 0)
    config = resolved("glm5_4layer", set=f"{never} engine.weight_deltas=true").config
    (stage,) = stage_memory(config)
    for name, row in rows_of(config, 0).items():
        assert row.host["sent_weights"] == pytest.approx(stage.weights_bytes / GIB), "BF16 at most"
        assert row.host_gib == pytest.approx(whole[name].host_gib + row.host["sent_weights"])
        largest = 2 * 154880 * 6144 / config.parallel.tensor_model_parallel_size + 64 * COMPARED_AT_ONCE
        more = largest / GIB if name == "weight_sync" else 0.0
        assert row.gpu_gib == pytest.approx(whole[name].gpu_gib + more)


def test_on_a_cpu_everything_is_in_host_memory_all_the_time(resolved):
    config = resolved("tiny", hardware="cpu", set="hardware.gpus_per_node=2").config
    memory = phase_memory(config)
    assert all({"weights", "gradients", "optimizer", "engine_weights"} <= set(row.gpu) for row in memory)
    assert all(not row.host for row in memory)
    assert capacity_gib(config) == 8
    assert host_gib_by_phase(config, memory)["train"] == pytest.approx(
        2 * max(row.gpu_gib for row in memory if row.phase == "train")
    )


APART = {"nodes": 24, "set": "engine.own_nodes=8"}


def test_where_engines_have_nodes_of_their_own_nobody_shares_a_gpu(resolved):
    config, shared = resolved("glm5", **APART).config, resolved("glm5").config
    ranks, engines = phase_memory(config), own_engine_memory(config)
    held = {part for row in ranks for part in (*row.gpu, *row.host)}
    assert not {part for part in held if part.startswith(("engine", "kv_pool", "sleeping"))}
    assert all({"weights", "gradients", "optimizer"} <= row.gpu.keys() for row in ranks)
    reserves = {row.gpu["reserve"] for row in (*ranks, *engines)}
    (both,) = {row.gpu["reserve"] for row in phase_memory(shared)}
    assert reserves == {both - ASSUMPTIONS.cuda_context}, "one process on each GPU"
    assert [row.phase for row in engines] == [*PHASES]
    served = engine_memory(config)
    for row in engines:
        assert row.stage == NO_STAGE
        assert row.host == {}
        assert row.gpu["engine_weights"] == served.weights_gib_per_gpu
        assert row.gpu["kv_pool"] == served.kv_gib_per_gpu
        assert ("sync_bucket" in row.gpu) == (row.phase == "weight_sync")
    asked = resolved("glm5", **APART | {"set": f"{APART['set']} algorithm.routing_replay=true"}).config
    for row in own_engine_memory(asked):
        assert 0 < row.gpu["engine_routes"] < row.host["engine_routes"]
    assert not any("engine_routes" in {*row.gpu, *row.host} for row in phase_memory(asked))
    assert own_engine_memory(shared) == []
    assert find_problems(config) == []


@pytest.mark.parametrize(
    ("words", "key", "found"),
    [
        ("engine.mem_fraction_static=0.95", "engine.mem_fraction_static", "0.95: 145.4 GiB per GPU of an engine in"),
        (
            "trainer.max_tokens_per_gpu=65536 parallel.tensor_model_parallel_size=1 parallel.context_parallel_size=1",
            "parallel",
            "247.3 GiB per rank of stage 1 in train",
        ),
        ("engine.num_engines=5 engine.gpus_per_engine=16", "engine.num_engines", "80 GPUs in 5 engines"),
    ],
)
def test_what_does_not_fit_on_either_kind_of_node_is_refused(resolved, words, key, found):
    config = resolved("glm5", **APART | {"set": f"{APART['set']} {words}"}).config
    (problem,) = find_problems(config)
    assert problem.key == key
    assert found in problem.value


def test_on_cpus_the_engines_of_a_node_are_in_its_memory(resolved):
    words = "engine.own_nodes=1 engine.num_engines=3"
    config = resolved("tiny", nodes=2, set=words).config
    (gib,) = {row.gpu["engine_weights"] for row in own_engine_memory(config)}
    assert gib == pytest.approx(3 * engine_memory(config).weights_gib_per_gpu)
    pairs = dataclasses.replace(config, engine=dataclasses.replace(config.engine, gpus_per_engine=2))
    (gib,) = {row.gpu["engine_weights"] for row in own_engine_memory(pairs)}
    assert gib == pytest.approx(3 * 2 * engine_memory(pairs).weights_gib_per_gpu)
    assert not any("engine_weights" in row.gpu for row in phase_memory(config))


@pytest.mark.parametrize(("model", "more"), [("tiny", {}), ("glm5", {}), ("glm5", APART)])
def test_the_shortcut_of_the_layout_search_finds_the_fullest_phase(resolved, model, more):
    config = resolved(model, **more).config
    rows = phase_memory(config)
    expected = max(rows, key=lambda row: row.gpu_gib)
    phase, gib = fullest_phase(config, stage_memory(config), engine_memory(config), ASSUMPTIONS)
    assert gib == pytest.approx(expected.gpu_gib)
    assert phase == expected.phase
