"""Runs the policy with the quantized weights that engines serve, layer by layer.

A layer's weights are replaced at the start of its forward pass and restored at its end. This needs a copy of only one
layer, and no optimizer state to restore from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch

from posttrain.checkpoint.quantization.quantized_names import layer_of
from posttrain.rl.megatron_backend.model import Policy
from posttrain.rl.megatron_backend.served_values import Magnitudes, ServedValues
from posttrain.rl.megatron_backend.weights import Shard


class QuantizedWeights:
    """Replaces the policy's weights with the served ones during forward passes.

    Args:
        policy: The trained model.
        values: The engines' form of this rank's shards.
    """

    def __init__(self, policy: Policy, values: ServedValues):
        self._policy, self._values = policy, values
        # Shards by layer; None: the embedding, the last norm and the output matrix.
        self._changing: dict[int | None, list[Shard]] = defaultdict(list)
        for shard in values.shards:
            if values.differ(shard):
                self._changing[layer_of(shard.hf_name)].append(shard)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Use the served weights in forward passes of the block, without gradients; restores bitwise. Collective."""
        for chunk in self._policy.wrapped:
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                # Otherwise a forward pass would gather data-parallel shards of different states.
                group.finish_param_sync(skip_next_bucket_dispatch=True)
        magnitudes = self._values.agreed_magnitudes()
        with ExitStack() as stack, torch.no_grad():
            stack.callback(self._lend(None, magnitudes))
            for chunk in self._policy.chunks:
                for layer in chunk.decoder.layers:
                    _around_forward(layer, partial(self._lend, layer.layer_number - 1, magnitudes), stack)
            yield

    def _lend(self, layer: int | None, magnitudes: Magnitudes) -> Callable[[], None]:
        """Overwrite a layer's weights; returns a function that restores them."""
        shards = self._changing.get(layer, [])
        own = [shard.values.clone() for shard in shards]
        for shard in shards:
            shard.values.copy_(self._values.of(shard, magnitudes))

        def give_back() -> None:
            for shard, values in zip(shards, own, strict=True):
                shard.values.copy_(values)
            own.clear()

        return give_back


def _around_forward(layer: torch.nn.Module, lend: Callable[[], Callable[[], None]], stack: ExitStack) -> None:
    """Hook a layer to use its served weights in each forward pass until the stack closes."""
    lent: list[Callable[[], None]] = []

    def before(*_: object) -> None:
        lent.append(lend())

    def after(*_: object) -> None:
        if lent:
            lent.pop()()

    stack.callback(after)
    stack.callback(layer.register_forward_pre_hook(before).remove)
    stack.callback(layer.register_forward_hook(after, always_call=True).remove)
