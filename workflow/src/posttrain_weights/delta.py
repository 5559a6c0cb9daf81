"""Encodes the changes of a slice since its last transfer: positions and new values.

Positions are gaps between changes, one byte each; `SKIP` is a maximal gap without a change at its end. For one-byte
elements of which one in fifty changes, this takes two bytes per change, 4 % of the slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from posttrain_weights import COMPARED_AT_ONCE

SKIP = 255
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


class DeltaHeader(NamedTuple):
    """The header that announces a slice transfer to its receiver.

    Args:
        values: Number of changed elements; `WHOLE`: the whole slice follows.
        gaps: Bytes of the encoded positions.
    """

    values: int
    gaps: int


WHOLE = -1
WHOLE_PART = DeltaHeader(WHOLE, 0)
HEADER_BYTES = 16


def changes(new: torch.Tensor, old: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the positions and values of elements whose bits have changed.

    Args:
        new: [rows, columns].
        old: Same shape and dtype.

    Returns:
        Gaps, [1, bytes] uint8, and values, [1, changed], in the slice's dtype; None if both are larger than the slice.
    """
    size = new.element_size()
    here, there = (part.reshape(-1).view(INTEGERS[size]) for part in (new, old))
    gaps, values, last, left = [_none(here, torch.uint8)], [_none(here, here.dtype)], -1, new.numel() * size
    for begin in range(0, len(here), COMPARED_AT_ONCE):
        piece = here[begin : begin + COMPARED_AT_ONCE]
        places = (piece != there[begin : begin + COMPARED_AT_ONCE]).nonzero()[:, 0]
        if not len(places):
            continue
        values.append(piece[places])
        gaps.append(_gaps(places + (begin - last)))
        last = begin + int(places[-1])
        left -= len(gaps[-1]) + size * len(places)
        if left <= 0:
            return None
    return torch.cat(gaps)[None], torch.cat(values).view(new.dtype)[None]


def _none(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=like.device)


def _gaps(places: torch.Tensor) -> torch.Tensor:
    """Return the gaps between ascending positions, counted from the last change before them."""
    between = places.diff(prepend=places.new_zeros(1)) - 1
    ends = (between // SKIP + 1).cumsum(0) - 1
    gaps = torch.full((int(ends[-1]) + 1,), SKIP, dtype=torch.uint8, device=places.device)
    gaps[ends] = (between % SKIP).to(torch.uint8)
    return gaps


def change(part: torch.Tensor, gaps: torch.Tensor, values: torch.Tensor) -> bool:
    """Apply changes to a slice in place, ignoring positions outside of it.

    Args:
        part: [rows, columns].
        gaps: [1, bytes] uint8.
        values: [1, changed].

    Returns:
        Whether all positions were inside.
    """
    columns, bits = part.shape[1], INTEGERS[part.element_size()]
    table, new, last, done = part.view(bits), values[0].view(bits), -1, 0
    for begin in range(0, gaps.shape[1], COMPARED_AT_ONCE):
        octets = gaps[0, begin : begin + COMPARED_AT_ONCE]
        is_change = octets != SKIP
        at = last + (octets.long() + is_change).cumsum(0)
        last, places = int(at[-1]), at[is_change]
        if last >= part.numel() or done + len(places) > len(new):
            return False
        table[places // columns, places % columns] = new[done : done + len(places)]
        done += len(places)
    return done == len(new)


def pieces_of(part: torch.Tensor, told: DeltaHeader) -> Sequence[torch.Tensor]:
    """Return a slice's tensors in a message as meta tensors with their dtypes and shapes.

    Raises:
        ValueError: The header does not fit a slice of this size.
    """
    if told == WHOLE_PART:
        return [part]
    size, room = part.element_size(), part.numel() * part.element_size()
    is_known = 0 <= told.values <= told.gaps and bool(told.values) == bool(told.gaps)
    if not is_known or told.gaps + size * told.values > room:
        raise ValueError(f"{told} of a part of {part.numel()} elements")
    if not told.values:
        return []
    return [
        torch.empty(1, told.gaps, dtype=torch.uint8, device="meta"),
        torch.empty(1, told.values, dtype=part.dtype, device="meta"),
    ]
