"""Rectangular chunks of a tensor: coverage and intersection."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Shape = tuple[int, ...]
# First index and extent in each dimension.
Chunk = tuple[Shape, Shape]


def intersect(first: Chunk, second: Chunk) -> Chunk | None:
    """Return the intersection of two boxes; None if they are disjoint.

    Example:
        Rows 0-3 and rows 2-5 of a matrix with 4 columns intersect in ((2, 0), (2, 4)).
    """
    low = tuple(map(max, first[0], second[0]))
    ends = zip(first[0], first[1], second[0], second[1], strict=True)
    sizes = tuple(min(a + n, b + m) - start for (a, n, b, m), start in zip(ends, low, strict=True))
    return (low, sizes) if all(size > 0 for size in sizes) else None


def slices_within(box: Chunk, outer: Chunk) -> tuple[slice, ...]:
    """Return the index of `box` in a tensor that holds `outer`; `outer` contains `box`."""
    starts = [a - b for a, b in zip(box[0], outer[0], strict=True)]
    return tuple(slice(start, start + size) for start, size in zip(starts, box[1], strict=True))


def find_misfit(shape: Shape, boxes: Iterable[Chunk]) -> str:
    """Return why boxes do not cover a tensor exactly once; "" if they do.

    The boxes are sorted along the first dimension into slabs with equal first index and extent; the slabs must be
    consecutive, and each must be covered in the remaining dimensions. Interlocking boxes without such slabs are
    rejected: no writer makes them.

    Example:
        Boxes ((0, 0), (2, 4)) and ((3, 0), (1, 4)) in (4, 4) give "a gap at (2,)".
    """
    return _find_misfit(shape, sorted(boxes), ())


def _find_misfit(shape: Shape, boxes: Sequence[Chunk], position: Shape) -> str:
    if not shape:
        return "" if len(boxes) == 1 else f"{len(boxes)} chunks at {position}"
    slabs: dict[tuple[int, int], list[Chunk]] = {}
    for offsets, sizes in boxes:
        slabs.setdefault((offsets[0], sizes[0]), []).append((offsets[1:], sizes[1:]))
    end = 0
    for (start, size), inner in sorted(slabs.items()):
        if start != end:
            return f"{'a gap' if start > end else 'an overlap'} at {(*position, end if start > end else start)}"
        if misfit := _find_misfit(shape[1:], inner, (*position, start)):
            return misfit
        end = start + size
    if end != shape[0]:
        return f"{'a gap' if end < shape[0] else 'an end outside the tensor'} at {(*position, end)}"
    return ""
