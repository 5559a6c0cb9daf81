"""Names of the dense MLP and of the experts.

Megatron joins the gate and up projections of an MLP as upper and lower rows of `linear_fc1`, and stacks the experts
of a layer along an additional first dimension:

    mlp.experts.experts.linear_fc1.weight  [E, 2F, H]    expert e: gate_proj at [e, 0:F, :], up_proj at [e, F:2F, :]
    mlp.experts.experts.linear_fc2.weight  [E, H, F]     expert e: down_proj at [e, :, :]

(Megatron names the stack `experts` inside the module `experts`.)

Letters: H hidden_size, F the width of an MLP, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator

from posttrain.checkpoint.param_names.placement import Placement, expert_rows, rows, whole
from posttrain.config.families import family_of
from posttrain.config.schema import Architecture


def mlp(width: int, inner: int, hf: str, key: str) -> Iterator[Placement]:
    """Yield the placements of an MLP of width `inner`."""
    fc1 = f"{key}linear_fc1.weight", (2 * inner, width)
    yield rows(f"{hf}gate_proj.weight", *fc1, (0,), inner)
    yield rows(f"{hf}up_proj.weight", *fc1, (inner,), inner)
    yield whole(f"{hf}down_proj.weight", f"{key}linear_fc2.weight", (width, inner))


def experts(arch: Architecture, hf: str, key: str) -> Iterator[Placement]:
    """Yield the placements of router, routed experts and shared experts."""
    num_experts, width, inner = arch.n_routed_experts, arch.hidden_size, arch.moe_intermediate_size
    yield whole(f"{hf}gate.weight", f"{key}router.weight", (num_experts, width))
    if family_of(arch).router_bias:
        yield whole(f"{hf}gate.e_score_correction_bias", f"{key}router.expert_bias", (num_experts,), "F32")
    fc1 = f"{key}experts.experts.linear_fc1.weight", (num_experts, 2 * inner, width)
    fc2 = f"{key}experts.experts.linear_fc2.weight", (num_experts, width, inner)
    for e in range(num_experts):
        yield expert_rows(f"{hf}experts.{e}.gate_proj.weight", *fc1, e, 0, inner)
        yield expert_rows(f"{hf}experts.{e}.up_proj.weight", *fc1, e, inner, inner)
        yield expert_rows(f"{hf}experts.{e}.down_proj.weight", *fc2, e, 0, width)
    if inner_shared := arch.shared_expert_intermediate_size:
        yield from mlp(width, inner_shared, f"{hf}shared_expert.", f"{key}shared_experts.")
        yield whole(f"{hf}shared_expert_gate.weight", f"{key}shared_experts.gate_weight", (1, width))
    if arch.n_shared_experts:
        yield from mlp(width, arch.n_shared_experts * inner, f"{hf}shared_experts.", f"{key}shared_experts.")
