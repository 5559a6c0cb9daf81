"""The precisions in which a trained model is compared, and the engines that serve each."""

from __future__ import annotations

import dataclasses

from posttrain.config.deployment import ORIGINAL
from posttrain.config.schema import Config

FP8 = "fp8"


def compared_precisions(config: Config) -> tuple[str, ...]:
    """Return the compared precisions, the original first."""
    return (ORIGINAL, FP8, *([config.serving.format] if config.serving.weights == "trained" else []))


def precision_config(config: Config, precision: str) -> Config:
    """Return the configuration whose evaluations serve one of these precisions (`serving_config`).

    The embedded engine dequantises codes of formats other than FP8.
    """
    asked = dataclasses.replace(config.evaluation, precision=FP8 if precision == FP8 else "source")
    config = dataclasses.replace(config, evaluation=asked)
    if precision in (ORIGINAL, FP8) or config.engine.kind == "embedded":
        return config
    engine = dataclasses.replace(config.engine, kind="embedded", python="", gpus_per_engine=1)
    return dataclasses.replace(config, engine=engine)
