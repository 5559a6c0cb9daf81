"""The learning rate against transformers' schedulers, which count the same steps once the warm-up is over."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch
from tests.support.megatron_single import test_config
from tests.support.tiny_checkpoint import TRAINED

LR, STEPS = 3e-4, 40


def rates(num_steps: int = STEPS, **optimizer) -> list[float]:
    from posttrain.rl.megatron_backend.learning_rate import learning_rate

    config = test_config(TRAINED)
    training = dataclasses.replace(config.training, num_steps=num_steps)
    changed = dataclasses.replace(config.optimizer, **{"lr": LR, **optimizer})
    config = dataclasses.replace(config, optimizer=changed, training=training)
    return [learning_rate(config, step) for step in range(num_steps)]


def of_transformers(make, **arguments) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LR)
    scheduler, values = make(optimizer, **arguments), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # steps without an optimizer's
        for _ in range(STEPS):
            values.append(optimizer.param_groups[0]["lr"])
            scheduler.step()
    return values


def test_it_rises_from_its_first_part_to_the_whole() -> None:
    of_steps = [rates(6, lr=1e-6, lr_warmup_steps=steps) for steps in (4, 1, 0)]
    assert of_steps[0] == pytest.approx([2.5e-7, 5e-7, 7.5e-7, 1e-6, 1e-6, 1e-6], rel=1e-12)
    assert of_steps[1] == of_steps[2] == [1e-6] * 6
    assert rates(6, lr_warmup_steps=6) == pytest.approx([LR * (step + 1) / 6 for step in range(6)], rel=1e-12)


def test_a_share_is_rounded_up() -> None:
    assert rates(lr_warmup_share=0.1) == rates(lr_warmup_steps=4)
    assert rates(lr_warmup_share=0.11) == rates(lr_warmup_steps=5)
    assert rates(lr_warmup_share=0.001) == rates(lr_warmup_steps=1)


@pytest.mark.parametrize("warm_up", [0, 7])
def test_it_falls_as_transformers_have_it(warm_up: int) -> None:
    from transformers.optimization import (
        get_cosine_with_min_lr_schedule_with_warmup,
        get_linear_schedule_with_warmup,
        get_wsd_schedule,
    )

    both = {"num_warmup_steps": warm_up, "num_training_steps": STEPS}
    line = of_transformers(get_linear_schedule_with_warmup, **both)
    cosine = of_transformers(get_cosine_with_min_lr_schedule_with_warmup, **both, min_lr_rate=0.1)
    # An eighth of 40 steps.
    wsd = of_transformers(get_wsd_schedule, **both, num_decay_steps=5, decay_type="linear", min_lr_ratio=0.2)
    ours = {"lr_warmup_steps": warm_up}
    for mine, theirs in (
        (rates(lr_schedule="linear", **ours), line),
        (rates(lr_schedule="cosine", lr_floor=0.1, **ours), cosine),
        (rates(lr_schedule="wsd", lr_floor=0.2, lr_decay_share=0.125, **ours), wsd),
    ):
        assert mine[warm_up:] == pytest.approx(theirs[warm_up:], rel=1e-9)
        assert mine[:warm_up] == pytest.approx([LR * (step + 1) / warm_up for step in range(warm_up)], rel=1e-12)
        assert mine[-1] > 0, "the last step moves something"
        assert mine[-1] < 0.4 * LR, "and less than the first"
