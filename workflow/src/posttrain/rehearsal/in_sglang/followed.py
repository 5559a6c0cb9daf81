"""What becomes of tensors that are sent: which parameters they reach, and how often."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn}


class Record(TorchDispatchMode):
    """Follows what is sent into the parameters, through whatever is made of it on the way.

    Args:
        parameters: Name -> parameter.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]):
        super().__init__()
        self._owner = {_memory(parameter): name for name, parameter in parameters.items()}
        self._sources: dict[int, set[str]] = {}
        # A tensor that ends gives its number to another.
        self._alive: list[torch.Tensor] = []
        self.read: set[str] = set()
        self.filled: set[str] = set()
        # Parameter -> which part of it -> times it was written, and by what.
        self.parts: dict[str, dict[tuple[Any, ...], list[set[str]]]] = {}
        self.odd: list[str] = []

    def sent(self, name: str, shape: list[int], dtype: str) -> torch.Tensor:
        """Return a tensor that is sent: [shape] without memory."""
        tensor = torch.empty(shape, dtype=DTYPES[dtype], device="meta")
        self._sources[_memory(tensor)] = {name}
        self._alive.append(tensor)
        return tensor

    def __torch_dispatch__(self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = [item for word in args for item in (word if isinstance(word, list | tuple) else [word])]
        tensors = [item for item in given if isinstance(item, torch.Tensor)]
        sources = set().union(*(self._sources.get(_memory(tensor), set()) for tensor in tensors))
        target = self._owner.get(_memory(tensors[0])) if tensors else None
        kind = func._schema.name
        if target and kind in ("aten::copy_", "aten::fill_", "aten::zero_"):
            self._write(target, tensors, sources, kind == "aten::copy_")
        elif sources:
            for tensor in made if isinstance(made, list | tuple) else [made]:
                if isinstance(tensor, torch.Tensor) and _memory(tensor) not in self._owner:
                    self._sources.setdefault(_memory(tensor), set()).update(sources)
                    self._alive.append(tensor)
        return made

    def _write(self, target: str, tensors: list[torch.Tensor], sources: set[str], is_copy: bool) -> None:
        part = tensors[0]
        if not is_copy:
            self.filled.add(target)
            return
        if tensors[1].shape != part.shape:
            self.odd.append(f"{', '.join(sorted(sources))} {[*tensors[1].shape]} into {[*part.shape]} of {target}")
        self.read |= sources
        place = (part.storage_offset(), tuple(part.shape), part.stride())
        self.parts.setdefault(target, {}).setdefault(place, []).append(sources)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
