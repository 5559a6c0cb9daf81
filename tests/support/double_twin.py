"""A model of transformers that computes in FP64 throughout.

`model.double()` does not: norms, gates, routers and delta rules cast to FP32 inside, and what they leave is as far from
the truth as FP32 itself.
"""

from __future__ import annotations

import copy
import importlib
import sys
from pathlib import Path
from types import ModuleType

import torch

# How the modelling files name FP32.
NARROW = {"torch.float32": "torch.float64", ".float()": ".double()", "dtype=torch.float,": "dtype=torch.float64,"}


def double_twin(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a model whose modules are of its modelling file's classes, with FP64 for each FP32."""
    twin = copy.deepcopy(model).double()
    twin.set_experts_implementation("eager")  # the grouped product knows no FP64
    name = type(model).__module__
    classes = vars(_rewritten(name))
    for part in twin.modules():
        if type(part).__module__ == name:
            part.__class__ = classes[type(part).__name__]
    return twin


def _rewritten(name: str) -> ModuleType:
    original = importlib.import_module(name)
    source = Path(str(original.__file__)).read_text()
    for narrow, wide in NARROW.items():
        source = source.replace(narrow, wide)
    module = ModuleType(name)
    module.__package__, module.__file__ = original.__package__, original.__file__
    # Decorators look a class's module up by its name.
    sys.modules[name] = module
    try:
        exec(compile(source, str(original.__file__), "exec"), vars(module))
    finally:
        sys.modules[name] = original
    return module
