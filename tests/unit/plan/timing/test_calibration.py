"""Time of a calibration: its weights and forward passes of training's layout."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from posttrain.config.schema import Config
from posttrain.plan.job_needs import RuleNeeds
from posttrain.plan.resolve import resolve
from posttrain.plan.sizing.storage import storage
from posttrain.plan.timing.calibration import calibration_seconds
from posttrain.plan.timing.step_time import trainer_of
from posttrain.plan.timing.update_time import forward_causes

CONFIG_DIR = Path(__file__).parents[4] / "config"
RATE = 20e9


def config(changes: str = "", **words: object) -> Config:
    return resolve({"site": "local", **({"set": changes} if changes else {}), **words}, CONFIG_DIR).config


def test_one_shard_is_one_forward_pass_behind_the_weights() -> None:
    one = "serving.passes.coding.num_samples=0 serving.passes.broad.num_samples=0 serving.passes.deep.num_samples=16"
    glm5 = config(f"{one} serving.samples_per_shard=16", model="glm5", nodes=16)
    tokens = glm5.serving.passes["deep"].max_tokens
    trainer = trainer_of(glm5)
    rows = -(-16 * tokens // (trainer.data * glm5.trainer.max_tokens_per_gpu * trainer.context))
    trainer = dataclasses.replace(trainer, num_updates=1, num_micro_batches=max(rows, 1))
    once = sum(forward_causes(trainer, 16, tokens).values())
    read = storage(glm5).torch_dist / RATE
    assert calibration_seconds(glm5, RATE) == pytest.approx(read + once)
    twice = dataclasses.replace(glm5.serving, passes={**glm5.serving.passes, "again": glm5.serving.passes["deep"]})
    assert calibration_seconds(dataclasses.replace(glm5, serving=twice), RATE) == pytest.approx(read + 2 * once)


def test_the_plan_and_the_message_tell_it() -> None:
    needs = RuleNeeds(config(model="glm5", nodes=16))
    seconds = needs.of("calibrate").seconds
    assert seconds is not None
    assert 60 < seconds < 3 * 3600
    assert needs.message("calibrate").startswith(" (16 nodes, 128 GPUs, about ")


@pytest.mark.parametrize("words", [{"model": "qwen3_4b"}, {"model": "tiny"}])
def test_a_dense_model_and_a_machine_without_gpus_have_none(words: dict[str, str]) -> None:
    assert calibration_seconds(config(**words), RATE) == 0
