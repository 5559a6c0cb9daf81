"""The configuration's section `algorithm`: parts and parameters. Read at every dry run, so it imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.document import ANY, _doc
from posttrain.rl.algorithm.parts import part_names

# Fields for learning from rewards, without effect on offline responses.
_OF_REWARDS = {"training.objective": ("rl",)}


@dataclass(frozen=True)
class Algorithm:
    """How the policy learns from rewards: five parts that can be combined freely."""

    preset: str = _doc(
        "Line of `config/algorithms.yaml`, a layer between `base.yaml` and the model's file",
        unnamed=ANY,
        used_by=_OF_REWARDS,
    )
    advantage_estimator: str = _doc(
        "How rewards become advantages", choices=part_names("advantage"), used_by=_OF_REWARDS
    )
    normalize_by_std: bool = _doc(
        "Divide the group's advantages by its standard deviation (off: Dr. GRPO)",
        used_by=_OF_REWARDS | {"algorithm.advantage_estimator": ("grpo",)},
    )
    ratio_level: str = _doc(
        "Unit of the importance ratio: a token, a sequence (the product of its tokens' ratios), or a "
        "sequence by the geometric mean of its ratios (GSPO)",
        choices=part_names("level"),
        unnamed="token",
        used_by=_OF_REWARDS,
    )
    old_logprobs: str = _doc(
        "Denominator of the importance ratio: log-probabilities of the trainer before the first update, "
        "or those that the engine reported when it sampled",
        choices=("trainer", "engine"),
        unnamed="trainer",
        used_by=_OF_REWARDS,
    )
    clip: str = _doc(
        "How the importance ratio is clipped", choices=part_names("clip"), unnamed="decoupled", used_by=_OF_REWARDS
    )
    clip_ratio_low: float = _doc(
        "The importance ratio is clipped below 1 - this", minimum=0, maximum=1, used_by=_OF_REWARDS
    )
    clip_ratio_high: float = _doc("The importance ratio is clipped above 1 + this", minimum=0, used_by=_OF_REWARDS)
    clip_ratio_dual: float = _doc(
        "Upper bound of the ratio for negative advantages",
        exclusive_minimum=1,
        unnamed=3.0,
        used_by=_OF_REWARDS | {"algorithm.clip": ("dual",)},
    )
    loss_aggregation: str = _doc("Denominator of the loss", choices=part_names("aggregation"))
    mask_truncated: bool = _doc(
        "Leave responses that were cut at the token limit out of the loss (DAPO's overlong filtering); their rewards "
        "count in the advantages of their groups",
        False,
        unnamed=False,
        used_by=_OF_REWARDS,
    )
    correction: str = _doc(
        "How the difference between trainer and engine is corrected",
        choices=part_names("correction"),
        unnamed="none",
        used_by=_OF_REWARDS,
    )
    correction_level: str = _doc(
        "Unit of a correction factor",
        choices=part_names("level"),
        unnamed="token",
        used_by=_OF_REWARDS | {"algorithm.correction": ("mask", "truncate")},
    )
    correction_low: float = _doc(
        "Smaller correction factors are set to 0",
        minimum=0,
        unnamed=0.0,
        used_by=_OF_REWARDS | {"algorithm.correction": ("mask",)},
    )
    correction_high: float = _doc(
        "Largest correction factor",
        exclusive_minimum=0,
        unnamed=2.0,
        used_by=_OF_REWARDS | {"algorithm.correction": ("mask", "truncate")},
    )
    routing_replay: bool = _doc(
        "Route each token to the experts that the engine chose for it, in every pass of the trainer (R3)",
        unnamed=False,
        used_by=_OF_REWARDS,
    )
    zero_advantages: str = _doc(
        "An update whose advantages are all zero: skip (count it and keep the weights), or update "
        "(momentum and weight decay still change them)",
        choices=("skip", "update"),
        unnamed="update",
        used_by=_OF_REWARDS,
    )
    non_finite: str = _doc(
        "A non-finite loss or gradient norm: abort the run, or skip_step (count it and keep the weights)",
        choices=("abort", "skip_step"),
    )
