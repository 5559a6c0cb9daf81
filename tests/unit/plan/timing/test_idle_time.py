"""Every GPU that waits is counted, against sums made by hand."""

import pytest

from posttrain.plan.timing.decoding import RolloutTime
from posttrain.plan.timing.idle_time import StepTimes, idle_gpu_seconds
from posttrain.plan.timing.step_time import step_durations

ROLLOUT = RolloutTime(100.0, busy_share=0.75, prefill_seconds=10.0)


def test_engines_that_prefill_wait_while_others_decode(resolved):
    """128 GPUs: 64 prefill for 10 s, then 64 decode for 90 s; then four stages train for 40 s, 5 s of it idle."""
    idle = idle_gpu_seconds(resolved("glm5").config, StepTimes(ROLLOUT, 40.0, 5.0, 0.5))
    assert idle == pytest.approx(
        {
            "longest sample": 64 * 90 * 0.25,
            "prefill engines": 64 * 90,
            "waiting for prefill": 64 * 10,
            "pipeline": 128 * 5,
            "checkpoint": 128 * 0.5,
        }
    )


def test_engines_on_nodes_of_their_own_take_turns_with_the_trainer(resolved):
    words = "engine.own_nodes=8 engine.num_engines=1 engine.gpus_per_engine=32 engine.pd.num_prefill_engines=0"
    config = resolved("glm5", nodes=24, set=words).config
    idle = idle_gpu_seconds(config, StepTimes(ROLLOUT, 40.0, 0.0, 0.0))
    assert idle == pytest.approx(
        {
            "longest sample": 32 * 90 * 0.25,
            "without an engine": (16 * 8 + 32) * 100,  # the trainer's nodes, and four without an engine
            "engines' own nodes": 8 * 8 * 40,
        }
    )


def test_given_responses_leave_only_the_pipeline(resolved):
    config = resolved("glm5", recipe="sft").config
    assert set(idle_gpu_seconds(config, StepTimes(RolloutTime(0.0, 1.0), 40.0, 5.0, 0.0))) == {"pipeline"}


def test_the_published_recipe_of_glm5_waits_for_most_of_its_gpu_time(resolved):
    seconds = step_durations(resolved("glm5").config, 20e9)
    assert seconds["step_idle"] / seconds["step"] == pytest.approx(0.62, abs=0.01)
