"""Gated delta nets in plain torch: the convolution, the decay and the recurrence of Qwen3.5's layers.

SGLang 0.5.23 imports these names on a CPU (`srt/layers/attention/linear/gdn_backend.py` and `kernels/gdn_triton.py`).
The rule is applied token by token, so neither the batch nor the chunks of a prompt change a bit of a request's result.
Drafts are not verified: the arguments for that are missing, and a call with them raises TypeError.

States live in SGLang's pool, one slot per request: [slots, channels, width - 1] of the convolution, in
SGLANG_MAMBA_CONV_DTYPE, and [slots, value heads, value width, key width] of the rule. A negative slot is padding.
"""

import torch
import torch.nn.functional as F

# As in the published kernels and in transformers: inside the root.
L2_EPS = 1e-6


def causal_conv1d_fn_cpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    conv_states: torch.Tensor,
    has_initial_state: torch.Tensor,
    cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens_cpu: object = None,
) -> torch.Tensor:
    """Convolve packed requests, and keep the last inputs of each.

    Args:
        x: [channels, tokens], the requests one after the other.
        weight: [channels, width].
        bias: [channels], or none.
        activation: "silu", "swish" or none.
        conv_states: [slots, channels, width - 1], changed in place.
        has_initial_state: [requests], whether the slot holds what came before.
        cache_indices: [requests] slots.
        query_start_loc: [requests + 1] first tokens.
        seq_lens_cpu: unused, part of SGLang's signature.

    Returns:
        [channels, tokens].
    """
    made = torch.empty_like(x)
    bounds = query_start_loc.tolist()
    for request, slot in enumerate(cache_indices.tolist()):
        begin, end = bounds[request], bounds[request + 1]
        if slot < 0 or begin == end:
            continue
        before = conv_states[slot] if has_initial_state[request] else torch.zeros_like(conv_states[slot])
        made[:, begin:end] = _convolved(x[:, begin:end], before, weight, bias, activation, conv_states[slot])
    return made


def causal_conv1d_update_cpu(
    x: torch.Tensor,
    conv_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    conv_state_indices: torch.Tensor,
) -> torch.Tensor:
    """Convolve one more token of each request: [requests, channels], arguments as above."""
    made = torch.empty_like(x)
    for request, slot in enumerate(conv_state_indices.tolist()):
        if slot >= 0:
            kept = conv_states[slot]
            made[request] = _convolved(x[request, :, None], kept.clone(), weight, bias, activation, kept)[:, 0]
    return made


def _convolved(
    x: torch.Tensor,
    before: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    kept: torch.Tensor,
) -> torch.Tensor:
    """Return one request's [channels, tokens] in FP32, and write its last inputs to `kept`."""
    inputs = torch.cat([before.to(x.dtype), x], dim=1)
    width = weight.shape[1]
    windows = inputs.float().unfold(1, width, 1)
    total = (windows * weight.float()[:, None]).sum(-1)
    if bias is not None:
        total += bias.float()[:, None]
    kept.copy_(inputs[:, inputs.shape[1] - (width - 1) :])
    return F.silu(total) if activation in ("silu", "swish") else total


def chunk_gated_delta_rule_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    head_first: bool,
    use_qk_l2norm_in_kernel: bool,
) -> tuple[torch.Tensor, None, None]:
    """Apply the gated delta rule to packed requests.

    Args:
        q, k: [1, tokens, key heads, key width].
        v: [1, tokens, value heads, value width].
        g: [1, tokens, value heads] FP32 logarithms of the decay.
        beta: [1, tokens, value heads] FP32.
        initial_state: [slots, value heads, value width, key width], changed in place.
        initial_state_indices: [requests] slots.
        cu_seqlens: [requests + 1] first tokens.
        head_first: False.
        use_qk_l2norm_in_kernel: True.

    Returns:
        [1, tokens, value heads, value width], and neither states that SGLang's prefix cache tracks.

    Source:
        Yang et al., Gated Delta Networks (arXiv 2412.06464), equation 10.
    """
    assert not head_first
    assert use_qk_l2norm_in_kernel
    made = torch.empty_like(v)
    bounds = cu_seqlens.tolist()
    for request, slot in enumerate(initial_state_indices.tolist()):
        span = slice(bounds[request], bounds[request + 1])
        if slot >= 0:
            steps = (tensor[0, span] for tensor in (q, k, v, g, beta))
            made[0, span] = _recurrence(*steps, initial_state[slot]).to(v.dtype)
    return made, None, None


def _recurrence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, kept: torch.Tensor
) -> torch.Tensor:
    """Return one request's [tokens, value heads, value width] in FP32, and move its state on."""
    repeats = v.shape[1] // k.shape[1]
    q, k = (_unit(part.float()).repeat_interleave(repeats, 1) for part in (q, k))
    q *= q.shape[-1] ** -0.5
    state, decay, made = kept.float(), g.exp(), torch.empty(v.shape)
    for token in range(len(v)):
        state = state * decay[token, :, None, None]
        known = (state * k[token, :, None]).sum(-1)
        change = (v[token].float() - known) * beta[token, :, None]
        state = state + change[..., None] * k[token, :, None]
        made[token] = (state * q[token, :, None]).sum(-1)
    kept.copy_(state)
    return made


def _unit(part: torch.Tensor) -> torch.Tensor:
    return part * torch.rsqrt(part.square().sum(-1, keepdim=True) + L2_EPS)


def fused_gdn_gating_cpu(
    A_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logarithms of the decay, and beta, both [1, tokens, heads] FP32, of a and b, [tokens, heads]."""
    decay = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None]


def fused_sigmoid_gating_delta_rule_update_cpu(
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    use_qk_l2norm_in_kernel: bool,
    softplus_beta: float,
    softplus_threshold: float,
) -> torch.Tensor:
    """Apply the rule to one more token of each request; shapes as above, with torch's own softplus constants."""
    assert (softplus_beta, softplus_threshold) == (1.0, 20.0)
    g, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    states = initial_state_source, initial_state_indices
    return chunk_gated_delta_rule_cpu(q, k, v, g, beta, *states, cu_seqlens, False, use_qk_l2norm_in_kernel)[0]


_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define("fused_gdn_gating_cpu(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)")
_library.impl("fused_gdn_gating_cpu", fused_gdn_gating_cpu, "CPU")
_library.define(
    "fused_sigmoid_gating_delta_rule_update_cpu(Tensor A_log, Tensor dt_bias, Tensor q, Tensor k, Tensor v, Tensor a, "
    "Tensor b, Tensor(a!) initial_state_source, Tensor initial_state_indices, Tensor cu_seqlens, "
    "bool use_qk_l2norm_in_kernel, float softplus_beta, float softplus_threshold) -> Tensor"
)
_library.impl("fused_sigmoid_gating_delta_rule_update_cpu", fused_sigmoid_gating_delta_rule_update_cpu, "CPU")
