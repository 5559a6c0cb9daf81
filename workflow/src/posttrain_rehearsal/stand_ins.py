"""Stand-ins for packages and devices that need a GPU; `named_stand_ins` lists what each hides."""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch

from posttrain.config.schema import Config
from posttrain.plan.flags.environment import capability
from posttrain.plan.flags.sparse_kernels import sparse_kernel
from posttrain.plan.sizing.memory import GIB
from posttrain_rehearsal import deepep, tile_kernels, transformer_engine
from posttrain_rehearsal.recorder import Recorder

# Of every device, as in `envs/rehearsal/runtime.c`: an H200's. Kernels that are not started do not depend on it.
MULTIPROCESSORS = 132


def install(recorder: Recorder, config: Config) -> None:
    """Install all stand-ins; call before Megatron is imported."""
    _provide_transformer_engine(recorder)
    deepep.provide(recorder)
    tile_kernels.provide(recorder, sparse_kernel(config).name)
    _provide_triton(recorder)
    _provide_compiler(recorder)
    _provide_devices(recorder, capability(config), int(config.hardware.memory_gib_per_gpu * GIB))
    _provide_biases()
    _provide_numbers()
    from posttrain.rl.megatron_backend.simulated import without_random_state

    without_random_state()
    # Module.to would swap parameters in place, which fails while the dispatch mode references them.
    torch.nn.Module._apply = _convert  # type: ignore[method-assign]


class _Compiled(ModuleType):
    """A stand-in for the compiled module; names that are not implemented exist, and raise when called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=name, side_effect=NotImplementedError(f"transformer_engine_torch.{name}"))
        setattr(self, name, value)
        return value


def _provide_transformer_engine(recorder: Recorder) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the package warns that its compiled part is missing
        package: Any = importlib.import_module("transformer_engine")  # a module of ours has the same name
    from transformer_engine import common

    module = _Compiled("transformer_engine_torch")
    for name, value in transformer_engine.names(recorder).items():
        setattr(module, name, value)
    sys.modules["transformer_engine_torch"] = module
    common.load_framework_extension = lambda framework: None
    package.pytorch = importlib.import_module("transformer_engine.pytorch")
    utils: Any = importlib.import_module("transformer_engine.pytorch.attention.dot_product_attention.utils")
    choose = utils.get_attention_backend
    # The fake tensors replace plain ones, for which the backend is chosen.
    utils.get_attention_backend = lambda wanted: choose(replace(wanted, qkv_type=torch.Tensor))


def _provide_triton(recorder: Recorder) -> None:
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    def start(self: Any, *arguments: Any, **options: Any) -> None:
        tensors = [value for value in (*arguments, *options.values()) if isinstance(value, torch.Tensor)]
        transformer_engine.require_same_device(*tensors)
        recorder.kernel(0, transformer_engine.num_bytes(*tensors))

    JITFunction.run = Autotuner.run = start


def _provide_compiler(recorder: Recorder) -> None:
    """Run functions for torch.compile uncompiled, and count each as one kernel."""

    def compile_it(function: Any = None, **options: Any) -> Any:
        if function is None:
            return lambda given: compile_it(given, **options)

        @functools.wraps(function)
        def fused(*arguments: Any, **named: Any) -> Any:
            with recorder.fused(transformer_engine.num_bytes(*arguments)):
                return function(*arguments, **named)

        return fused

    torch.compile = compile_it  # type: ignore[assignment]


def _provide_devices(recorder: Recorder, architecture: tuple[int, int], memory: int) -> None:
    cuda: Any = torch.cuda
    nothing = lambda *_, **__: None  # noqa: E731
    for name in ("_lazy_init", "set_device", "manual_seed", "manual_seed_all", "synchronize", "empty_cache"):
        setattr(cuda, name, nothing)
    cuda.current_device = lambda: 0
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.zeros(16, dtype=torch.uint8)
    cuda.set_rng_state = cuda.random.set_rng_state = nothing
    cuda.is_current_stream_capturing = lambda: False
    cuda.get_device_properties = lambda *_: SimpleNamespace(
        name="simulated",
        major=architecture[0],
        minor=architecture[1],
        total_memory=memory,
        multi_processor_count=MULTIPROCESSORS,
    )
    cuda.get_device_capability = lambda *_: architecture
    cuda.get_device_name = lambda *_: "simulated"
    cuda.mem_get_info = lambda *_: (memory, memory)
    cuda.reset_peak_memory_stats = nothing
    for name in ("max_memory_allocated", "memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda *_, **__: recorder.peak)


def _provide_biases() -> None:
    """Create the mask of causal attention, whose tensor class has no memory."""
    from torch.nn.attention.bias import CausalBias

    CausalBias.__new__ = lambda kind, *_: torch.Tensor._make_subclass(kind, torch.empty(0))  # type: ignore


def _provide_numbers() -> None:
    """Ignore pin_memory in torch.tensor: pinning calls the driver, without a dispatch to our mode."""
    make = torch.tensor
    torch.tensor = lambda *given, pin_memory=False, **options: make(*given, **options)  # type: ignore[assignment]


def _convert(module: Any, change: Any, recurse: bool = True) -> Any:
    """Move or cast a module."""
    for child in module.children():
        _convert(child, change)
    for name, old in module._parameters.items():
        if old is not None:
            new = torch.nn.Parameter(change(old.detach()), requires_grad=old.requires_grad)
            new.__dict__.update({key: value for key, value in old.__dict__.items() if key not in new.__dict__})
            module._parameters[name] = new
    for name, buffer in module._buffers.items():
        module._buffers[name] = None if buffer is None else change(buffer)
    return module
