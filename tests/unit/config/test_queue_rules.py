"""Rules of rollouts that a queue hands to the trainer."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
from tests.support.rejections import rejected

from posttrain.config.derived import runs_ahead, uses_queue
from posttrain.config.engine import Engine
from posttrain.config.load import merge
from posttrain.config.rollout import Rollout

CONFIG_DIR = Path(__file__).resolve().parents[3] / "config"
AHEAD = "rollout.max_staleness=1 algorithm.preset=tis"
TURNS = f"{AHEAD} engine.sleep=always rollout.tail_fraction=0.25 rollout.on_new_weights=abort"
OVERSAMPLING = "rollout.dynamic_sampling=true rollout.max_oversampling"
OFFLINE = "rollout.num_samples_per_prompt=1 training.objective=sft rollout.temperature=1.0"


def choices_of(section: type, name: str) -> tuple[str, ...]:
    """Return the values that a key may have."""
    return next(field.metadata["choices"] for field in fields(section) if field.name == name)


# model, settings, code, key, and what the rejection has to say
VIOLATIONS = (
    (
        "glm5",
        f"{AHEAD} algorithm.routing_replay=false",
        "engines-share-gpus",
        "rollout.max_staleness",
        "engine.own_nodes",
    ),
    ("tiny", "rollout.max_staleness=1", "staleness-uncorrected", "algorithm.correction", "icepop"),
    ("tiny", f"{AHEAD} training.num_steps=1", "staleness-exceeds-run", "rollout.max_staleness", "at most 0"),
    ("glm5", f"{AHEAD} engine.mtp_steps=3", "drafts-in-flight", "rollout.on_new_weights", "abort"),
    ("glm5", f"{AHEAD} algorithm.routing_replay=false", "engines-share-gpus", "rollout.max_staleness", "tail_fraction"),
    ("tiny", f"{AHEAD} rollout.tail_fraction=0.25", "tail-of-own-engines", "rollout.tail_fraction", "leave it out"),
    ("tiny", f"{TURNS} rollout.max_staleness=0", "tail-without-staleness", "rollout.max_staleness", "max_staleness=1"),
    ("tiny", f"{TURNS} rollout.on_new_weights=keep", "tail-aborts", "rollout.on_new_weights", "abort"),
    ("tiny", "rollout.longest_first=true", "order-without-queue", "rollout.longest_first", "dynamic_sampling=true"),
    ("tiny", f"{OVERSAMPLING}=inf", "out-of-range", "rollout.max_oversampling", "finite"),
    ("tiny", f"{OVERSAMPLING}=1e300", "out-of-range", "rollout.max_oversampling", "at most 100"),
    ("tiny", f"{OFFLINE} rollout.tail_fraction=0.5", "not-for-supervised", "rollout.tail_fraction", "0.0"),
    ("tiny", f"{OFFLINE} rollout.max_staleness=1", "not-for-supervised", "rollout.max_staleness", "samples nothing"),
    ("tiny", f"{OFFLINE} rollout.dynamic_sampling=true", "not-for-supervised", "rollout.dynamic_sampling", "false"),
)


@pytest.mark.parametrize(("model", "settings", "code", "key", "datum"), VIOLATIONS)
def test_what_has_no_meaning_is_rejected(model: str, settings: str, code: str, key: str, datum: str) -> None:
    """Each names the key, what is allowed and the nearest setting that works."""
    with rejected(code, datum, key=key):
        merge({"model": model, "site": "local", "set": settings}, CONFIG_DIR)


# Where each mode of `rollout.on_new_weights` is run against the engine.
RUNS = {
    "sglang": "end_to_end/test_running_updates_in_sglang.py",
    "embedded": "unit/rl/engines/embedded/test_running_updates.py",
}


@pytest.mark.parametrize("kind", choices_of(Engine, "kind"))
@pytest.mark.parametrize("mode", choices_of(Rollout, "on_new_weights"))
def test_every_engine_has_every_way_to_take_new_weights(kind: str, mode: str) -> None:
    """A new kind of engine, or a new mode, needs a test that runs it, or a rule that rejects it."""
    settings = f"{AHEAD} engine.kind={kind} rollout.on_new_weights={mode}"
    merge({"model": "tiny", "site": "local", "set": settings}, CONFIG_DIR)
    assert f'"{mode}"' in (Path(__file__).parents[2] / RUNS[kind]).read_text()


@pytest.mark.parametrize(
    ("settings", "is_queue", "is_ahead"),
    [
        ("", False, False),
        ("rollout.dynamic_sampling=true", True, False),
        (AHEAD, True, True),
        ("rollout.max_staleness=4 algorithm.old_logprobs=engine", True, True),
        (TURNS, True, False),
    ],
)
def test_what_uses_the_queue(settings: str, is_queue: bool, is_ahead: bool) -> None:
    """Without either key the synchronous step stays as it is."""
    config = merge({"model": "tiny", "site": "local", "set": settings}, CONFIG_DIR).config
    assert (uses_queue(config), runs_ahead(config)) == (is_queue, is_ahead)
