"""A trainer of one rank that holds the Hub's tensors whole, on its device, without a model around them.

It is what a transfer asks of `HubWeights`: names, shapes, who has what, and the values.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from tests.support.megatron_single import free_port

from posttrain.checkpoint.param_names import expected_tensors
from posttrain.config.schema import Architecture
from posttrain.rl.megatron_backend.weights import Shard


class WholeWeights:
    """Tensors under Hub names.

    Args:
        tensors: Name -> values, of which a copy is taken to the device.
        architecture: Dimensions, for shapes and types.
        device: Where.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], architecture: Architecture, device: str):
        self.specs = {name: spec for name, spec in expected_tensors(architecture).items() if name in tensors}
        self.names = [*self.specs]
        self.values = {name: tensors[name].to(device, copy=True) for name in self.names}
        self.shards = [Shard(name, (0,) * value.dim(), value, True) for name, value in self.values.items()]
        self.holders = {name: [(0, tuple(slice(0, n) for n in value.shape))] for name, value in self.values.items()}

    def main_shards(self, name: str) -> list[Shard]:
        return [shard for shard in self.shards if shard.hf_name == name]

    def join(self, name: str, parts: Sequence[torch.Tensor], *_: object) -> torch.Tensor:
        return parts[0]

    @torch.no_grad()
    def disturb(self, seed: int) -> None:
        """Multiply every matrix by numbers about 1."""
        generator = torch.Generator().manual_seed(seed)
        for value in self.values.values():
            if value.dim() > 1:
                value.mul_((1 + 0.3 * torch.randn(value.shape, generator=generator)).to(value))


def alone(folder: Path) -> None:
    """Make this process rank 0 of 1 over gloo, once; others of a transfer meet it on this machine."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(free_port()))
    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=0, world_size=1)
