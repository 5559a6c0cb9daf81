"""Where one tensor of the Hub lies in Megatron's tensors."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.checkpoint.formats.safetensors_io import TensorSpec
from posttrain.checkpoint.quantization.tiling import Chunk, Shape


@dataclass(frozen=True)
class Placement:
    """Where a tensor of the Hub lies in Megatron's tensor.

    Args:
        hf_name: Name on the Hub.
        key: Name in Megatron's distributed checkpoint.
        dtype: Precision on the Hub, "BF16" or "F32".
        global_shape: Dimensions of Megatron's whole tensor.
        boxes: First index and extent of each chunk. The Hub's tensor is the chunks one below the other.
        num_stack_axes: Leading dimensions of Megatron's tensor that the Hub's does not have: each box has one index
            there, that of an expert for instance.
    """

    hf_name: str
    key: str
    dtype: str
    global_shape: Shape
    boxes: tuple[Chunk, ...]
    num_stack_axes: int = 0

    @property
    def spec(self) -> TensorSpec:
        """Shape and dtype on the Hub."""
        shapes = [sizes[self.num_stack_axes :] for _, sizes in self.boxes]
        return TensorSpec((sum(shape[0] for shape in shapes), *shapes[0][1:]), self.dtype)

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor on the Hub."""
        return self.spec.size_bytes

    @property
    def chunks(self) -> tuple[tuple[Chunk, slice], ...]:
        """Each box with the rows of the Hub's tensor that lie in it."""
        parts, start = [], 0
        for box in self.boxes:
            end = start + box[1][self.num_stack_axes]
            parts.append((box, slice(start, end)))
            start = end
        return tuple(parts)


def whole(hf_name: str, key: str, shape: Shape, dtype: str = "BF16") -> Placement:
    """Return the placement of a tensor that is the same on both sides."""
    return Placement(hf_name, key, dtype, shape, (((0,) * len(shape), shape),))


def rows(hf_name: str, key: str, shape: Shape, starts: tuple[int, ...], num_rows: int) -> Placement:
    """Return the placement of a tensor that is blocks of `num_rows` rows of another, at `starts`."""
    columns = shape[1:]
    boxes = tuple(((start, *(0 for _ in columns)), (num_rows, *columns)) for start in starts)
    return Placement(hf_name, key, "BF16", shape, boxes)


def expert_rows(hf_name: str, key: str, shape: Shape, expert: int, start: int, num_rows: int) -> Placement:
    """Return the placement of a tensor of one expert in the stack of all: `num_rows` rows from `start`."""
    return Placement(hf_name, key, "BF16", shape, (((expert, start, 0), (1, num_rows, shape[2])),), num_stack_axes=1)
