"""Records the input maxima of experts' projections, and their token counts, during unmodified forward passes.

Routing is not changed: experts see the tokens that they would see in use. Padding tokens are routed too; their routing
weights are set to zero, which identifies them in the experts' inputs wherever a dispatcher puts them. Real tokens are
not affected.

Megatron multiplies the input of `linear_fc2` by the routing weight. Engines multiply its output instead, so the input
of their `down_proj` is computed here from the output of `linear_fc1`.

Shapes: N tokens of the experts of this rank, H width of the residual stream, I width of an expert on this rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer

from posttrain.checkpoint.quantization.expert_maxima import DOWN, GATE_UP, ExpertMaxima
from posttrain.rl.megatron_backend.model import Policy
from posttrain.rl.megatron_backend.ranks import largest_of_ranks


class ExpertInputs:
    """Observes the experts of this rank.

    Args:
        policy: The model to observe.
    """

    def __init__(self, policy: Policy):
        self._policy, arch = policy, policy.config.model.architecture
        self._shape = (arch.num_hidden_layers, arch.n_routed_experts)
        # Mask of this rank's non-padding tokens in the row that a chunk computes.
        self._real = torch.empty(0, dtype=torch.bool)
        self._forget()

    def _forget(self) -> None:
        device = self._policy.device
        self._amax = torch.zeros(*self._shape, 2, device=device)
        self._counts = torch.zeros(self._shape, dtype=torch.int64, device=device)

    @contextmanager
    def watched(self, rows: Sequence[torch.Tensor]) -> Iterator[None]:
        """Observe the forward passes of the block.

        Args:
            rows: Mask of non-padding tokens of each micro-batch, in order: [T] bool.
        """
        with ExitStack() as stack:
            for wrapped, chunk in zip(self._policy.wrapped, self._policy.chunks, strict=True):
                begin = partial(self._begin_row, iter(rows))
                stack.callback(wrapped.register_forward_pre_hook(begin, with_kwargs=True).remove)
                for layer in chunk.decoder.layers:
                    if isinstance(layer.mlp, MoELayer):
                        self._watch(layer.mlp, layer.layer_number - 1, stack)
            yield

    def _begin_row(self, rows: Iterator[torch.Tensor], _: Any, args: Any, given: dict[str, Any]) -> None:
        own = given["packed_seq_params"].cut(next(rows).to(self._policy.device))
        if self._policy.settings.sequence_parallel:  # ranks have equal shares, in rank order
            own = own.chunk(parallel_state.get_tensor_model_parallel_world_size())[
                parallel_state.get_tensor_model_parallel_rank()
            ]
        self._real = own

    def _watch(self, layer: MoELayer, number: int, stack: ExitStack) -> None:
        experts, own = layer.experts, list(layer.local_expert_indices)
        # Routing weights of the tokens of this rank's experts, concatenated by expert.
        weights: list[tuple[torch.Tensor, list[int]]] = []

        def take_note(_: Any, given: tuple[torch.Tensor, ...]) -> None:
            tokens_per_expert, probabilities = given[1].tolist(), given[2].detach().reshape(-1)
            weights[:] = [(probabilities, tokens_per_expert)]

        stack.callback(layer.router.register_forward_hook(self._leave_out_padding).remove)
        stack.callback(experts.register_forward_pre_hook(take_note).remove)

        def look(places: Sequence[int], _: Any, given: tuple[Any, ...], output: tuple[torch.Tensor, Any]) -> None:
            ((probabilities, sizes),) = weights
            of_expert = probabilities.split(sizes)
            inputs = given[0].split([sizes[place] for place in places])
            outputs = output[0].split([sizes[place] for place in places])
            for place, seen, made in zip(places, inputs, outputs, strict=True):
                if len(seen):
                    self.see(number, own[place], seen, _activated(made), of_expert[place] > 0)

        if hasattr(experts, "local_experts"):
            for place, expert in enumerate(experts.local_experts):
                stack.callback(expert.linear_fc1.register_forward_hook(partial(look, [place])).remove)
        else:  # one module computes the first projection of all experts
            stack.callback(experts.linear_fc1.register_forward_hook(partial(look, range(len(own)))).remove)

    def _leave_out_padding(self, _: Any, __: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        probabilities, *rest = output
        return probabilities * self._real[:, None].to(probabilities.dtype), *rest

    def see(self, layer: int, expert: int, gate_up: torch.Tensor, down: torch.Tensor, real: torch.Tensor) -> None:
        """Record an expert's inputs.

        Args:
            layer: Number of the decoder layer.
            expert: Its number in the layer.
            gate_up: [N, H], input of its gate and up projections.
            down: [N, I], input of its down projection; this rank's columns.
            real: [N] bool, mask of non-padding tokens.
        """
        for place, given in ((GATE_UP, gate_up), (DOWN, down)):
            largest = torch.where(real, given.detach().abs().amax(1).float(), 0.0).max()
            # maximum() propagates NaN.
            self._amax[layer, expert, place] = torch.maximum(self._amax[layer, expert, place], largest)
        self._counts[layer, expert] += real.sum()

    def take(self) -> ExpertMaxima:
        """Return the observations of all ranks since the last call, on every rank; collective.

        Raises:
            CheckpointError: An activation was NaN or infinite.
        """
        amax, counts = self._amax, self._counts
        if parallel_state.get_expert_tensor_parallel_rank():
            counts = torch.zeros_like(counts)  # ranks that share an expert have all counted its tokens
        amax = largest_of_ranks(amax)
        dist.all_reduce(counts)
        self._forget()
        found = ExpertMaxima(amax.cpu(), counts.cpu())
        found.check_finite()
        return found


def _activated(made: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up [N, I] of the output of the first projections [N, 2 I], as engines round it."""
    gate, up = made.detach().float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(made.dtype)
