"""Builds Megatron's config dataclasses from the table of fields in `plan.flags.megatron_flags`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from posttrain.config.schema import Config
from posttrain.plan.flags import megatron_flags
from posttrain.plan.flags.flag import Flag, as_mapping

# transformers uses this epsilon for both latent norms and the indexer's norm, whatever `rms_norm_eps` says.
LATENT_NORM_EPS = 1e-6
INDEXER_NORM_EPS = 1e-6

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# Fields whose values the table gives as strings.
OBJECTS: dict[str, dict[str, Any]] = {
    "params_dtype": DTYPES,
    "pipeline_dtype": DTYPES,
    "activation_func": {"silu": F.silu},
}


def transformer_config(config: Config) -> TransformerConfig:
    """Return Megatron's config of the model and its parallel layout.

    Args:
        config: The resolved configuration.
    """
    kind = MLATransformerConfig if config.model.architecture.kv_lora_rank else TransformerConfig
    settings = kind(**_arguments(megatron_flags.model_flags(config)))
    for name, value in _arguments(megatron_flags.indexer_flags(config)).items():
        setattr(settings, name, value)
    return settings


def ddp_config(config: Config) -> DistributedDataParallelConfig:
    """Return the settings of Megatron's data-parallel wrapper: gradients in FP32, sharded with the optimizer."""
    return DistributedDataParallelConfig(**_arguments(megatron_flags.ddp_flags(config)))


def optimizer_config(config: Config) -> OptimizerConfig:
    """Return the settings of Megatron's distributed Adam."""
    return OptimizerConfig(**_arguments(megatron_flags.optimizer_flags(config)))


def _arguments(flags: Iterable[Flag]) -> dict[str, Any]:
    """Return the flags as keyword arguments, with strings replaced by the objects that they name."""
    return {name: OBJECTS[name][value] if name in OBJECTS else value for name, value in as_mapping(flags).items()}
