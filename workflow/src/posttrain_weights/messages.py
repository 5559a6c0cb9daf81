"""The layout of a message: pieces of tensors, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from posttrain_weights.box import Box

# Alignment of pieces in bytes, a multiple of all element sizes.
ALIGNMENT_BYTES = 16


class Piece(NamedTuple):
    """A piece of a message between two members.

    Args:
        round: Round of the transfer.
        part: Index of the receiver's slice.
        box: Rows and columns within that slice.
    """

    round: int
    part: int
    box: Box


def aligned(num_bytes: int) -> int:
    """Return a size rounded up to the alignment."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def size_of(rows: int, columns: int, element_size: int) -> int:
    """Return a piece's bytes in a message."""
    return aligned(rows * columns * element_size)


def size_of_all(pieces: Sequence[torch.Tensor]) -> int:
    """Return the bytes of a message with these pieces, [rows, columns] each."""
    return sum(size_of(len(piece), piece.shape[1], piece.element_size()) for piece in pieces)


def fill(message: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
    """Write pieces into a message, [bytes] uint8; padding is undefined."""
    for place, piece in zip(split(message, pieces), pieces, strict=True):
        place.copy_(piece)


def split(message: torch.Tensor, pieces: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield a view of each piece in a message, with its dtype and shape."""
    begin = 0
    for piece in pieces:
        octets = message[begin : begin + piece.numel() * piece.element_size()]
        yield octets.view(piece.dtype).view(piece.shape)
        begin += size_of(len(piece), piece.shape[1], piece.element_size())
