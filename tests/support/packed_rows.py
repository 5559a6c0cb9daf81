"""Answers and gradients of a packed row, by the names that the Hub gives to weights."""

from __future__ import annotations

import torch

from posttrain.rl.megatron_backend.packed import PackedSequences


def boundaries(sequences: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([0, *(len(s) for s in sequences)]).cumsum(0).int()


def run_packed(policy, sequences: list[torch.Tensor], labels: torch.Tensor | None = None) -> torch.Tensor:
    row = PackedSequences.from_boundaries(boundaries(sequences))
    tokens = torch.cat(sequences)[None]
    output = policy.wrapped[0](tokens, row.position_ids[None], None, labels=labels, packed_seq_params=row)
    return output.squeeze() if labels is None else output[0]


def gradients_by_hub_name(policy, weights) -> dict[str, torch.Tensor]:
    """Read the gradients through the same table as the weights, by putting them in the weights' place for a moment."""
    trained = [p for p in policy.parameters() if p.requires_grad]
    originals = [p.data.clone() for p in trained]
    for parameter in trained:
        parameter.data.copy_(parameter.main_grad)
    named = {name: tensor.clone().float() for name, tensor in weights.gather(dtype=torch.float32)}
    for parameter, original in zip(trained, originals, strict=True):
        parameter.data.copy_(original)
    return named
