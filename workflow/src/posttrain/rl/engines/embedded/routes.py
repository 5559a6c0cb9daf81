"""Records the experts that a model's layers route tokens to."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from posttrain.rl.engines.routes import smallest


def has_experts(model: Any) -> bool:
    """Return whether a `transformers` causal language model has experts."""
    return any(_experts(model))


def _experts(model: Any) -> list[torch.nn.Module | None]:
    return [getattr(layer.mlp, "experts", None) for layer in model.model.layers]


class RouteRecorder:
    """While open, records the expert routes of the last forward pass.

    Args:
        model: A `transformers` causal language model with experts.

    Raises:
        ValueError: The model has no experts.
    """

    def __init__(self, model: Any):
        found = _experts(model)
        self._experts = {number: module for number, module in enumerate(found) if module is not None}
        if not self._experts:
            raise ValueError("the model has no experts")
        self._num_layers, self._per_token = len(found), model.config.num_experts_per_tok
        self._dtype = smallest(int(next(iter(self._experts.values())).num_experts))  # type: ignore[arg-type]
        self._seen: dict[int, torch.Tensor] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        for number, experts in self._experts.items():
            self._stack.callback(experts.register_forward_pre_hook(self._watch(number)).remove)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _watch(self, number: int) -> Any:
        def look(_: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
            self._seen[number] = given[1]

        return look

    def take(self, num_rows: int) -> np.ndarray:
        """Return the routes of the last pass [B, Q, layers, experts per token]; zeros in layers without experts.

        Args:
            num_rows: B, rows of the pass.
        """
        tokens = len(next(iter(self._seen.values())))
        routes = np.zeros((tokens, self._num_layers, self._per_token), self._dtype)
        for number, chosen in self._seen.items():
            routes[:, number] = chosen.numpy()
        self._seen.clear()
        return routes.reshape(num_rows, -1, self._num_layers, self._per_token)
