"""Simulated GPUs for SGLang: replaces torch's device queries and the kernel packages."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# Compiled packages that SGLang imports for NVIDIA's GPUs while it resolves or builds, and that need a driver.
KERNELS = ("sgl_kernel", "deep_gemm", "deep_ep", "flash_mla", "cuda", "cutlass")
# Values that classes read at import; an H200's, as in the rehearsal of the trainer.
MULTIPROCESSORS = 132
ANSWERS = {"deep_gemm.get_num_sms": MULTIPROCESSORS}


class MissingKernelError(NotImplementedError):
    """A stand-in for a kernel was called."""


class Kernel:
    """A name of a compiled package: it can be imported and used as a decorator; calling it as a kernel raises."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name: str) -> Kernel:
        if name.startswith("__"):
            raise AttributeError(name)
        return Kernel(f"{self._name}.{name}")

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (object,)

    def __getitem__(self, key: Any) -> Kernel:
        return self

    def __or__(self, other: Any) -> Kernel:
        return self

    __ror__ = __or__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return a known answer, act as a decorator, or raise."""
        if self._name in ANSWERS:
            return ANSWERS[self._name]
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]  # a decorator
        raise MissingKernelError(f"{self._name} is a kernel")


class KernelPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Lets the compiled packages be imported."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of a kernel package's module."""
        is_kernel = fullname.partition(".")[0] in KERNELS
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if is_kernel else None

    def create_module(self, spec: Any) -> None:
        """Use Python's default module."""

    def exec_module(self, module: types.ModuleType) -> None:
        """Define every name in the module."""
        kernel = Kernel(module.__name__)
        module.__getattr__ = lambda name: getattr(kernel, name)  # type: ignore[method-assign]


class Stream:
    """A stream or an event that does nothing."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


class OnMeta(TorchFunctionMode):
    """Creates GPU tensors on the meta device, without memory."""

    def __torch_function__(self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if _is_gpu(kwargs.get("device")):
            kwargs["device"] = "meta"
        if func is torch.Tensor.cuda:
            return args[0].to("meta")
        if func is torch.Tensor.to:
            args = tuple("meta" if _is_gpu(word) else word for word in args)
        return func(*args, **kwargs)


def _is_gpu(device: Any) -> bool:
    return isinstance(device, str | torch.device) and str(device).startswith("cuda")


def provide_gpu(device: Mapping[str, Any]) -> None:
    """Simulate GPUs; call before SGLang is imported, which checks for them once.

    Args:
        device: "name", "capability" (major, minor), "memory_bytes" and "count" per node.
    """
    capability, memory = tuple(device["capability"]), device["memory_bytes"]
    known = types.SimpleNamespace(
        name=f"NVIDIA {device['name']}",
        major=capability[0],
        minor=capability[1],
        total_memory=memory,
        multi_processor_count=MULTIPROCESSORS,
        gcnArchName="",
    )
    told = {
        "is_available": True,
        "device_count": device["count"],
        "get_device_capability": capability,
        "get_device_name": known.name,
        "get_device_properties": known,
        "current_device": 0,
        "mem_get_info": (memory, memory),
        "memory_allocated": 0,
        "empty_cache": None,
        "set_device": None,
        "synchronize": None,
    }
    for name, value in told.items():
        setattr(torch.cuda, name, lambda *args, _value=value, **kwargs: _value)
    torch.cuda.Stream = torch.cuda.Event = torch.cuda.current_stream = Stream  # type: ignore
    # CUDA builds have a version here; none of our settings depends on its value.
    torch.version.cuda = torch.version.cuda or "13.0"
    with contextlib.suppress(ImportError):
        import tvm_ffi  # noqa: F401  probes CUDA's Python package at import, and works without it
    sys.meta_path.insert(0, KernelPackages())
