"""The router for models that route each token to one expert.

A token's expert weights must sum to `routed_scaling_factor`. Megatron's router normalises them only for two or more
experts; with one, the weight would remain the raw score, which is a different model.

Source: transformers, `GlmMoeDsaTopkRouter` (norm_topk_prob).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter


class OneExpertRouter(TopKRouter):
    """Megatron's router for top-k 1, with normalised weights."""

    def routing(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights [T, E] fp32 that sum to the scaling factor, and the chosen experts [T, E] bool."""
        scores, chosen = super().routing(*args, **kwargs)
        # A score may underflow to 0; the quotient is then 0.
        shares = scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)
        return shares * (self.config.moe_router_topk_scaling_factor or 1.0), chosen
