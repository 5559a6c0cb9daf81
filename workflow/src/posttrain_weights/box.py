"""Rectangles of a matrix: which rows and columns of a tensor a rank holds, sends or receives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """Rows and columns of a matrix; a vector is a row of one."""

    row: int
    column: int
    rows: int
    columns: int

    def meets(self, other: Box) -> Box | None:
        """Return the intersection; None if it is empty."""
        row, column = max(self.row, other.row), max(self.column, other.column)
        rows = min(self.row + self.rows, other.row + other.rows) - row
        columns = min(self.column + self.columns, other.column + other.columns) - column
        return Box(row, column, rows, columns) if rows > 0 and columns > 0 else None

    def within(self, other: Box) -> Box:
        """Return this box relative to an enclosing box."""
        return Box(self.row - other.row, self.column - other.column, self.rows, self.columns)


def whole_box(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor."""
    return Box(0, 0, math.prod(shape[:-1]), shape[-1] if shape else 1)


def box_at(corner: Sequence[int], shape: Sequence[int]) -> Box:
    """Return the box of a part of a tensor, whose dimensions but the last are rows.

    Args:
        corner: Its first index in the tensor; of a row alone, its row and column.
        shape: Its own; of a tensor with more than two dimensions, all but the first are whole.
    """
    assert not any(corner[1:-1]), f"a part that begins at {corner} is no block of rows"
    row = corner[0] * math.prod(shape[1:-1]) if len(corner) > 1 else 0
    return whole_box(shape)._replace(row=row, column=corner[-1] if corner else 0)
