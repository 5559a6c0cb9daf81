"""Locations of Hub tensors in Megatron's tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from posttrain.checkpoint.formats.safetensors_io import TensorSpec
from posttrain.checkpoint.quantization.tiling import Chunk, Shape


@dataclass(frozen=True)
class Placement:
    """Location of a Hub tensor in a Megatron tensor.

    Args:
        hf_name: Hub name.
        key: Name in Megatron's distributed checkpoint.
        dtype: Hub dtype, "BF16" or "F32".
        global_shape: Shape of Megatron's whole tensor.
        boxes: First index and extent of each chunk. Concatenated along its first dimension, they are the Hub tensor.
        num_stack_axes: Leading dimensions of Megatron's tensor that the Hub tensor does not have, for example the
            expert's index; the extent of each box is 1 there.
    """

    hf_name: str
    key: str
    dtype: str
    global_shape: Shape
    boxes: tuple[Chunk, ...]
    num_stack_axes: int = 0

    @property
    def spec(self) -> TensorSpec:
        """Hub shape and dtype."""
        shapes = [sizes[self.num_stack_axes :] for _, sizes in self.boxes]
        return TensorSpec((sum(shape[0] for shape in shapes), *shapes[0][1:]), self.dtype)

    @property
    def size_bytes(self) -> int:
        """Size of the Hub tensor."""
        return self.spec.size_bytes

    @property
    def chunks(self) -> tuple[tuple[Chunk, slice], ...]:
        """Each box with the matching rows of the Hub tensor."""
        parts, start = [], 0
        for box in self.boxes:
            end = start + box[1][self.num_stack_axes]
            parts.append((box, slice(start, end)))
            start = end
        return tuple(parts)


def whole(hf_name: str, key: str, shape: Shape, dtype: str = "BF16") -> Placement:
    """Return the placement of a tensor that is identical in both layouts."""
    return Placement(hf_name, key, dtype, shape, (((0,) * len(shape), shape),))


def rows(hf_name: str, key: str, shape: Shape, starts: tuple[int, ...], num_rows: int) -> Placement:
    """Return the placement of a tensor that consists of blocks of `num_rows` rows at `starts`."""
    return blocks(hf_name, key, shape, [(start, num_rows) for start in starts])


def blocks(hf_name: str, key: str, shape: Shape, spans: Iterable[tuple[int, int]]) -> Placement:
    """Return the placement of a tensor that consists of blocks of rows, each given by its first row and its length."""
    columns = shape[1:]
    boxes = tuple(((start, *(0 for _ in columns)), (num_rows, *columns)) for start, num_rows in spans)
    return Placement(hf_name, key, "BF16", shape, boxes)


def expert_rows(hf_name: str, key: str, shape: Shape, expert: int, start: int, num_rows: int) -> Placement:
    """Return the placement of one expert's tensor in the stack of experts: `num_rows` rows from `start`."""
    return Placement(hf_name, key, "BF16", shape, (((expert, start, 0), (1, num_rows, shape[2])),), num_stack_axes=1)
