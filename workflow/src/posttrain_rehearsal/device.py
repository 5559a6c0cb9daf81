"""A device that computes nothing: it intercepts every operation, and returns a tensor of the right shape.

A tensor of the device has no values. Small tensors that come from the host, or are derived from such ones, have a
mirror: a host tensor to which the same operations are applied. So boundaries of sequences, masks, positions and counts
are correct, and code that reads them gets their values. For other values `unknown` returns a substitute. torch's fake
mode alone has no values, so all code that reads a count would have to be replaced.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from posttrain_rehearsal.known_shapes import KnownShapes
from posttrain_rehearsal.recorder import Recorder
from posttrain_rehearsal.transformer_engine import require_same_type

aten = torch.ops.aten
# Queries that start no kernel; a tensor's device is read more often than anything else.
ASKED: dict[Any, Callable[[FakeTensor], Any]] = {
    torch.ops.prim.device.default: lambda tensor: tensor.fake_device,
    aten.is_pinned.default: lambda tensor: False,
}

# Larger tensors have no mirror. Floating-point tensors above FLOATING_BYTES have none if they come from the host or are
# overwritten with one number: weights and the optimizer's state, which are large and decide nothing.
MIRROR_BYTES = 1 << 24
FLOATING_BYTES = 1 << 20
# The same limits on the host, where received rollouts are long byte tensors. Among pinned tensors only vectors have
# values.
HOST_BYTES, HOST_FLOATING_BYTES = 1 << 28, 1 << 22
VECTOR_BYTES = 1 << 20
# The output's values do not depend on the inputs' values.
SHAPE_ONLY = {
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
}
UNINITIALISED = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
FILLED = {aten.zeros.default, aten.ones.default, aten.full.default}
# Their outputs may become masks by in-place writes or casts, so they keep mirrors up to MIRROR_BYTES.
ONE_NUMBER = SHAPE_ONLY | FILLED
# Their results do not depend on the overwritten values.
OVERWRITING = {aten.copy_.default, aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor}
# They wait for the device, because their result is on the host, or its size depends on values.
WAITING = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.is_nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
    aten.repeat_interleave.Tensor,
    aten.unique_consecutive.default,
    aten._unique2.default,
}
# torch's shape functions do not check the factors' types; cuBLAS does.
PRODUCTS = {aten.mm.default, aten.mm.out, aten.bmm.default, aten.addmm.default, aten.baddbmm.default}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}


class SimulatedDevice(TorchDispatchMode):
    """Emulates CUDA devices, and reports their operations to a recorder.

    Args:
        recorder: Gets every operation, every new tensor and every wait for the device.
        collective: Called with each c10d operation and its arguments.
        unknown: Called with an operation whose result needs unknown values, and its arguments; returns the result on
            the host, or NotImplemented if a tensor without values suffices.
    """

    def __init__(
        self,
        recorder: Recorder,
        collective: Callable[[Any, Sequence[Any]], Any],
        unknown: Callable[[Any, Sequence[Any]], Any],
    ):
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._shapes = KnownShapes(self.fake)
        self._recorder, self._collective, self._unknown = recorder, collective, unknown
        self._mirrors: dict[int, torch.Tensor] = {}
        self._assumed = 1.0
        self._alive: dict[int, weakref.ref] = {}

    def __enter__(self) -> SimulatedDevice:
        # torch.tensor for a device then creates the tensor on the host, and moves it by an operation that we intercept.
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ASKED and isinstance(args[0], FakeTensor):
            return ASKED[func](args[0])
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            return self._collective(func, args)
        if func is aten._pin_memory.default:
            func, args, kwargs = aten.clone.default, args[:1], {}  # without a driver pages cannot be pinned
        tensors = [*tensors_of(args), *tensors_of((*kwargs.values(),))]
        device = kwargs.get("device")
        is_here = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if not is_here and (device is None or device.type != "cuda"):
            return self._on_host(func, args, kwargs)
        return self._here(func, types, args, kwargs, tensors)

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Compute on the host with this process's memory; large tensors have no values there either."""
        most = VECTOR_BYTES if kwargs.get("pin_memory") else _most_host_bytes(kwargs.get("dtype"))
        if func is aten.empty.memory_format and _bytes_of(args[0], kwargs) > most:
            kwargs = {**kwargs, "pin_memory": False}
            with self.fake:
                return self._noted(func, func(*args, **kwargs))
        made = func(*args, **{**kwargs, "pin_memory": False} if kwargs.get("pin_memory") else kwargs)
        return made.zero_() if func in UNINITIALISED else made

    def on_host_without_bytes(self, size: int) -> torch.Tensor:
        """Return `size` bytes on the host without values or memory."""
        with self.fake:
            return self._noted(None, torch.empty(size, dtype=torch.uint8))

    def _here(self, func: Any, types: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        if func in WAITING:
            if kwargs.get("output_size") is None:
                self._recorder.wait(func)
            return self._waited(func, args, kwargs)
        if func is aten.record_stream.default:
            return None
        if func in PRODUCTS:
            require_same_type(*tensors)
        if func in INDEXING and any(_is_mask(index) for index in args[1]):
            indices = [part for index in args[1] for part in self._places(func, index)]
            args = (args[0], indices, *args[2:])
            return self._here(func, types, args, kwargs, [*tensors_of(args)])
        if func is aten._to_copy.default and not isinstance(args[0], FakeTensor):
            return self._from_host(args[0].to(kwargs.get("dtype") or args[0].dtype))
        mirrored = self._mirrored(func, args, kwargs, tensors)
        if func is aten._to_copy.default and kwargs.get("device") == torch.device("cpu"):
            return self._to_host(args[0], mirrored)
        out = self._shaped(func, types, args, kwargs)
        if func not in UNINITIALISED:
            self._recorder.operation(func, args, kwargs, out)
        self._noted(func, out)
        if mirrored is not None:
            self._keep(out, mirrored, MIRROR_BYTES if func in ONE_NUMBER else FLOATING_BYTES)
        elif _writes(func):
            self._forget(func, args, kwargs)
        else:
            self._assume(out)
        return out

    def _shaped(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Return fake tensors with the result's shapes."""
        if func is aten._efficient_attention_backward.default:
            # torch's shape function lacks one of the operation's parameters, `out`.
            return *map(torch.empty_like, args[1:4]), args[1].new_empty(())
        if func is aten._unsafe_view.default:
            func = aten.view.default  # it has the same result
        return self._shapes(func, types, args, kwargs)

    def _places(self, func: Any, index: Any) -> Sequence[Any]:
        """Return a mask's index as positions, which costs a wait, and any other index unchanged."""
        if not _is_mask(index):
            return (index,)
        self._recorder.wait(func)
        found = self._waited(aten.nonzero.default, (index,), {})
        return tuple(aten.select.int(found, 1, axis) for axis in range(index.dim()))

    def _waited(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Compute an operation that needs values from the mirrors, or else from `unknown`."""
        known = self._known(args, kwargs)
        values = self._unknown(func, args) if known is None else func(*known[0], **known[1])
        return self._from_host(values) if isinstance(values, torch.Tensor) else values

    def _mirrored(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        """Return the operation's result on the host; None if values are unknown or too large."""
        if func in UNINITIALISED or any(_size(tensor) > MIRROR_BYTES for tensor in tensors):
            return None
        if func in OVERWRITING and isinstance(tensors[0], FakeTensor):
            self._overwrite(tensors[0])
        if func in SHAPE_ONLY:
            known = (torch.empty(args[0].shape, dtype=args[0].dtype), *args[1:]), kwargs
        elif not all(self._has_values(tensor) for tensor in tensors):
            return self._chosen(func, args)
        else:
            known = self._known(args, kwargs)
        on_host, options = known
        if not tensors and func in FILLED and _bytes_of(args[0], kwargs) > MIRROR_BYTES:
            return None
        if options.get("device") is not None:
            options = {**options, "device": torch.device("cpu")}
        if options.get("pin_memory"):
            options = {**options, "pin_memory": False}
        return func(*on_host, **options)

    def _has_values(self, tensor: torch.Tensor) -> bool:
        return not isinstance(tensor, FakeTensor) or tensor.untyped_storage()._cdata in self._mirrors

    def _known(self, args: Any, kwargs: Any) -> Any:
        """Return the arguments with mirrors in place of the device's tensors; None where one has no values."""
        if not all(map(self._has_values, (*tensors_of(args), *tensors_of((*kwargs.values(),))))):
            return None
        return tree_map_only(FakeTensor, self.mirror, (args, kwargs))

    def _chosen(self, func: Any, args: Any) -> Any:
        """Return partial knowledge of unknown values: each equals itself, so it is no NaN; `unknown` chooses top-k."""
        if func is aten.eq.Tensor and args[0] is args[1]:
            return torch.ones(args[0].shape, dtype=torch.bool)
        chosen = self._unknown(func, args) if func is aten.topk.default else NotImplemented
        return None if chosen is NotImplemented else chosen

    def _to_host(self, tensor: torch.Tensor, mirrored: Any) -> torch.Tensor:
        self._recorder.wait(aten._to_copy.default)
        if mirrored is not None:
            return mirrored
        if _size(tensor) > _most_host_bytes(tensor.dtype):
            with self.fake:
                return torch.empty(tensor.shape, dtype=tensor.dtype)
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    def _from_host(self, values: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the device with the values of a host tensor."""
        with self.fake:
            out = torch.empty(values.shape, dtype=values.dtype, device="cuda")
        self._noted(None, out)
        if out.untyped_storage().nbytes() <= _most_bytes(out):
            self.set_values(out, values)
        return out

    # ---- live storages and their mirrors ----

    def _noted(self, func: Any, out: Any) -> Any:
        for tensor in tensors_of(out):
            if not isinstance(tensor, FakeTensor):
                continue
            tensor.constant = None  # replaced by the mirror; torch would use it where there is no device
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._alive:
                self._alive[key] = weakref.ref(storage, partial(self._freed, key))
                self._recorder.allocated(key, storage.nbytes(), tensor.device.type)
        return out

    def _freed(self, key: int, _: Any) -> None:
        self._alive.pop(key, None)
        self._mirrors.pop(key, None)
        self._recorder.freed(key)

    def mirror(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor's known values as a host tensor that shares the mirror's memory, or None."""
        whole = self._mirrors.get(tensor.untyped_storage()._cdata)
        if whole is None:
            return None
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(whole.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())

    def _overwrite(self, tensor: torch.Tensor) -> None:
        """Give a tensor that is its whole storage a new mirror, which will be overwritten."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._mirrors and _size(tensor) == storage.nbytes() <= _most_bytes(tensor):
            self._mirrors[storage._cdata] = torch.zeros(storage.nbytes(), dtype=torch.uint8)

    def set_values(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Set the values of a device tensor."""
        mirror = self.mirror(tensor)
        if mirror is None:
            whole = torch.zeros(tensor.untyped_storage().nbytes(), dtype=torch.uint8)
            self._mirrors[tensor.untyped_storage()._cdata] = whole
            mirror = self.mirror(tensor)
        assert mirror is not None
        mirror.copy_(values)

    def _keep(self, out: Any, mirrored: Any, floating_bytes: int) -> None:
        """Store values that were computed on the host as the results' mirrors."""
        for tensor, values in zip(tensors_of(out), tensors_of(mirrored), strict=True):
            storage, other = tensor.untyped_storage(), values.untyped_storage()
            most = floating_bytes if tensor.is_floating_point() else MIRROR_BYTES
            if storage._cdata in self._mirrors or storage.nbytes() > most:
                continue
            if other.nbytes() == storage.nbytes() and values.stride() == tensor.stride():
                self._mirrors[storage._cdata] = values
            else:
                self.set_values(tensor, values)

    @contextmanager
    def assuming_nothing_finite(self, is_so: bool) -> Iterator[None]:
        """Treat unknown numbers as NaN in the block, if `is_so`."""
        self._assumed = math.nan if is_so else 1.0
        try:
            yield
        finally:
            self._assumed = 1.0

    def _assume(self, out: Any) -> None:
        """Set unknown scalars and vectors, such as sums and norms, to 1: their logarithm and inverse are finite."""
        for tensor in tensors_of(out):
            size = tensor.untyped_storage().nbytes()
            if tensor.dim() < 2 and tensor.is_floating_point() and _size(tensor) == size <= VECTOR_BYTES:
                self.set_values(tensor, torch.full((), self._assumed, dtype=tensor.dtype))

    def _forget(self, func: Any, args: Any, kwargs: Any) -> None:
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info and argument.alias_info.is_write:
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                for tensor in tensors_of(value):
                    self.forget(tensor)

    def forget(self, tensor: torch.Tensor) -> None:
        """Mark a tensor's values as unknown."""
        self._mirrors.pop(tensor.untyped_storage()._cdata, None)


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an argument or a result, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_of(part)


@cache
def _writes(func: Any) -> bool:
    return any(argument.alias_info and argument.alias_info.is_write for argument in func._schema.arguments)


def _is_mask(index: Any) -> bool:
    return isinstance(index, FakeTensor) and index.dtype in (torch.bool, torch.uint8)


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _most_bytes(tensor: torch.Tensor) -> int:
    return FLOATING_BYTES if tensor.is_floating_point() else MIRROR_BYTES


def _most_host_bytes(dtype: torch.dtype | None) -> int:
    return HOST_FLOATING_BYTES if (dtype or torch.get_default_dtype()).is_floating_point else HOST_BYTES


def _bytes_of(shape: Any, kwargs: Any) -> int:
    count = 1
    for extent in shape if isinstance(shape, list | tuple) else (shape,):
        count *= extent
    return count * (kwargs.get("dtype") or torch.get_default_dtype()).itemsize
