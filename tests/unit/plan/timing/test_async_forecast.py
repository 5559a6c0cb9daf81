"""Whether asynchronous training pays, as the plan says it."""

from __future__ import annotations

import time

import pytest

from posttrain.plan.timing.async_forecast import APART, SHARED, explained, forecast_modes, forecast_part
from posttrain.plan.timing.step_time import step_durations

SHARED_STORAGE = 20e9
TAIL_MODE = "shared, tail 0.5"
SELDOM = "trainer.save_interval=50"
KEEP = f"rollout.on_new_weights=keep {SELDOM}"


@pytest.fixture
def glm5(resolved):
    return lambda words="": resolved("glm5", nodes=32, recipe="production", set=words).config


def modes_of(config):
    return {mode.name: mode for mode in forecast_modes(config, SHARED_STORAGE)}


def test_each_mode_has_its_best_split(glm5) -> None:
    """Engines and trainer share all nodes, or have all of them between them; no mode is faster than its bound."""
    config = glm5(KEEP)
    modes = modes_of(config)
    assert [*modes] == [SHARED, TAIL_MODE, APART, "staleness 1", "staleness 4"]
    for mode in modes.values():
        nodes = (mode.num_engines * 64 + mode.num_prefill_engines * 64) / 8
        assert nodes == 32 if mode.name.startswith(SHARED) else nodes + mode.train_nodes <= 32
        assert mode.bound_seconds <= mode.step_seconds
        assert 0 <= mode.staleness <= mode.max_staleness
    assert modes[TAIL_MODE].pause_seconds > 0, "engines that sleep keep no cache, whatever running ahead would do"
    assert modes["staleness 4"].step_seconds < modes["staleness 1"].step_seconds < modes[APART].step_seconds
    # Sharing with another number of prefill engines may be faster than the recipe.
    assert 0.95 < modes[SHARED].step_seconds / step_durations(config, SHARED_STORAGE)["step"] <= 1


def test_the_configured_bound_is_among_the_modes(resolved) -> None:
    words = "algorithm.preset=tis engine.own_nodes=2 rollout.max_staleness=2"
    assert "staleness 2" in modes_of(resolved("qwen3_4b", nodes=4, set=words).config)


def test_it_pays_where_nothing_holds_engines_up(glm5) -> None:
    config = glm5(KEEP)
    part = forecast_part(config, SHARED_STORAGE)
    assert (part["fastest"], part["on_new_weights"]) == ("staleness 4", "keep")
    assert part["why"].startswith("staleness 4 is the fastest, 1.")
    assert part["why"].endswith("the trainer limits it")
    assert min(part["modes"], key=lambda mode: mode["step_seconds"])["name"] == part["fastest"]


def test_why_running_ahead_does_not_pay(glm5) -> None:
    """The recipe as it is: no drafts, contexts computed again, and no time to hide checkpoints in."""
    config = glm5()
    why = explained(config, forecast_modes(config, SHARED_STORAGE))
    assert why.startswith("synchronous (shared); staleness ")
    assert "engine.mtp_steps" in why
    assert "rollout.on_new_weights)" in why
    busy = glm5("rollout.on_new_weights=keep")
    assert "trainer.save_interval" in explained(busy, forecast_modes(busy, SHARED_STORAGE))
    plain = glm5("engine.mtp_steps=0")
    assert "engine.mtp_steps" not in explained(plain, forecast_modes(plain, SHARED_STORAGE))


def test_engines_that_hold_no_request_draft(glm5) -> None:
    """With abort they run ahead with drafts, which more than pays for prefilling what was aborted."""
    keep, abort = (modes_of(glm5(f"{SELDOM} rollout.on_new_weights={mode}")) for mode in ("keep", "abort"))
    assert abort["staleness 1"].step_seconds < 0.9 * keep["staleness 1"].step_seconds
    assert abort["staleness 1"].pause_seconds > keep["staleness 1"].pause_seconds
    plain = modes_of(glm5(f"{SELDOM} rollout.on_new_weights=abort engine.mtp_steps=0"))
    assert abort["staleness 1"].step_seconds < 0.9 * plain["staleness 1"].step_seconds
    assert keep[TAIL_MODE] == abort[TAIL_MODE]


def test_too_few_nodes_for_a_split(resolved) -> None:
    config = resolved("glm5").config
    modes = forecast_modes(config, SHARED_STORAGE)
    assert [mode.name for mode in modes] == [SHARED, TAIL_MODE]
    assert "no split of 16 nodes" in explained(config, modes)


def test_a_tail_is_forecast_and_planned(resolved) -> None:
    """The step of a run that leaves a tail is that of its mode: groups that go on are prefilled again."""
    words = "rollout.max_staleness=2 rollout.tail_fraction=1.0 rollout.on_new_weights=abort algorithm.preset=tis"
    short = "rollout.num_samples_per_prompt=2 training.global_batch_size=16"
    config, plain = (resolved("glm5", set=f"{set_} {short}").config for set_ in (words, ""))
    mode = next(mode for mode in forecast_modes(config, SHARED_STORAGE) if mode.name == "shared, tail 1")
    planned, whole = step_durations(config, SHARED_STORAGE), step_durations(plain, SHARED_STORAGE)
    assert planned["step_rollout"] < 0.95 * whole["step_rollout"]
    assert mode.step_seconds <= planned["step"] * 1.001
    assert 0 < planned["step_idle"] < planned["step"]
    assert mode.pause_seconds > 0


def test_nothing_is_forecast_without_gpus(resolved) -> None:
    assert forecast_part(resolved("tiny").config, SHARED_STORAGE) is None


def test_checkpoints_hide_behind_the_trainer_s_waiting(glm5) -> None:
    """Every step waits for what is left of a checkpoint of 520 s, or every 50th does."""
    often, seldom = (modes_of(glm5(f"rollout.on_new_weights=keep trainer.save_interval={n}")) for n in (1, 50))
    ahead = seldom["staleness 4"]
    assert ahead.checkpoint_seconds * 50 + ahead.trainer_idle * ahead.step_seconds == pytest.approx(520.3, rel=0.01)
    assert often["staleness 4"].step_seconds > ahead.step_seconds + 200
    assert often[SHARED].step_seconds == seldom[SHARED].step_seconds


def test_the_plan_stays_fast(glm5) -> None:
    """0.3 s on an idle machine."""
    config = glm5()
    forecast_part(config, SHARED_STORAGE)
    began = time.process_time()
    forecast_part(config, SHARED_STORAGE)
    assert time.process_time() - began < 0.6
