"""The experts of a micro-batch's tokens, from the files in which a rollout's lie."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from posttrain.rl.batching.packed_batch import PackedBatch
from posttrain.rl.batching.stored_routes import open_routes


def routes_of_row(batch: PackedBatch, layers: Sequence[int], per_token: int, num_experts: int) -> torch.Tensor:
    """Return the experts of a row's tokens [layers, T, K], as small numbers as they lie in the files.

    Tokens that no engine has read, which are padding and the last of each sample, go to all experts in turn: what
    becomes of them counts nowhere, and no expert gets more than others for it.

    Args:
        batch: Every sample of it has routes; it may be padding alone.
        layers: Numbers among those with experts.
        per_token: K, experts of a token.
        num_experts: Of a layer.

    Raises:
        CheckpointError: A file is not there, or is shorter than it was.
    """
    assert len(batch.routes) == len(batch.sample_indices), "a sample's tokens have to go where nobody knows"
    places = torch.arange(len(batch.tokens))[:, None] * per_token + torch.arange(per_token)
    dtype = torch.uint8 if num_experts <= 256 else torch.int16
    row = (places % num_experts).to(dtype).repeat(len(layers), 1, 1)
    for start, routes in zip(batch.cu_seqlens.tolist(), batch.routes, strict=False):  # padding has none
        row[:, start : start + routes.shape[1]] = torch.from_numpy(open_routes(routes)[[*layers]])
    return row
