"""A model's weights from tensors under Hub names, on each rank for itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from posttrain.rl.megatron_backend.weights import HubWeights


@torch.no_grad()
def fill(weights: HubWeights, tensors: Mapping[str, torch.Tensor]) -> None:
    """Overwrite all that this rank holds; the optimizer has to be told."""
    for shard in weights.shards:
        shard.values.copy_(tensors[shard.hf_name][shard.where])
