"""Where the routers of transformers' own model send tokens."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from posttrain.types import TrajectoryGroup


@contextmanager
def watched_routers(model: Any):
    """Yield a list to which every router of a forward pass adds its choice [tokens, K], layer after layer."""
    seen: list[np.ndarray] = []
    gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    hooks = [gate.register_forward_hook(lambda *told: seen.append(told[-1][-1].numpy())) for gate in gates]
    yield seen
    for hook in hooks:
        hook.remove()


def share_of_others(folder: Path, groups: Sequence[TrajectoryGroup]) -> float:
    """Return the share of samples' places that went to another expert than a checkpoint's own routers send them to."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    others = places = 0
    for sample in (sample for group in groups for sample in group.trajectories):
        (routes,) = sample.routes
        told = np.memmap(routes.file, routes.dtype, "r", routes.offset, routes.shape)
        tokens = torch.tensor([sample.tokens])[:, :-1]
        with torch.no_grad(), watched_routers(model) as seen:
            model(tokens)
        expected = np.stack(seen)
        assert told.shape == expected.shape
        others += sum(len(np.setdiff1d(a, b)) for a, b in zip(rows(told), rows(expected), strict=True))
        places += told.size
    return others / places


def rows(routes: np.ndarray) -> np.ndarray:
    return routes.reshape(-1, routes.shape[-1])
