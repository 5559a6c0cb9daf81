"""Measures at the routers how evenly training tokens are spread over experts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter

from posttrain.rl.megatron_backend.ranks import largest_of_ranks


class ExpertLoad:
    """Counts each expert's tokens in forward passes with gradients.

    Args:
        chunks: This rank's part of the model, on its device. The routers' token counters, from which Megatron updates
            the expert bias, are made FP32, because BF16 counts only to 256.
    """

    def __init__(self, chunks: Iterable[torch.nn.Module]):
        model = torch.nn.ModuleList(chunks)
        self._device = next(model.parameters()).device
        self._routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
        for router in self._routers:
            router.register_forward_hook(self._count)
            if router.local_tokens_per_expert is not None:
                router.local_tokens_per_expert = router.local_tokens_per_expert.float()
        self._forget()

    @property
    def biases(self) -> list[torch.Tensor]:
        """Expert bias of each router that has one, [E] fp32."""
        return [router.expert_bias for router in self._routers if router.expert_bias is not None]

    def _forget(self) -> None:
        self._seen = {
            router: torch.zeros(router.config.num_moe_experts, dtype=torch.int64, device=self._device)
            for router in self._routers
        }

    def _count(self, router: TopKRouter, _: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        # A pass without gradients computes log-probabilities, or is recomputed in the backward pass.
        if torch.is_grad_enabled():
            self._seen[router] += output[1].detach().sum(0)

    @torch.no_grad()
    def take(self) -> dict[str, float]:
        """Return the metrics since the last call, over the layers of all stages; collective. Empty without experts."""
        # Maximum over layers: busiest expert over the mean, bias. Sum over layers: the former, idle experts, layers.
        largest = torch.zeros(2, dtype=torch.float64, device=self._device)
        total = torch.zeros(3, dtype=torch.float64, device=self._device)
        if self._routers:
            seen = torch.stack([self._seen[router] for router in self._routers])
            dist.all_reduce(seen, group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
            busiest = seen.amax(1) / seen.double().mean(1)
            idle = (seen == 0).double().mean(1)
            largest[0] = busiest.max()
            largest[1] = torch.stack([bias.abs().max() for bias in self.biases]).max() if self.biases else 0.0
            total[:] = torch.stack([busiest.sum(), idle.sum(), torch.ones_like(idle).sum()])
        self._forget()
        stages = parallel_state.get_pipeline_model_parallel_group()
        largest = largest_of_ranks(largest, stages)
        dist.all_reduce(total, group=stages)
        num_layers = float(total[2])
        if not num_layers:
            return {}
        return {
            "moe/busiest_expert_max": float(largest[0]),
            "moe/busiest_expert_mean": float(total[0]) / num_layers,
            "moe/idle_experts": float(total[1]) / num_layers,
            "moe/router_bias_max": float(largest[1]),
        }
