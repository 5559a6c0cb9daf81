"""Gated delta net: a linear attention in the place of Megatron's self-attention, on packed sequences.

Megatron 0.19.2 has such a layer, which needs fla to be built, exponentiates a BF16 `A_log` without a cast, and orders
its projection by kind. Here the projection is ordered by key head, as `linear_qkv` is by group, so that a plain split
of rows gives each tensor- or context-parallel rank whole heads. With R value heads of each key head, the rows of a key
head are

    in_proj.weight    D_k query, D_k key, R D_v value, R D_v gate, R beta, R decay
    conv1d.weight     D_k query, D_k key, R D_v value

Letters: T tokens of the row; G key heads and N value heads of this rank; D_k and D_v widths of a head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)

from posttrain.rl.megatron_backend.gated_delta_net.convolution import CausalConvolution
from posttrain.rl.megatron_backend.gated_delta_net.delta_rule import gated_delta_rule, load_kernel
from posttrain.rl.megatron_backend.gated_delta_net.gated_norm import GatedRMSNorm
from posttrain.rl.megatron_backend.gated_delta_net.head_exchange import to_heads, to_tokens
from posttrain.rl.megatron_backend.packed import PackedSequences
from posttrain.rl.megatron_backend.packed_rotary import own_positions


class GatedDeltaNet(MegatronModule):
    """Projection, convolution, delta rule, gated norm, projection.

    Args:
        config: Megatron's configuration.
        column_parallel_linear: Class of the input projection.
        row_parallel_linear: Class of the output projection.
        layer_number: From 1.
        pg_collection: Megatron's process groups.

    Raises:
        RuntimeError: The layer is for a GPU, and fla-core is missing.
    """

    def __init__(
        self,
        config: TransformerConfig,
        column_parallel_linear: type,
        row_parallel_linear: type,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ):
        super().__init__(config)
        self.layer_number, self.tp_group = layer_number, pg_collection.tp
        self.repeats = config.linear_num_value_heads // config.linear_num_key_heads
        key, value = config.linear_key_head_dim, self.repeats * config.linear_value_head_dim
        self.head_sizes = 2 * key + value, value, self.repeats, self.repeats
        heads = config.linear_num_key_heads
        num_key_heads, num_value_heads = (n // self.tp_group.size() for n in (heads, heads * self.repeats))
        common = {"config": config, "bias": False, "is_expert": False, "tp_group": self.tp_group}
        self.in_proj = build_module(
            column_parallel_linear,
            config.hidden_size,
            heads * sum(self.head_sizes),
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="qkv",
            **common,
        )
        self.conv1d = CausalConvolution(config, num_key_heads * self.head_sizes[0])
        self.A_log, self.dt_bias = (
            torch.nn.Parameter(torch.empty(num_value_heads, dtype=config.params_dtype)) for _ in range(2)
        )
        # The checkpoints have it in FP32.
        self.A_log.stays_fp32 = True  # type: ignore[attr-defined]
        for parameter in (self.conv1d.weight, self.A_log, self.dt_bias):
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
        self.out_norm = GatedRMSNorm(config, config.linear_value_head_dim)
        self.out_proj = build_module(
            row_parallel_linear,
            heads * value,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="proj",
            **common,
        )
        if not config.use_cpu_initialization:
            load_kernel()  # a missing package ends the run here, not after the first rollout

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Go through the sequences of a packed row.

        Args:
            hidden_states: [T or T / TP, 1, H]; only this rank's tokens under context parallelism.
            attention_mask: Must be None: causality inside each sequence is implied.
            packed_seq_params: How the row is packed.

        Returns:
            [T or T / TP, 1, H], and the bias (None).
        """
        assert attention_mask is None, "a delta net sees the past only"
        assert isinstance(packed_seq_params, PackedSequences), "sequences must be packed"
        projected, _ = self.in_proj(hidden_states)
        heads = to_heads(projected.squeeze(1), packed_seq_params)
        heads = heads.unflatten(1, (-1, sum(self.head_sizes)))
        output = to_tokens(self._mix(heads, packed_seq_params.cu_seqlens_q), packed_seq_params)
        return self.out_proj(output.unsqueeze(1))

    def _mix(self, heads: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        """Return [T, N D_v] of a row's key heads [T, G, rows of a key head]."""
        key_width, value_width = self.config.linear_key_head_dim, self.config.linear_value_head_dim
        mixed, gate, beta, decay = heads.split(self.head_sizes, dim=-1)
        rank, num_key_heads = parallel_state.get_context_parallel_rank(), heads.shape[1]
        first = rank * num_key_heads * self.head_sizes[0]
        positions = own_positions(cu_seqlens, len(heads), 0, 1)
        mixed = self.conv1d(mixed, positions, slice(first, first + num_key_heads * self.head_sizes[0]))
        query, key, value = mixed.split((key_width, key_width, self.repeats * value_width), dim=-1)
        value = value.reshape(len(heads), -1, value_width)
        own = slice(rank * value.shape[1], (rank + 1) * value.shape[1])
        # BF16 exponentials would be off by a hundredth.
        speed = self.A_log[own].float().exp()
        decay = -speed * F.softplus(decay.flatten(1).float() + self.dt_bias[own])
        output = gated_delta_rule(query, key, value, decay, beta.flatten(1).sigmoid(), cu_seqlens)
        return self.out_norm(output, gate.reshape(output.shape)).flatten(1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Return the shards of a checkpoint: all but the norm are split by rows, `out_proj` by columns."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        groups = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        own: dict[str, Any] = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        own["conv1d.weight"] = self.conv1d.weight
        rows = dict.fromkeys(own, 0)
        state = make_sharded_tensors_for_checkpoint(own, prefix, rows, sharded_offsets, **groups)
        for name in ("in_proj", "out_norm", "out_proj"):
            part = getattr(self, name)
            state |= sharded_state_dict_default(part, f"{prefix}{name}.", sharded_offsets, metadata, self.tp_group)
        return state
