"""Megatron Core's sparse attention kernels; the plan chooses one (`plan.flags`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig

_PARTS = "megatron.core.transformer.experimental_attention_variant"
_MODULES = {"tilelang": f"{_PARTS}.dsa_tilelang_kernels", "cudnn": f"{_PARTS}.dsa_cudnn_kernels"}
# Packages that they import lazily: check at startup rather than after the first rollout.
_PACKAGES = {"tilelang": ("tilelang",), "cudnn": ("flash_mla", "cudnn")}

# Queries [T, N, R + rope], keys [T, R + rope], places [T, K] int32, factor, R -> [T, N, R]
Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, int], torch.Tensor]


def load_kernel(config: MLATransformerConfig) -> Kernel | None:
    """Return the kernel that `sparse_attention` names; None for masked attention in torch.

    Raises:
        RuntimeError: Its packages are missing.
    """
    name = config.sparse_attention
    return partial(_run, name, _hook(name)) if name in _MODULES else None


@cache
def _hook(name: str) -> Callable[..., Any]:
    missing = []
    for package in _PACKAGES[name]:
        try:
            import_module(package)
        except (ImportError, OSError) as error:
            missing.append(f"{package} ({error})")
    if missing:
        raise RuntimeError(f"trainer.sparse_attention={name} needs {', '.join(missing)}: install it, or choose another")
    return import_module(_MODULES[name]).run_fused_absorbed_sparse_attention


def _run(
    name: str,
    hook: Callable[..., Any],
    query: torch.Tensor,
    key: torch.Tensor,
    places: torch.Tensor,
    scale: float,
    width: int,
) -> torch.Tensor:
    """Call a kernel with a batch of one row; a refusal ends the run instead of falling back to the slow path.

    Raises:
        RuntimeError: The kernel refuses these shapes, although the plan checked them.
    """
    lengths = (places >= 0).sum(-1, dtype=torch.int32)
    found = hook(query.unsqueeze(1), key[:, None, None], places[None], scale, width, lengths[None])
    if found is None:
        shapes = f"queries {tuple(query.shape)} and keys {tuple(key.shape)} of {query.dtype}, {places.shape[-1]} each"
        raise RuntimeError(f"{name} declines {shapes}: `posttrain plan` should have refused this")
    return found.squeeze(1)
