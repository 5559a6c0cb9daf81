"""What experts are given in transformers' own models, by a look at their matrix products."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from posttrain.config.schema import Architecture
from posttrain.types import Trajectory

# (layer, expert, "gate_up" or "down") -> inputs [tokens, columns]
Inputs = dict[tuple[int, int, str], torch.Tensor]


class _Products(TorchFunctionMode):
    """Inside the block, keeps what is multiplied with an expert's matrices, wherever that is written."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.seen: dict[tuple[int, int, str], list[torch.Tensor]] = defaultdict(list)
        self._places: dict[int, tuple[int, int, str]] = {}
        for number, layer in enumerate(model.model.layers):
            if hasattr(layer.mlp, "experts"):
                for name in ("gate_up", "down"):
                    for expert, weight in enumerate(getattr(layer.mlp.experts, f"{name}_proj")):
                        self._places[weight.data_ptr()] = (number, expert, name)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear and (place := self._places.get(args[1].data_ptr())):
            self.seen[place].append(args[0].detach())
        return func(*args, **(kwargs or {}))


def inputs_in_transformers(folder: Path, arch: Architecture, sequences: Sequence[torch.Tensor]) -> Inputs:
    """Return what transformers' model gives to its experts, each sequence by itself."""
    from transformers import AutoModelForCausalLM

    from posttrain.rl.engines.embedded.stable_topk import make_indexers_stable

    ways = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **ways).eval()
    if arch.index_n_heads:
        make_indexers_stable(model)
    with torch.no_grad(), _Products(model) as products:
        for sequence in sequences:
            model(sequence[None])
    return {place: torch.cat(seen) for place, seen in products.seen.items()}


def samples_of(sequences: Sequence[torch.Tensor]) -> list[Trajectory]:
    return [
        Trajectory.of_response(tuple(s[:-1].tolist()), tuple(s[-1:].tolist()), prompt_id=i)
        for i, s in enumerate(sequences)
    ]
