"""The section `trainer.mismatch`: limits of the difference between trainer and engine."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.document import _doc


@dataclass(frozen=True)
class MismatchLimits:
    """Largest mean |trainer - engine| log-probability of a step's tokens, in nats, by the coarsest precision in it.

    Two FP32 implementations differ by 1e-7 (measured on the small GLM-5); with a wrong formula, by more than 1e-2.
    BF16: 0.011 was published for a dense model of 4B parameters, and NVIDIA's NeMo RL fails its tests if the mean of
    exp(|difference|) reaches 1.05. FP8 weights: 0.013 on the small GLM-5, 0.04 to 0.07 published for a large sparse
    model, and slime fails its tests above 0.1. An engine with wrong weights differs by 0.7.
    """

    action: str = _doc(
        "If a limit is exceeded: warn (log, metrics, progress line, report), or stop before the step's "
        "update; a stopped run resumes with the same command",
        "warn",
        choices=("warn", "stop"),
    )
    fp32: float = _doc("Limit on the served weights, if trainer and engine compute in FP32", 1e-4, exclusive_minimum=0)
    bf16: float = _doc(
        "Limit if one of them computes in BF16, or the engine has the trainer's weights in BF16",
        0.05,
        exclusive_minimum=0,
    )
    quantised: float = _doc("Limit if the engine's weights are quantised", 0.1, exclusive_minimum=0)
