"""Imports a family's module of transformers."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from posttrain.config.families import modelling_module

# transformers takes its kernels for gated delta nets if it can be imported, and fails at the first call without a GPU.
KERNELS = "fla"


def import_modelling(model_type: str) -> ModuleType:
    """Return transformers' module with the classes of a family; without a GPU they compute in torch.

    Source: transformers 5.23, `integrations/hub_kernels.py`, `use_kernel_func_from_hub_with_fallback`.
    """
    if torch.cuda.is_available():
        return importlib.import_module(modelling_module(model_type))
    with _hidden(KERNELS):
        return importlib.import_module(modelling_module(model_type))


@contextmanager
def _hidden(package: str) -> Iterator[None]:
    """Let imports of a package fail within the block."""
    modules: dict[str, Any] = sys.modules
    there, before = package in modules, modules.get(package)
    modules[package] = None
    try:
        yield
    finally:
        del modules[package]
        if there:
            modules[package] = before
