"""The parts of a tiny model that no step trains and every step must preserve: MTP layers and a vision tower.

Those of Qwen3.5 are random, norms included, so that a lost or exchanged tensor shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from posttrain.checkpoint.formats.config_sections import VISION
from posttrain.checkpoint.formats.modelling import import_modelling
from posttrain.checkpoint.param_names import HF_VISION
from posttrain.config.families import FAMILIES

# Larger than large models' 0.02, because the rows of these matrices are short.
INITIALIZER_RANGE = 0.05


def numbered_mtp_tensors(layer: nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    """Return what joins an MTP layer, numbered after the decoder's layers, to embedding and last hidden state."""
    width = int(cast(Any, layer).hidden_size)
    joint = torch.empty(width, 2 * width).normal_(std=INITIALIZER_RANGE)
    norms = ("enorm", "hnorm", "shared_head.norm")
    ones = {f"{prefix}{norm}.weight": torch.ones(width, dtype=torch.bfloat16) for norm in norms}
    return {f"{prefix}eh_proj.weight": joint.bfloat16(), **ones}


@torch.no_grad()
def randomize_norms(layer: nn.Module) -> None:
    """Give the norms of a decoder layer, which are around 1 and begin with zeros, other values."""
    for name, value in layer.named_parameters():
        if "norm" in name:
            value.normal_(std=INITIALIZER_RANGE)


def joint_mtp_tensors(layer: nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    """Return what joins MTP layers with names of their own to embedding and last hidden state; norms are around 1."""
    width = int(cast(Any, layer).hidden_size)
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (width, 2 * width)}
    shapes |= {f"{norm}.weight": (width,) for norm in norms}
    random = {name: torch.empty(shape).normal_(std=INITIALIZER_RANGE) for name, shape in shapes.items()}
    return {f"{prefix}{name}": tensor.bfloat16() for name, tensor in random.items()}


@torch.no_grad()
def vision_tensors(config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return a random vision tower under the Hub's names; empty for a family without one.

    Args:
        config: Content of `config.json`.
    """
    if VISION not in config:
        return {}
    name = FAMILIES[config["model_type"]].hub_class.replace("ForConditionalGeneration", "VisionModel")
    tower_class = getattr(import_modelling(config["model_type"]), name)
    tower = tower_class(tower_class.config_class.from_dict(dict(config[VISION])))
    for part, value in tower.state_dict().items():
        is_scale = "norm" in part and part.endswith("weight")
        value.normal_(mean=float(is_scale), std=INITIALIZER_RANGE)
    return {f"{HF_VISION}{part}": value.bfloat16().contiguous() for part, value in tower.state_dict().items()}
