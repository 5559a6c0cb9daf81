"""The layout of a message: pieces of tensors, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from posttrain_weights.box import Box

# Of each piece of a message: all element sizes divide it.
ALIGNMENT_BYTES = 16


class Piece(NamedTuple):
    """Something that one member sends another.

    Args:
        round: When.
        part: Which of the receiver's parts it belongs to.
        box: Which rows and columns of that part.
    """

    round: int
    part: int
    box: Box


def aligned(num_bytes: int) -> int:
    """Return what bytes take with what follows them."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def size_of(rows: int, columns: int, element_size: int) -> int:
    """Return how many bytes a piece takes in a message."""
    return aligned(rows * columns * element_size)


def size_of_all(pieces: Sequence[torch.Tensor]) -> int:
    """Return how many bytes a message of pieces, [rows, columns] each, has."""
    return sum(size_of(len(piece), piece.shape[1], piece.element_size()) for piece in pieces)


def fill(message: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
    """Write pieces into a message, [bytes] uint8; what is between them is not defined."""
    for place, piece in zip(split(message, pieces), pieces, strict=True):
        place.copy_(piece)


def split(message: torch.Tensor, pieces: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the place of each piece in a message, with its type and shape."""
    begin = 0
    for piece in pieces:
        octets = message[begin : begin + piece.numel() * piece.element_size()]
        yield octets.view(piece.dtype).view(piece.shape)
        begin += size_of(len(piece), piece.shape[1], piece.element_size())
