"""A rank on CUDA without a GPU: tensors of torch's fake mode, a process group that sends nothing, and the Python of
Transformer Engine over a stand-in for its compiled part.

What is not shown: kernels (no value is ever computed), NCCL, DeepEP, streams. Stand-ins: every function of
`transformer_engine_torch`, and the random state of devices.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / ".envs" / "fake-cuda"


def run(script: Path, *arguments: str) -> Any:
    """Return what a script prints as JSON in its last line, run where CUDA devices are said to be.

    Skips the test where the environment was not made; fails it where REQUIRE asks for it.
    """
    from tests.support.requirements import require

    missing = not (ENVIRONMENT / ".ready").exists()
    require("fake-cuda", "no environment of a CUDA build of torch: `make env-fake-cuda`" if missing else "")
    libraries = ENVIRONMENT / "fake"
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"LD_LIBRARY_PATH": str(libraries), "LD_PRELOAD": str(libraries / "libfakecuda.so")}
    environment |= {"PYTHONPATH": str(ROOT), "RANK": "0", "LOCAL_RANK": "0"}
    python = str(ENVIRONMENT / "bin" / "python")
    ended = subprocess.run(
        [python, str(script), *arguments], env=environment, capture_output=True, text=True, timeout=600
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(ended.stdout.strip().splitlines()[-1])


def provide_transformer_engine() -> None:
    """Let Transformer Engine's Python be imported without its compiled part."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the package says that its compiled part is missing
        import transformer_engine
    from transformer_engine import common

    class Compiled(ModuleType):
        """Has whatever is asked of it; classes stay classes, so that they may stand in annotations."""

        class DType(enum.IntEnum):
            kByte, kInt32, kFloat32, kFloat16, kBFloat16, kFloat8E4M3, kFloat8E5M2, kFloat4E2M1 = range(8)

        class NVTE_Fused_Attn_Backend(enum.IntEnum):
            NVTE_No_Backend, NVTE_F16_arbitrary_seqlen, NVTE_FP8 = -1, 1, 2

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            value = MagicMock(name=name)
            setattr(self, name, value)
            return value

    sys.modules["transformer_engine_torch"] = Compiled("transformer_engine_torch")
    common.load_framework_extension = lambda framework: None
    transformer_engine.pytorch = importlib.import_module("transformer_engine.pytorch")


def join_fake_ranks(world_size: int) -> None:
    """Make this process rank 0 of so many that do not exist."""
    import torch
    import torch.distributed as dist
    from megatron.core.tensor_parallel import random as megatron_random
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from posttrain.megatron_backend import initialize

    os.environ["WORLD_SIZE"] = str(world_size)
    new_group = dist.new_group
    dist.new_group = lambda *args, backend=None, **kwargs: new_group(*args, **kwargs)
    torch.cuda._lazy_init = torch.cuda.set_device = lambda *_: None
    torch.cuda.current_device = lambda: 0
    torch.cuda.manual_seed = lambda seed: None
    tracker = megatron_random.CudaRNGStatesTracker
    tracker.add, tracker.fork = lambda *_: None, lambda *_: contextlib.nullcontext()
    torch.nn.Module._apply = _convert
    initialize.join_ranks = lambda backend, timeout: dist.init_process_group(
        "fake", rank=0, world_size=world_size, store=FakeStore()
    )


def _convert(module: Any, change: Any, recurse: bool = True) -> Any:
    """Move or cast a module; torch would swap a fake parameter in place, and cannot while its mode knows it."""
    import torch

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
