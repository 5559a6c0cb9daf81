"""Additive digests of weights: shards' digests sum to the whole's in any layout, without a gather.

The digest of a Hub tensor is a sum over its bytes x (signed) and C columns, of which each has a weight,

    sum over row r, byte b of the row, column c    x[r, b] * K[b, c] * M[c] * R[r]    modulo 2^64, twice

with K in -64..63 and M, R odd 64-bit numbers, all derived from the job's secret and the weight version. It is linear in
the bytes, so digests of parts can be summed in any layout, and a byte that moves or changes meets other factors: two
different tensors have the same digest with a probability below 2^-60. A key serves one version, so digests of one
version reveal nothing about the next.

The products with K are an 8-bit integer matrix product, for which tensor cores and CPUs have instructions, and each
weight is read once. K has 7 bits because two products then fit into 16 bits, in which some CPUs accumulate.

Source: Carter and Wegman, Universal Classes of Hash Functions (1979), multilinear hashing; Freivalds, Probabilistic
Machines Can Use Less Running Time (1977), for the product with a random matrix.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING

import torch

from posttrain_weights.box import box_at

if TYPE_CHECKING:
    from posttrain_weights.digest_triton import Factors

NUM_COLUMNS, NUM_LANES = 16, 2
# Sums of products must fit into 32 bits: 128 * 64 for each byte of a row.
MOST_ROW_BYTES = 1 << 17
# A CPU digests parts of the same shape in batches that fit its cache; larger batches would fault in new memory page by
# page. A GPU digests all parts with one kernel.
CPU_BATCH_BYTES = 1 << 20
# Bytes copied at a time for parts whose memory layout the GPU kernel cannot read.
COPIED_BYTES = 1 << 26
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WrongKernelError(RuntimeError):
    """A GPU kernel's result differs from torch's."""


def key_of(secret: str, version: str) -> bytes:
    """Return the key of one version of the weights."""
    return hmac.digest(secret.encode(), f"weights {version}".encode(), "sha256")


class Digester:
    """Digests tensors, or parts of them, under one key.

    Args:
        key: See `key_of`.
        num_rows: Maximum rows of a tensor.
        row_bytes: Maximum bytes of a row.
        device: Device of the tensors.
    """

    def __init__(self, key: bytes, num_rows: int, row_bytes: int, device: torch.device | str = "cpu"):
        assert row_bytes <= MOST_ROW_BYTES, f"rows of {row_bytes} bytes"
        self._key, self._num_rows, self._row_bytes, self._device = key, num_rows, row_bytes, torch.device(device)

    @staticmethod
    def of_parts(key: bytes, parts: Sequence[torch.Tensor], corners: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Return the digest of each part, [parts, 2] int64, on the CPU.

        Args:
            key: See `key_of`.
            parts: Matrices or rows, on one device.
            corners: Offset of each in its tensor.

        Raises:
            WrongKernelError: See `parts`.
        """
        ends = [
            (row + (len(part) if part.dim() == 2 else 1), (column + part.shape[-1]) * part.element_size())
            for part, (row, column) in zip(parts, corners, strict=True)
        ]
        digester = Digester(key, max(row for row, _ in ends), max(end for _, end in ends), parts[0].device)
        return digester.parts(parts, corners).cpu()

    def parts(self, parts: Sequence[torch.Tensor], corners: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Return what each part adds to its tensor's digest, [parts, 2] int64; see `part`.

        Raises:
            WrongKernelError: This GPU's digest of test data differs from the CPU's.
        """
        if self._device.type != "cpu":
            _require_agreement(self._device)
            return self._fused(parts, corners)
        alike = defaultdict[tuple[object, ...], list[int]](list)
        for number, (part, corner) in enumerate(zip(parts, corners, strict=True)):
            alike[part.shape, part.dtype, corner].append(number)
        found = torch.empty(len(parts), NUM_LANES, dtype=torch.int64)
        order, made = [number for numbers in alike.values() for number in numbers], []
        for numbers in alike.values():
            at_once = max(1, CPU_BATCH_BYTES // max(1, parts[numbers[0]].nbytes))
            for begin in range(0, len(numbers), at_once):
                batch = numbers[begin : begin + at_once]
                made.append(self._alike([parts[number] for number in batch], corners[batch[0]]))
        found[torch.tensor(order)] = torch.cat(made)
        return found

    def part(self, values: torch.Tensor, corner: tuple[int, ...] = (0, 0)) -> torch.Tensor:
        """Return a part's contribution to its tensor's digest, [2] int64; sums wrap around.

        Args:
            values: [n, k], or [k] for one row, of any dtype; more dimensions than two are rows, too.
            corner: Its offset in the tensor.
        """
        box = box_at(corner, values.shape)
        return self.parts([values], [(box.row, box.column)])[0]

    def _alike(self, parts: Sequence[torch.Tensor], corner: tuple[int, int]) -> torch.Tensor:
        """Return the digests, [parts, 2] int64, of parts with equal shape, dtype and offset."""
        row, column = corner
        tables = [part.reshape(-1, part.shape[-1]).view(INTEGERS[part.element_size()]) for part in parts]
        table = torch.cat(tables) if len(tables) > 1 else tables[0].contiguous()
        first, octets, num_rows = column * table.element_size(), table.view(torch.int8), len(tables[0])
        products = torch._int_mm(octets, self._columns[first : first + octets.shape[1]]).long()
        lanes = [(products * mixed).sum(1).view(-1, num_rows) for mixed in self._mixed.unbind(1)]
        return (torch.stack(lanes, -1) * self._rows[row : row + num_rows]).sum(1)

    def _fused(self, parts: Sequence[torch.Tensor], corners: Sequence[tuple[int, int]]) -> torch.Tensor:
        from posttrain_weights.digest_triton import digests_of  # needs Triton, which CPU installations may lack

        sizes, found = [part.element_size() for part in parts], []
        places = [(row, column * size) for (row, column), size in zip(corners, sizes, strict=True)]
        for some in _batches(parts):
            found.append(digests_of([octets_of(part) for part in parts[some]], places[some], self.factors))
        return torch.cat(found)

    @cached_property
    def factors(self) -> Factors:
        """The key's factors in the GPU kernel's layout."""
        from posttrain_weights.digest_triton import factors_of

        return factors_of(self._columns, self._mixed, self._rows, self._device)

    @cached_property
    def _columns(self) -> torch.Tensor:
        return self._drawn("columns", self._row_bytes * NUM_COLUMNS).view(-1, NUM_COLUMNS) >> 1

    @cached_property
    def _mixed(self) -> torch.Tensor:
        return self._odd("mixed", NUM_COLUMNS)

    @cached_property
    def _rows(self) -> torch.Tensor:
        return self._odd("rows", self._num_rows)

    def _odd(self, name: str, count: int) -> torch.Tensor:
        return self._drawn(name, 8 * count * NUM_LANES).view(torch.int64).view(-1, NUM_LANES) | 1

    def _drawn(self, name: str, count: int) -> torch.Tensor:
        octets = hashlib.shake_256(self._key + name.encode()).digest(count)
        return torch.frombuffer(bytearray(octets), dtype=torch.int8)


@cache
def _require_agreement(device: torch.device) -> None:
    """Compare the GPU kernel with torch on a CPU, for word-aligned and unaligned parts."""
    draws = Digester(bytes(32), 300, 400)
    whole = draws._drawn("values", 300 * 400).view(300, 400)
    corners = [(0, 0), (7, 3)]
    here, there = ([values, values[7:40, 3:94]] for values in (whole, whole.to(device)))
    found = Digester(bytes(32), 300, 400, device)._fused(there, corners).cpu()
    if not torch.equal(found, draws.parts(here, corners)):
        import triton  # not the installed package's version: its name differs by hardware

        raise WrongKernelError(
            f"{device}: digests of weights are not those of the CPU (Triton {triton.__version__}); install the Triton "
            "that this torch requires"
        )


def _batches(parts: Sequence[torch.Tensor]) -> Iterator[slice]:
    """Yield batches of parts to digest together: all at once, unless they must be copied."""
    begin = copied = 0
    for number, part in enumerate(parts, start=1):
        copied += part.nbytes if _has_gaps(part) else 0
        if copied >= COPIED_BYTES or number == len(parts):
            yield slice(begin, number)
            begin, copied = number, 0


def octets_of(part: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a matrix or row, [rows, bytes of a row] int8; copies if a row is not contiguous."""
    table = part.detach().clone(memory_format=torch.contiguous_format) if _has_gaps(part) else part.detach()
    return (table if table.dim() == 2 else table[None]).view(torch.int8)


def _has_gaps(part: torch.Tensor) -> bool:
    return part.stride(-1) != 1


def together(digests: torch.Tensor, key: bytes) -> torch.Tensor:
    """Return one digest, [2] int64, of many, [n, 2], that depends on their order."""
    return (digests * Digester(key, 0, 0)._odd("parts", len(digests))).sum(0)


def as_text(digest: torch.Tensor) -> str:
    """Return a digest, [2] int64, as 32 hexadecimal digits."""
    return "".join(f"{lane & 0xFFFFFFFFFFFFFFFF:016x}" for lane in digest.tolist())
