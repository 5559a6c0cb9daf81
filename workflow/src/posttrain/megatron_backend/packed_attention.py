"""Dense causal attention inside each sequence of a packed row, where Transformer Engine's is not there.

Megatron's own local attention refuses packed rows, and keys that are wider than values (MLA).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class PackedAttention(MegatronModule):
    """torch's scaled dot-product attention, one sequence at a time: no row is padded.

    Args:
        config: Megatron's configuration.
        softmax_scale: Factor on the dot products; None: one over the root of the heads' width.
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
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: [T, N, D], N heads of this rank.
            key: [T, G, D], G heads that divide N.
            value: [T, G, D_v].
            attention_mask: Has to be None: causality inside each sequence is implied.
            packed_seq_params: Where sequences begin and end.

        Returns:
            [T, N * D_v].
        """
        assert attention_mask is None, "packed attention makes its own mask"
        assert packed_seq_params is not None, "sequences must be packed"
        lengths = torch.diff(packed_seq_params.cu_seqlens_q).tolist()
        rows = (row.transpose(0, 1).split(lengths, dim=1) for row in (query, key, value))
        outputs = [
            F.scaled_dot_product_attention(
                *(part.unsqueeze(0) for part in parts),
                is_causal=True,
                scale=self.softmax_scale,
                enable_gqa=query.shape[1] != key.shape[1],
            ).squeeze(0)
            for parts in zip(*rows, strict=True)
        ]
        return torch.cat(outputs, dim=1).transpose(0, 1).flatten(1)
