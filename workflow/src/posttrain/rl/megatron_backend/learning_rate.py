"""The learning rate as a function of the step alone, so that no scheduler state has to be saved."""

from __future__ import annotations

from types import SimpleNamespace

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from posttrain.config.derived import lr_decay_steps, min_lr, warmup_steps
from posttrain.config.schema import Config

# Our names for Megatron's decay styles.
STYLES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "wsd": "WSD"}


def learning_rate(config: Config, step: int) -> float:
    """Return the learning rate of a step, counted from 0, as Megatron's scheduler computes it.

    All updates of a step share it. The first of n warm-up steps uses 1/n of `optimizer.lr`, so that it is not zero.
    After warm-up the decay follows the number of finished steps, so that the last step's rate is not zero either.

    Example:
        lr 1e-6 and 4 warm-up steps, constant: 2.5e-7, 5e-7, 7.5e-7, 1e-6, 1e-6, ...
        lr 1e-6, 4 steps in all, linear: 1e-6, 7.5e-7, 5e-7, 2.5e-7
    """
    optimizer, warm_up = config.optimizer, warmup_steps(config)
    scheduler = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[]),
        init_lr=0.0,
        max_lr=optimizer.lr,
        min_lr=min_lr(config),
        lr_warmup_steps=warm_up,
        lr_decay_steps=max(config.training.num_steps, warm_up + 1),
        lr_decay_style=STYLES[optimizer.lr_schedule],
        # The training step sets weight decay itself.
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=0,
        wd_incr_style="constant",
        wsd_decay_steps=lr_decay_steps(config),
        lr_wsd_decay_style="linear",
    )
    scheduler.num_steps = step + 1 if step < warm_up else step
    return scheduler.get_lr({})
