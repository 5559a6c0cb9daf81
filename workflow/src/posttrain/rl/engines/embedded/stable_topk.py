"""Breaks ties of the indexer's top-k in favour of the lower position.

`torch.topk` does not define the order of ties, which are common here: the indexer's scores pass through a ReLU, so
all keys with no positive head score exactly 0. The trainer breaks ties in favour of the lower position. The engine
must do the same, or both would attend to different keys and disagree on log-probabilities.

The indexer itself remains transformers' code: only the `topk` inside its forward becomes a stable sort.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class StableTopK(TorchFunctionMode):
    """While active, `topk` returns the largest values in descending order, with ties in index order."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Replace `topk`; pass through everything else."""
        if function in (torch.topk, torch.Tensor.topk):
            return stable_topk(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def stable_topk(
    values: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> torch.return_types.topk:
    """Return what `torch.topk` returns, with ties to the lower index.

    Args:
        values: [..., T, ...]
        k: How many to keep.
        dim: The axis of T.
        largest: Take the largest values; otherwise the smallest.
        sorted: Ignored: the result is always sorted.

    Example:
        values (0, 3, 0, 0), k = 2 give indices (1, 0), never (1, 2) or (1, 3).
    """
    in_order = torch.sort(values, dim=dim, descending=largest, stable=True)
    kept = (in_order.values.narrow(dim, 0, k), in_order.indices.narrow(dim, 0, k))
    return torch.return_types.topk(kept)


def make_indexers_stable(model: torch.nn.Module) -> int:
    """Run every indexer's forward with `StableTopK`; return how many there are."""
    indexers = [module for module in model.modules() if type(module).__name__.endswith("Indexer")]
    for indexer in indexers:
        indexer.forward = _with_stable_topk(indexer.forward)
    return len(indexers)


def _with_stable_topk(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(forward)
    def stable_forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        with StableTopK():
            return forward(*args, **kwargs)

    return stable_forward
