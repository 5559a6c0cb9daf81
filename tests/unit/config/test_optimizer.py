"""What the numbers of the optimizer may be, and which of them name a run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from posttrain.config.optimizer import Optimizer
from posttrain.errors import ConfigError
from posttrain.plan.resolve import resolve

CONFIG_DIR = Path(__file__).parents[3] / "config"


def optimizer_with(key: str, value: str) -> Optimizer:
    schedule = "wsd" if key in ("lr_floor", "lr_decay_share") else "constant"
    words = f"optimizer.lr_schedule={schedule} optimizer.lr_warmup_steps=0 optimizer.{key}={value}"
    return resolve({"model": "tiny", "site": "local", "set": words}, CONFIG_DIR).config.optimizer


@pytest.mark.parametrize(
    ("key", "allowed", "refused"),
    [
        ("lr", ["1e-30", "1"], ["0", "1.001"]),
        ("beta1", ["0", "0.9999"], ["-0.001", "0.99991"]),
        ("beta2", ["0", "0.99999"], ["-0.001", "0.999991"]),
        ("eps", ["1e-30"], ["0"]),
        ("weight_decay", ["0"], ["-0.001"]),
        ("clip_grad", ["1e-30"], ["0"]),
        ("lr_warmup_steps", ["0"], ["-1"]),
        ("lr_warmup_share", ["0", "1"], ["-0.001", "1.001"]),
        ("lr_floor", ["0", "1"], ["-0.001", "1.001"]),
        ("lr_decay_share", ["1e-30", "1"], ["0", "1.001"]),
        ("moe_aux_loss_coeff", ["0"], ["-0.001"]),
        ("router_bias_update_rate", ["0", "1"], ["-0.001", "1.001"]),
    ],
)
def test_each_number_has_its_ends(key: str, allowed: list[str], refused: list[str]) -> None:
    for value in allowed:
        assert getattr(optimizer_with(key, value), key) == float(value)
    for value in refused:
        with pytest.raises(ConfigError) as caught:
            optimizer_with(key, value)
        (problem,) = caught.value.problems
        assert problem.key == f"optimizer.{key}"
        assert problem.remedy.startswith("choose "), "refused for its own range"


def test_runs_from_before_these_keys_keep_their_names() -> None:
    newer = {
        *("lr_schedule", "lr_warmup_share", "lr_floor", "lr_decay_share", "decay_norms_and_biases"),
        *("moe_aux_loss_coeff", "router_bias_update_rate"),
    }
    named = resolve({"model": "tiny", "site": "local"}, CONFIG_DIR).experiment["optimizer"]
    assert named.keys() == {field.name for field in dataclasses.fields(Optimizer)} - newer
