"""Time of the delta rule on a GPU."""

from __future__ import annotations

from posttrain.config.schema import Architecture, Hardware
from posttrain.plan.timing import attainable

# Tokens that are computed together (`rl/megatron_backend/gated_delta_net`, fla-core).
CHUNK = 64


def delta_rule_seconds(arch: Architecture, hardware: Hardware, tokens: float, is_backward: bool) -> float:
    """Return the seconds of one pass through one layer, without its matrices.

    Per token and value head a chunk of C tokens takes products of C (2 D_k + 2 D_v) to compute its tokens together, and
    3 D_k D_v with the state. They are as small as those of attention over short sequences, and as fast.

    Args:
        arch: The model.
        hardware: The machine.
        tokens: Tokens times the share of the heads that this GPU computes.
        is_backward: The backward pass.
    """
    keys, values = arch.linear_key_head_dim, arch.linear_value_head_dim
    products = CHUNK * 2 * (keys + values) + 3 * keys * values
    work = 2 * tokens * arch.linear_num_value_heads * products
    forward, backward = attainable.attention(hardware, "fused", 0)
    return attainable.ATTENTION_BACKWARD * work / backward if is_backward else work / forward
