"""What engines are given for whole tensors, quantised in one piece: what shards have to come to."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from posttrain.checkpoint.quantization.fp8 import Fp8Format, largest_magnitude


def quantised(tensors: Mapping[str, torch.Tensor], served: Fp8Format) -> dict[str, torch.Tensor]:
    """Return codes and scales, or the tensor itself, under the names that engines load."""
    made: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if not served.selection.includes(name, tensor.shape):
            made[name] = tensor
            continue
        shared = [largest_magnitude(tensors[other]) for other in served.sharing_scale(name) if other in tensors]
        made |= served.quantize(name, tensor, torch.stack(shared).amax() if shared else None)
    return made
