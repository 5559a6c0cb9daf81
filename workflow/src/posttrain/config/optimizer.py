"""The section `optimizer`, with the learning-rate schedule."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.document import _doc


@dataclass(frozen=True)
class Optimizer:
    """Adam with decoupled weight decay."""

    lr: float = _doc("Learning rate", exclusive_minimum=0, maximum=1)
    beta1: float = _doc("Decay of the first moment", minimum=0, maximum=0.9999)
    beta2: float = _doc("Decay of the second moment", minimum=0, maximum=0.99999)
    eps: float = _doc("Added to the denominator", exclusive_minimum=0)
    weight_decay: float = _doc("Decoupled weight decay", minimum=0)
    clip_grad: float = _doc("Maximum global gradient norm", exclusive_minimum=0)
    lr_schedule: str = _doc(
        "Learning rate after the warm-up: constant; linear or cosine decay to the floor at the end of "
        "the run; or wsd, linear decay over the last steps only",
        choices=("constant", "linear", "cosine", "wsd"),
        unnamed="constant",
    )
    lr_warmup_steps: int = _doc("Steps (not updates) of linear warm-up", minimum=0)
    lr_warmup_share: float = _doc(
        "Warm-up as a share of `training.num_steps`, rounded up; an alternative to `lr_warmup_steps`",
        minimum=0,
        maximum=1,
        unnamed=0.0,
    )
    lr_floor: float = _doc(
        "Share of `lr` at which the schedule ends",
        minimum=0,
        maximum=1,
        unnamed=0.0,
        used_by={"optimizer.lr_schedule": ("linear", "cosine", "wsd")},
    )
    lr_decay_share: float = _doc(
        "Share of `training.num_steps`, rounded up, over which the learning rate decays (wsd)",
        exclusive_minimum=0,
        maximum=1,
        unnamed=0.1,
        used_by={"optimizer.lr_schedule": ("wsd",)},
    )
    decay_norms_and_biases: bool = _doc(
        "Apply weight decay to norms and biases, too, which Megatron exempts", unnamed=False
    )
    moe_aux_loss_coeff: float = _doc(
        "Factor of the routers' load-balancing loss, averaged over the update's tokens; 0: none",
        minimum=0,
        unnamed=0.0,
    )
    router_bias_update_rate: float = _doc(
        "Per update, this is added to the bias of experts with fewer tokens than the mean and subtracted "
        "from the others; 0: biases are fixed",
        minimum=0,
        maximum=1,
        unnamed=0.0,
    )
