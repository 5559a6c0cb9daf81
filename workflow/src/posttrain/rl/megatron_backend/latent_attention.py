"""Megatron's MLA with down-projections replicated over tensor-parallel ranks, with or without a query latent."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig

from posttrain.rl.megatron_backend.glm5.linear import ReplicatedLinear

_RESOLVED = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")


class LatentAttention(MLASelfAttention):
    """MLA built from the layer's own submodules."""

    def __init__(self, config: MLATransformerConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = ReplicatedLinear(config, config.hidden_size, config.q_lora_rank)
        kv_width = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = ReplicatedLinear(config, config.hidden_size, kv_width)

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        """Return the submodules unchanged; Megatron would require a query norm without a query latent."""
        return {name: getattr(submodules, name) for name in _RESOLVED}
