"""Operators that SGLang 0.5.23 reads on a CPU while it imports `srt/models/qwen3_5.py`, in plain torch."""

import torch


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    qkvz: torch.Tensor, ba: torch.Tensor, num_k_heads: int, num_v_heads: int, key_width: int, value_width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split a delta net's projections.

    Args:
        qkvz: [tokens, queries + keys + values + gate].
        ba: [tokens, 2 * value heads].
        num_k_heads, num_v_heads: of this rank.
        key_width, value_width: of a head.

    Returns:
        [tokens, queries + keys + values], the gate [tokens, value heads, value width], b and a [tokens, value heads].
    """
    values = num_v_heads * value_width
    qkv, z = qkvz.split([2 * num_k_heads * key_width + values, values], dim=-1)
    b, a = ba.split([num_v_heads, num_v_heads], dim=-1)
    z = z.reshape(len(z), num_v_heads, value_width)
    return qkv.clone(), z.clone(), b.clone(), a.clone()


def fused_qk_gemma_rmsnorm_cpu(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise queries and keys by head: [tokens, heads * head_dim] -> [tokens * heads, head_dim]."""
    return _norm(q.reshape(-1, head_dim), q_weight, eps), _norm(k.reshape(-1, head_dim), k_weight, eps)


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_gate: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    head_dim: int,
    num_heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do the same where each head's query is followed by its gate: [tokens, heads * 2 * head_dim]."""
    q, gate = q_gate.reshape(-1, num_heads, 2, head_dim).unbind(2)
    return *fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, head_dim), gate.clone()


def fused_sigmoid_mul_cpu(x: torch.Tensor, gate: torch.Tensor) -> None:
    """Multiply attention's output by its gate, in place."""
    x.copy_(x.float() * gate.reshape(x.shape).float().sigmoid())


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (scaled * (1 + weight.float())).to(x.dtype)


_OPERATORS = {
    "(Tensor qkvz, Tensor ba, int a, int b, int c, int d) -> (Tensor, Tensor, Tensor, Tensor)": (
        fused_qkvzba_split_reshape_cat_contiguous_cpu
    ),
    "(Tensor q, Tensor k, Tensor a, Tensor b, float eps, int head_dim) -> (Tensor, Tensor)": fused_qk_gemma_rmsnorm_cpu,
    "(Tensor q, Tensor k, Tensor a, Tensor b, float eps, int head_dim, int heads) -> (Tensor, Tensor, Tensor)": (
        fused_qk_gemma_rmsnorm_with_gate_cpu
    ),
    "(Tensor(a!) x, Tensor gate) -> ()": fused_sigmoid_mul_cpu,
}
_library = torch.library.Library("sgl_kernel", "FRAGMENT")
for _schema, _operator in _OPERATORS.items():
    _library.define(_operator.__name__ + _schema)
    _library.impl(_operator.__name__, _operator, "CPU")
