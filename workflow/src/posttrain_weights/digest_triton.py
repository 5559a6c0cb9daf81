"""Digests many parts in one GPU kernel, bitwise equal to torch's result in `digest`.

Each program handles some rows of a part: an 8-bit integer product with the key's columns, accumulated in 32 bits along
the row, then two order-independent sums in 64 bits. So every byte is read once, without a copy, and tens of thousands
of parts need a single launch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

# Tile of a program in rows and bytes: four tiles of three programs fit a multiprocessor.
ROWS = 128
OPTIONS = {"ROWS": ROWS, "OCTETS": 128, "COLUMNS": 16, "num_warps": 4, "num_stages": 4}
# Word size of memory reads.
ALIGNMENT = 16


class Factors(NamedTuple):
    """The key's factors, on the device of the parts.

    Args:
        columns: [16, bytes of a row], int8, with rows aligned to 16 bytes.
        mixed: [16, 2], int64.
        rows: [rows, 2], int64.
    """

    columns: torch.Tensor
    mixed: torch.Tensor
    rows: torch.Tensor


@triton.jit
def digest_rows(  # type: ignore[no-untyped-def]
    tiles,  # [programs, 2] int32: part, and the program's first row in it
    parts,  # [parts, 6] int64: address, row stride in bytes, rows, bytes of a row, and offset in its tensor
    columns,
    width,  # of `columns`
    mixed,
    rows,
    found,  # [parts, 2] int64
    ROWS: tl.constexpr,
    OCTETS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
):
    """Add the contribution of some rows of a part to its digest."""
    tile = tl.program_id(0)
    number, begin = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    about = parts + 6 * number.to(tl.int64)
    source, stride = tl.load(about).to(tl.pointer_type(tl.int8)), tl.load(about + 1)
    num_rows, num_octets = tl.load(about + 2), tl.load(about + 3)
    row, octet = tl.load(about + 4), tl.load(about + 5)
    if IS_ALIGNED:
        source, stride = tl.multiple_of(source, 16), tl.multiple_of(stride, 16)
        num_octets, octet = tl.multiple_of(num_octets, 16), tl.multiple_of(octet, 16)
    own, column = begin + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    is_row = own < num_rows
    lines, factors = source + own.to(tl.int64)[:, None] * stride, columns + octet + column[None, :] * width
    sums = tl.zeros((ROWS, COLUMNS), tl.int32)
    for first in range(0, num_octets, OCTETS):
        place = first + tl.arange(0, OCTETS)
        is_here = place < num_octets
        values = tl.load(lines + place[None, :], mask=is_row[:, None] & is_here[None, :], other=0)
        weights = tl.load(factors + place[:, None], mask=is_here[:, None], other=0)
        sums = tl.dot(values, weights, sums, out_dtype=tl.int32)
    for lane in tl.static_range(2):
        mixture = tl.load(mixed + 2 * column + lane)
        of_rows = tl.sum(sums.to(tl.int64) * mixture[None, :], 1)
        weight = tl.load(rows + 2 * (row + own) + lane, mask=is_row, other=0)
        tl.atomic_add(found + 2 * number.to(tl.int64) + lane, tl.sum(of_rows * weight, 0))


def factors_of(columns: torch.Tensor, mixed: torch.Tensor, rows: torch.Tensor, device: torch.device) -> Factors:
    """Return the key's factors in the kernel's layout; `columns` is [bytes of a row, 16] here."""
    width = -(-len(columns) // ALIGNMENT) * ALIGNMENT
    turned = columns.new_zeros(columns.shape[1], width)
    turned[:, : len(columns)] = columns.t()
    return Factors(*(made.to(device) for made in (turned, mixed, rows)))


def digests_of(parts: list[torch.Tensor], corners: list[tuple[int, int]], factors: Factors) -> torch.Tensor:
    """Return the digest of each part, [parts, 2] int64.

    Args:
        parts: [rows, bytes of a row] int8 each, with contiguous rows.
        corners: Offset (row, byte) of each in its tensor.
        factors: The key's factors.
    """
    device = factors.rows.device
    found = torch.zeros(len(parts), 2, dtype=torch.int64, device=device)
    table = described(parts, corners)
    about = torch.from_numpy(table).to(device, non_blocking=True)
    with torch.cuda.device_of(found):
        for is_aligned in (True, False):
            tiles = tiles_of(table, is_aligned)
            if len(tiles):
                digest_rows[(len(tiles),)](
                    torch.from_numpy(tiles).to(device, non_blocking=True),
                    about,
                    factors.columns,
                    factors.columns.shape[1],
                    factors.mixed,
                    factors.rows,
                    found,
                    IS_ALIGNED=is_aligned,
                    **OPTIONS,
                )
    return found


def described(parts: list[torch.Tensor], corners: list[tuple[int, int]]) -> np.ndarray:
    """Return the kernel's descriptor of each part, [parts, 6] int64."""
    told = [
        (part.data_ptr(), part.stride(0), *part.shape, *corner) for part, corner in zip(parts, corners, strict=True)
    ]
    return np.array(told, dtype=np.int64).reshape(-1, 6)


def tiles_of(table: np.ndarray, is_aligned: bool) -> np.ndarray:
    """Return part and first row of each program, [programs, 2] int32, for word-aligned or for unaligned parts."""
    address, stride, num_rows, num_octets, _, octet = table.T
    (chosen,) = np.nonzero((((address | stride | num_octets | octet) % ALIGNMENT) == 0) == is_aligned)
    counts = -(-num_rows[chosen] // ROWS)
    of_part = np.repeat(chosen, counts)
    number = np.arange(len(of_part)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack([of_part, number * ROWS], -1).astype(np.int32)
