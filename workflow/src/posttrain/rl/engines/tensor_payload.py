"""Serialises named tensors as text in the format of SGLang's `update_weights_from_tensor`.

The request holds, per engine rank, the base64 of a pickled list of (name, tensor). SGLang 0.5.23 unpickles it
with a list of allowed globals (`SafeUnpickler`). Its own sender passes shared-memory handles, which need both
ends on one host and a helper process. Here tensors are sent by value: their bytes are in one storage per
bucket, and each tensor is a view into it, rebuilt by `torch._utils._rebuild_tensor_v3`. Both names are on
SGLang's list.

The embedded engine reads the same payload with a shorter list, which admits only tensors of the types below.
"""

from __future__ import annotations

import base64
import io
import itertools
import operator
import pickle
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from posttrain.errors import reason_of

NamedTensors = Sequence[tuple[str, torch.Tensor]]

# Tensor alignment in bytes, a multiple of all element sizes.
ALIGNMENT_BYTES = 16
PICKLE_PROTOCOL = 4
SERVED_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)


class PayloadError(ValueError):
    """A payload that is not a list of named tensors, or contains anything else."""


def serialize_bucket(named_tensors: NamedTensors) -> str:
    """Return the payload of one bucket.

    Args:
        named_tensors: Names and tensors on the CPU, of any layout.

    Returns:
        Base64 text.
    """
    offsets, size, pieces = [], 0, list[torch.Tensor]()
    padding = torch.zeros(ALIGNMENT_BYTES, dtype=torch.uint8)
    for _, tensor in named_tensors:
        offsets.append(size)
        missing = -tensor.nbytes % ALIGNMENT_BYTES
        pieces += [_bytes_of(tensor), padding[:missing]] if missing else [_bytes_of(tensor)]
        size += tensor.nbytes + missing
    flat = torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.uint8)
    storage = torch.storage.TypedStorage(wrap_storage=flat.untyped_storage(), dtype=torch.uint8, _internal=True)
    views = [
        (name, _View(storage, offset // tensor.element_size(), tuple(tensor.shape), tensor.dtype))
        for offset, (name, tensor) in zip(offsets, named_tensors, strict=True)
    ]
    return base64.b64encode(pickle.dumps(views, protocol=PICKLE_PROTOCOL)).decode("ascii")


def deserialize_bucket(payload: str) -> list[tuple[str, torch.Tensor]]:
    """Return the named tensors of a payload.

    Raises:
        PayloadError: It is damaged, holds something else, or names a global that tensors do not need.
    """
    try:
        named_tensors = _TensorUnpickler(io.BytesIO(base64.b64decode(payload, validate=True))).load()
    except (
        ValueError,
        EOFError,
        IndexError,
        KeyError,
        TypeError,
        RuntimeError,
        pickle.UnpicklingError,
    ) as error:
        raise PayloadError(f"not a payload of named tensors: {reason_of(error)}") from error
    if not isinstance(named_tensors, list) or not all(_is_named_tensor(item) for item in named_tensors):
        raise PayloadError(f"expected a list of (name, tensor), got {type(named_tensors).__name__}")
    return [(name, tensor) for name, tensor in named_tensors]


@dataclass(frozen=True)
class _View:
    """Placeholder for a tensor while pickling, so that all tensors of a bucket share one pickled storage."""

    storage: torch.storage.TypedStorage
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # As of a contiguous tensor: the product of the sizes behind each axis.
        strides = tuple(itertools.accumulate(self.shape[:0:-1], operator.mul, initial=1))[::-1] if self.shape else ()
        arguments: tuple[Any, ...] = (
            self.storage,
            self.offset,
            self.shape,
            strides,
            False,
            OrderedDict(),
            self.dtype,
        )
        return torch._utils._rebuild_tensor_v3, arguments


class _TensorUnpickler(pickle.Unpickler):
    """Unpickles tensors and their containers; refuses every other global by name."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch.storage" and name == "_load_from_bytes":
            return _load_storage
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return torch._utils._rebuild_tensor_v2
        if (module, name) == ("torch._utils", "_rebuild_tensor_v3"):
            return _rebuild_tensor
        if module == "torch" and name in {str(dtype).removeprefix("torch.") for dtype in SERVED_DTYPES}:
            return getattr(torch, name)
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a weight update")


def _rebuild_tensor(
    storage: torch.storage.TypedStorage,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    requires_grad: bool,
    hooks: Any,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Do what torch's function of `_View` does for a plain tensor; that one takes half of the time to read weights."""
    return torch.empty(0, dtype=dtype).set_(storage._untyped_storage, offset, shape, strides)  # type: ignore[call-overload, no-any-return]


def _load_storage(data: bytes) -> torch.storage.TypedStorage | torch.storage.UntypedStorage:
    storage = torch.load(io.BytesIO(data), weights_only=True)
    if not isinstance(storage, torch.storage.TypedStorage | torch.storage.UntypedStorage):
        raise pickle.UnpicklingError(f"expected a storage, got {type(storage).__name__}")
    return storage


def _is_named_tensor(item: Any) -> bool:
    return (
        isinstance(item, tuple)
        and len(item) == 2
        and isinstance(item[0], str)
        and isinstance(item[1], torch.Tensor)
        and item[1].dtype in SERVED_DTYPES
    )


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bytes in row-major order, [nbytes] uint8."""
    return tensor.detach().reshape(-1).view(torch.uint8)
