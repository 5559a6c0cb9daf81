from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from pathlib import Path

from posttrain.config.derived import lr_decay_steps, share_of, warmup_steps
from posttrain.config.load import merge

CONFIG = merge({"model": "tiny", "site": "local"}, Path(__file__).parents[3] / "config").config


def test_a_share_of_the_steps_is_that_of_the_number_that_was_written() -> None:
    """Floats round some of these products up to one step too many, and others to less than what was meant."""
    off = 0
    for steps in range(1, 201):
        for percent in range(100):
            assert share_of(percent / 100, steps) == Fraction(percent * steps, 100)
            off += percent / 100 * steps != percent * steps / 100
    assert off > 100
    assert share_of(1e-7, 3) == Fraction(3, 10**7)


def test_warm_up_and_decay_are_such_shares() -> None:
    training = dataclasses.replace(CONFIG.training, num_steps=100)
    optimizer = dataclasses.replace(CONFIG.optimizer, lr_warmup_steps=0, lr_warmup_share=0.07, lr_decay_share=0.14)
    config = dataclasses.replace(CONFIG, training=training, optimizer=optimizer)
    assert (warmup_steps(config), lr_decay_steps(config)) == (7, 14)
    assert math.ceil(0.07 * 100) == 8, "what floats say"
    fixed = dataclasses.replace(config, optimizer=dataclasses.replace(optimizer, lr_warmup_steps=3))
    assert warmup_steps(fixed) == 3
