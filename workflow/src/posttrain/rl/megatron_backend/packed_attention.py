"""Dense causal attention inside each sequence of a packed row, for use without Transformer Engine.

Megatron's own local attention supports neither packed rows nor keys wider than values (MLA).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from posttrain.rl.megatron_backend.glm5.sparse_attention import attend
from posttrain.rl.megatron_backend.packed import PackedSequences


class PackedAttention(MegatronModule):
    """torch's fused attention over blocks of sequences of similar length.

    Args:
        config: Megatron's configuration.
        softmax_scale: Factor on the dot products; None: 1 / sqrt(D).
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any):
        super().__init__(config=config)
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: [T, N, D], N heads of this rank; only its own tokens under context parallelism.
            key: [T, G, D], G heads that divide N.
            value: [T, G, D_v].
            attention_mask: Must be None: causality inside each sequence is implied.
            packed_seq_params: How the row is packed.

        Returns:
            [T, N * D_v].
        """
        assert attention_mask is None, "packed attention makes its own mask"
        assert isinstance(packed_seq_params, PackedSequences), "sequences must be packed"
        sequences = packed_seq_params
        blocks = zip(sequences.queries.split(query), *map(sequences.gather_keys, (key, value)), strict=True)
        return sequences.queries.join([attend(q, k, v, None, self.softmax_scale) for q, k, v in blocks]).flatten(1)
