"""Routes tokens to the experts that the engine chose, with Megatron Core's router replay.

Trainer and engine round differently, so a token whose eighth and ninth experts score nearly equal may be routed
differently, and its log-probability is then that of another network. With replay the engine's experts are used,
weighted by the trainer's router, through which gradients flow.

Each layer reads the routes from the row's metadata, in the forward pass and in recomputation, so that Megatron's replay
queues need not follow the schedule's order.

Sources: Ma et al., Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers, arXiv 2510.11370;
megatron.core.transformer.moe.router_replay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router_replay import RouterReplayAction
from megatron.core.transformer.transformer_layer import TransformerLayer

from posttrain.config.schema import Config
from posttrain.rl.batching.packed_batch import PackedBatch
from posttrain.rl.batching.routes import routes_of_row
from posttrain.rl.megatron_backend.packed import PackedSequences


class RoutingReplay:
    """Makes this rank's routers replay the engine's routes.

    Args:
        config: The resolved configuration.
        wrapped: This rank's chunks of the model.
    """

    def __init__(self, config: Config, wrapped: Sequence[torch.nn.Module]):
        self._architecture = config.model.architecture
        self._layers: dict[torch.nn.Module, list[int]] = {}
        for model in wrapped:
            layers = [part for part in model.modules() if isinstance(part, TransformerLayer)]
            layers = [layer for layer in layers if isinstance(layer.mlp, MoELayer)]
            self._layers[model] = [layer.layer_number for layer in layers]
            for layer in layers:
                layer.register_forward_pre_hook(_follow, with_kwargs=True)
                layer.register_forward_hook(_forget)

    def routes_of(
        self, batch: PackedBatch, row: PackedSequences, model: torch.nn.Module, device: torch.device
    ) -> Mapping[int, torch.Tensor]:
        """Return the experts of this rank's tokens [T_own, K] in each layer of a chunk, by the layer's number from 1.

        Raises:
            CheckpointError: The routes are no longer on disk.
        """
        arch, numbers = self._architecture, self._layers[model]
        if not numbers:
            return {}
        layers = [number - 1 - arch.first_k_dense_replace for number in numbers]
        told = routes_of_row(batch, layers, arch.num_experts_per_tok, arch.n_routed_experts)
        own = row.cut(told.transpose(0, 1).contiguous().to(device))
        return {number: own[:, place] for place, number in enumerate(numbers)}


def _follow(layer: TransformerLayer, _: Any, given: Mapping[str, Any]) -> None:
    replay, routes = layer.mlp.router.router_replay, given["packed_seq_params"].routes[layer.layer_number]
    num_tokens, rank = len(given["hidden_states"]), parallel_state.get_tensor_model_parallel_rank()
    if num_tokens < len(routes):  # sequence-parallel ranks have equal shares, in rank order
        routes = routes[rank * num_tokens : (rank + 1) * num_tokens]
    replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    replay.set_target_indices(routes.long())


def _forget(layer: TransformerLayer, *_: Any) -> None:
    layer.mlp.router.router_replay.clear_indices()
