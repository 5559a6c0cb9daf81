"""Traces where a model stores the tensors that are loaded into it.

It calls the model's own `load_weights` with tensors without memory, and follows every operation on them up to the
write. This shows which rows and columns of which tensors each parameter consists of, without reading any values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from posttrain_weights.box import Box, whole_box

DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn}
COPIES = ("aten::clone", "aten::_to_copy", "aten::cat")
SCALES = (".weight_scale_inv", ".weight_scale")


@dataclass(frozen=True)
class Kept:
    """A box of a sent tensor, and where the model stores it.

    Args:
        name: Name of the tensor; of the codes if the parameter holds dequantized values.
        box: The box.
        parameter: Name of the parameter.
        offset: Offset of the first element in the parameter's storage.
        strides: Row and column stride.
    """

    name: str
    box: Box
    parameter: str
    offset: int
    strides: tuple[int, int]

    def view(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return a view of the box in the parameter, [rows, columns]; writing to it changes the model."""
        return torch.as_strided(parameter.detach(), (self.box.rows, self.box.columns), self.strides, self.offset)


_Piece = tuple[Box, str, Box]


class _Sheet(NamedTuple):
    """Traced memory of a sent tensor, or of a concatenation of sent tensors, as a matrix.

    Args:
        columns: Row stride.
        pieces: (box in this sheet, tensor name, box in that tensor).
    """

    columns: int
    pieces: list[_Piece]


class LoadWeightsTracer(TorchDispatchMode):
    """Traces sent tensors into the parameters, through every operation of the loader.

    Nothing is written: parameters keep their values.

    Args:
        parameters: Name -> parameter.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]):
        super().__init__()
        self._owner = {_memory(parameter): name for name, parameter in parameters.items()}
        self._sources: dict[int, set[str]] = {}
        self._sheets: dict[int, _Sheet] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        # Keep tensors alive, because a new tensor may reuse a freed tensor's id.
        self._alive: list[torch.Tensor] = []
        self.read: set[str] = set()
        self.filled: set[str] = set()
        # Parameter -> box -> number of writes, and their source.
        self.parts: dict[str, dict[tuple[Any, ...], list[set[str]]]] = {}
        self.odd: list[str] = []
        self.kept: list[Kept] = []
        # Parameter -> tensors that it is computed from but does not copy.
        self.derived: dict[str, set[str]] = {}

    def sent(self, name: str, shape: Sequence[int], dtype: str) -> torch.Tensor:
        """Return a traced tensor, [shape] without memory."""
        tensor = torch.empty(tuple(shape), dtype=DTYPES[dtype], device="meta")
        whole = whole_box(shape)
        self._shapes[name] = tuple(shape)
        self._sources[_memory(tensor)] = {name}
        self._sheets[_memory(tensor)] = _Sheet(whole.columns, [(whole, name, whole)])
        self._alive.append(tensor)
        return tensor

    def __torch_dispatch__(self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        given = [item for word in args for item in (word if isinstance(word, list | tuple) else [word])]
        tensors = [item for item in given if isinstance(item, torch.Tensor)]
        sources = set().union(*(self._sources.get(_memory(tensor), set()) for tensor in tensors))
        target = self._owner.get(_memory(tensors[0])) if tensors else None
        kind = func._schema.name
        if target and kind == "aten::copy_" and sources:
            self._write(target, tensors[0], tensors[1].expand(tensors[0].shape), tensors[1].shape, sources)
            return tensors[0]
        if target and kind in ("aten::fill_", "aten::zero_"):
            self.filled.add(target)
        if kind == "aten::_to_copy" and sources:  # a tensor without memory has no device either
            kwargs = {name: value for name, value in (kwargs or {}).items() if name == "dtype"}
        made = func(*args, **(kwargs or {}))
        if sources and target is None:
            for tensor in made if isinstance(made, list | tuple) else [made]:
                if isinstance(tensor, torch.Tensor) and _memory(tensor) not in self._owner:
                    self._follow(kind, tensor, args, sources)
        return made

    def _follow(self, kind: str, made: torch.Tensor, args: tuple[Any, ...], sources: set[str]) -> None:
        """Record the sources of an operation's result."""
        memory = _memory(made)
        if memory not in self._sheets and made.is_contiguous():
            inputs, axis = (args[0], args[1] if len(args) > 1 else 0) if kind == "aten::cat" else ([args[0]], 0)
            pieces = self._joined(inputs, axis, made.dim()) if kind in COPIES else self._numbers(made, sources)
            if pieces:
                self._sheets[memory] = _Sheet(whole_box(made.shape).columns, pieces)
        self._sources.setdefault(memory, set()).update(sources)
        self._alive.append(made)

    def _numbers(self, made: torch.Tensor, sources: set[str]) -> list[_Piece]:
        """Return the codes' place if a result of their shape is computed from codes and scales (dequantization)."""
        codes = {name for name in sources if not name.endswith(SCALES)}
        (name,) = codes if len(codes) == 1 else ("",)
        whole = whole_box(made.shape)
        is_scaled = len(sources) == 2 and any(other.startswith(name) for other in sources - codes)
        return [(whole, name, whole)] if name and is_scaled and tuple(made.shape) == self._shapes[name] else []

    def _joined(self, inputs: Sequence[torch.Tensor], axis: int, dim: int) -> list[_Piece]:
        """Return the pieces of a concatenation; empty if unknown."""
        pieces: list[_Piece] = []
        row, column = 0, 0
        is_by_row = dim > 1 and axis % dim == 0
        for tensor in inputs:
            if (known := self._pieces_of(tensor)) is None:
                return []
            pieces += [(box._replace(row=box.row + row, column=box.column + column), n, at) for box, n, at in known]
            extent = whole_box(tensor.shape)
            row, column = (row + extent.rows, 0) if is_by_row else (0, column + extent.columns)
        return pieces

    def _pieces_of(self, tensor: torch.Tensor) -> list[_Piece] | None:
        """Return a view's pieces: (box in the view, tensor name, box in that tensor); None if unknown."""
        sheet = self._sheets.get(_memory(tensor))
        if sheet is None or (layout := _rows_and_columns(tensor)) is None:
            return None
        rows, columns, strides = layout
        if (columns > 1 and strides[1] != 1) or (rows > 1 and strides[0] != sheet.columns):
            return None
        row, column = divmod(int(tensor.storage_offset()), sheet.columns)
        shown, found = Box(row, column, rows, columns), []
        if column + columns > sheet.columns:
            return None
        for box, name, origin in sheet.pieces:
            if both := box.meets(shown):
                inner = both.within(box)
                begins = Box(origin.row + inner.row, origin.column + inner.column, inner.rows, inner.columns)
                found.append((both.within(shown), name, begins))
        return found

    def _write(
        self, target: str, part: torch.Tensor, source: torch.Tensor, shape: torch.Size, sources: set[str]
    ) -> None:
        if shape != part.shape:
            self.odd.append(f"{', '.join(sorted(sources))} {[*shape]} into {[*part.shape]} of {target}")
        self.read |= sources
        place = (part.storage_offset(), tuple(part.shape), part.stride())
        writes = self.parts.setdefault(target, {}).setdefault(place, [])
        kept = [*self._kept_by(target, part, source)]
        if writes and kept and all(copy in self.kept for copy in kept):
            return  # the same copy again: SGLang's Qwen3.5 also loads a tied embedding as the output matrix
        writes.append(sources)
        self.kept += kept

    def _kept_by(self, target: str, part: torch.Tensor, source: torch.Tensor) -> Iterator[Kept]:
        turned = source.dim() == 2 and min(source.shape) > 1 and source.stride(0) == 1 and source.stride(1) > 1
        if turned:
            part, source = part.t(), source.t()
        pieces, layout = self._pieces_of(source), _rows_and_columns(part)
        if pieces is None or layout is None or part.numel() != source.numel():
            self.derived.setdefault(target, set()).update(self._sources[_memory(source)])
            return
        strides = layout[2]
        for box, name, origin in pieces:
            offset = int(part.storage_offset()) + box.row * strides[0] + box.column * strides[1]
            yield Kept(name, origin, target, offset, strides)


def _rows_and_columns(tensor: torch.Tensor) -> tuple[int, int, tuple[int, int]] | None:
    """Return rows, columns and their strides of a view; None if it needs more than two strides."""
    columns = tensor.shape[-1] if tensor.dim() else 1
    last = tensor.stride(-1) if tensor.dim() else 1
    axes = [(n, s) for n, s in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if n > 1] or [(1, columns)]
    rows = math.prod(n for n, _ in axes)
    inner = axes[-1][1]
    for (_, outer_stride), (size, stride) in itertools.pairwise(axes):
        if outer_stride != size * stride:
            return None
    return rows, columns, (inner, last)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
