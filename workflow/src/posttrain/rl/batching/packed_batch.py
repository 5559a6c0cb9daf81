"""A micro-batch as tensors: several sequences packed in one row, with the metadata that the loss needs.

Position t of a sequence predicts its token t + 1. Sequences and the row are padded to multiples that the layout
requires. Padding follows a sequence or forms a separate one, so no real token attends to it, and the loss masks it. A
rank with fewer micro-batches than others runs a row of padding only.

Shapes: T tokens of the row, including padding; B sequences, including a padding sequence if there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from posttrain.types import Routes, Trajectory


@dataclass(frozen=True)
class PackedBatch:
    """A packed micro-batch.

    Args:
        tokens: [T] int64.
        targets: [T] int64, the next token of the same sequence; 0 at the end of a sequence and in padding.
        loss_mask: [T] fp32, 1 where the trajectory's loss mask is 1 at the target.
        position_ids: [T] int64, position in the token's sequence.
        cu_seqlens: [B + 1] int32, starts of the sequences and the end of the last.
        trajectory_indices: Index of each sequence's trajectory in the global batch, without padding.
        num_padding: Padding tokens.
        routes: Experts to which the engine routed each trajectory's tokens, if routing replay is on.

    Example:
        Tokens (5, 9, 7, 1), of which the model sampled (7, 1), padded to 6: tokens (5, 9, 7, 1, 0, 0), targets
        (9, 7, 1, 0, 0, 0), loss mask (0, 1, 1, 0, 0, 0), boundaries (0, 4, 6).
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    trajectory_indices: tuple[int, ...]
    num_padding: int
    routes: tuple[Routes, ...] = ()

    @property
    def padding_fraction(self) -> float:
        """Fraction of the row that is padding."""
        return self.num_padding / len(self.tokens)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence of the row, including padding."""
        return tuple((self.cu_seqlens[1:] - self.cu_seqlens[:-1]).tolist())

    def spread(self, per_trajectory: torch.Tensor) -> torch.Tensor:
        """Expand a value per trajectory [number of trajectories] to a value per token [T]; 0 outside responses."""
        lengths = self.cu_seqlens[1:] - self.cu_seqlens[:-1]
        values = torch.zeros(len(lengths), dtype=per_trajectory.dtype)
        values[: len(self.trajectory_indices)] = per_trajectory[list(self.trajectory_indices)]
        return torch.repeat_interleave(values, lengths) * self.loss_mask

    def response_values(self, per_token: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return {trajectory index: values at its response tokens} from a value per token [T]."""
        bounds = self.cu_seqlens.tolist()
        mask = self.loss_mask > 0
        return {
            index: per_token[bounds[place] : bounds[place + 1]][mask[bounds[place] : bounds[place + 1]]]
            for place, index in enumerate(self.trajectory_indices)
        }


def build_packed_batch(
    trajectories: Sequence[Trajectory], indices: Sequence[int], multiple_of: int = 1, sequence_multiple_of: int = 1
) -> PackedBatch:
    """Pack the trajectories at `indices` into one row.

    Args:
        trajectories: All trajectories of the global batch.
        indices: Those of this micro-batch; empty for a row of padding.
        multiple_of: T is padded to a nonzero multiple of this.
        sequence_multiple_of: Each sequence is padded to a multiple of this.
    """
    tokens, targets, mask, lengths = [], [], [], []
    for i in indices:
        sequence, is_learned = trajectories[i].tokens, trajectories[i].loss_mask
        padding = -len(sequence) % sequence_multiple_of
        tokens += [*sequence, *[0] * padding]
        targets += [*sequence[1:], 0, *[0] * padding]
        mask += [*is_learned[1:], 0, *[0] * padding]
        lengths.append(len(sequence) + padding)
    behind = -len(tokens) % multiple_of if tokens else multiple_of
    lengths += [behind] * bool(behind)
    return PackedBatch(
        tokens=torch.tensor(tokens + [0] * behind),
        targets=torch.tensor(targets + [0] * behind),
        loss_mask=torch.tensor(mask + [0] * behind, dtype=torch.float32),
        position_ids=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int(),
        trajectory_indices=tuple(indices),
        num_padding=sum(lengths) - sum(trajectories[i].num_tokens for i in indices),
        routes=tuple(routes for i in indices for routes in trajectories[i].routes),
    )
