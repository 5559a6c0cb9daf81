"""Reads the expert routes of a micro-batch's tokens from a rollout's files."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from posttrain.rl.batching.packed_batch import PackedBatch
from posttrain.rl.batching.stored_routes import open_routes


def routes_of_row(batch: PackedBatch, layers: Sequence[int], per_token: int, num_experts: int) -> torch.Tensor:
    """Return the experts of a row's tokens [layers, T, K], in the compact dtype of the files.

    Padding and each trajectory's last token have no route from the engine. They are spread evenly over all experts,
    because their output is not used and must not unbalance the load.

    Args:
        batch: All its trajectories have routes; it may be padding only.
        layers: Indices among the MoE layers.
        per_token: K, experts per token.
        num_experts: Experts per layer.

    Raises:
        CheckpointError: A file is missing or truncated.
    """
    assert len(batch.routes) == len(batch.trajectory_indices), "a trajectory's tokens have to go where nobody knows"
    places = torch.arange(len(batch.tokens))[:, None] * per_token + torch.arange(per_token)
    dtype = torch.uint8 if num_experts <= 256 else torch.int16
    row = (places % num_experts).to(dtype).repeat(len(layers), 1, 1)
    for start, routes in zip(batch.cu_seqlens.tolist(), batch.routes, strict=False):  # padding has none
        row[:, start : start + routes.shape[1]] = torch.from_numpy(open_routes(routes)[[*layers]])
    return row
