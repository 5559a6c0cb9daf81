"""What the plan says about speculation."""

import pytest

from posttrain.plan.forecast.plan_speculation import speculation_part
from posttrain.plan.timing.step_time import step_durations

SHARED_STORAGE = 20e9


KEEP = "algorithm.preset=tis rollout.max_staleness=1 rollout.on_new_weights=keep engine.mtp_steps=0 engine.own_nodes=16"
TAIL = "algorithm.preset=tis rollout.max_staleness=1 rollout.tail_fraction=0.5 rollout.on_new_weights=abort"


@pytest.mark.parametrize("drafts", [0, 2])
def test_the_step_stands_with_and_without_speculation(resolved, drafts):
    config = resolved("glm5", set=f"engine.mtp_steps={drafts}").config
    part = speculation_part(config, SHARED_STORAGE)
    assert (part["is_on"], part["drafts"]) == (drafts > 0, drafts or 3)
    planned = step_durations(config, SHARED_STORAGE)
    assert part["with" if drafts else "without"] == {"rollout": planned["step_rollout"], "step": planned["step"]}
    saved = {name: part["without"][name] - part["with"][name] for name in ("rollout", "step")}
    assert 0 < saved["rollout"] == pytest.approx(saved["step"], abs=0.01)
    gains = [row["gain"] for row in part["phases"]]
    assert [row["requests"] for row in part["phases"]] == [64, 48, 1]
    assert gains[-1] == max(gains)


@pytest.mark.parametrize(
    ("model", "words"),
    [("tiny", ""), ("qwen3_4b", ""), ("glm5", "hardware.kernels.speculative=false")],
)
def test_nothing_is_said_where_no_engine_drafts(resolved, model, words):
    assert speculation_part(resolved(model, set=words).config, SHARED_STORAGE) is None


def test_nothing_is_said_where_no_engine_may_draft(resolved):
    config = resolved("glm5", nodes=32, set=f"{KEEP} engine.num_engines=1").config
    assert speculation_part(config, SHARED_STORAGE) is None


def test_a_run_that_holds_no_requests_may_draft(resolved):
    """While engines get new weights, nothing is in flight; with recompute and keep something is."""
    part = speculation_part(resolved("glm5", set=TAIL).config, SHARED_STORAGE)
    assert part["with"]["step"] < part["without"]["step"]
