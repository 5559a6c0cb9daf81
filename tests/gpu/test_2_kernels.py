"""Each kernel against its reference on a CPU in double precision, which other tests hold against papers and libraries.

2**-8 is what rounding a number to BF16 changes at most. In BF16 inputs, logits, results and gradients are rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.chosen_keys import reference_kernel
from tests.support.gpus import DEVICES, gpu

from posttrain.rl.algorithm.logprobs import chunked_logprobs
from posttrain.rl.megatron_backend.glm5.sparse_attention import attend, index_scores, select_topk

Tensors = dict[str, torch.Tensor]
T, HIDDEN, WORDS = 96, 64, 500
# GLM-5's latent, rotary part and scale; a multiple of keys that TileLang's kernel takes.
LATENT, ROTARY, KEPT, SCALE = 512, 64, 128, 256**-0.5


def seeded(**shapes: tuple[int, ...]) -> Tensors:
    source = torch.Generator().manual_seed(7)
    return {name: torch.randn(shape, generator=source, dtype=torch.float64) for name, shape in shapes.items()}


def logprobs(given: Tensors) -> torch.Tensor:
    targets = torch.arange(T, device=given["hidden"].device) * 5 % WORDS
    return chunked_logprobs(given["hidden"], given["weight"], targets, 0.8, 32)[0]


def attention(given: Tensors) -> torch.Tensor:
    device = given["query"].device
    keep = torch.ones(T, T, dtype=torch.bool, device=device).tril() & (torch.arange(T, device=device) % 3 != 1)
    keep |= torch.eye(T, dtype=torch.bool, device=device)
    return attend(given["query"], given["key"], given["value"], keep[None], 0.25)


def dense_attention(given: Tensors) -> torch.Tensor:
    return attend(given["query"][:, T // 2 :], given["key"], given["value"], None, 0.25)


def norm(given: Tensors) -> torch.Tensor:
    x = given["hidden"]
    return F.rms_norm(x if x.dtype == torch.float64 else x.float(), (HIDDEN,), eps=1e-5).to(x.dtype) * given["scale"]


CASES: dict[str, tuple[Callable[[Tensors], torch.Tensor], Tensors]] = {
    "log-probabilities": (logprobs, seeded(hidden=(T, HIDDEN), weight=(WORDS, HIDDEN))),
    "attention to chosen keys": (
        attention,
        seeded(query=(1, T, 4, 24), key=(1, T, 4, 24), value=(1, T, 4, 16)),
    ),
    "attention to all keys before": (
        dense_attention,
        seeded(query=(1, T, 4, 32), key=(1, T, 2, 32), value=(1, T, 2, 32)),
    ),
    "norm": (norm, seeded(hidden=(T, HIDDEN), scale=(HIDDEN,))),
}


def value_and_gradients(function: Callable[[Tensors], torch.Tensor], given: Tensors) -> Tensors:
    given = {name: tensor.clone().requires_grad_() for name, tensor in given.items()}
    value = function(given)
    value.sum().backward()
    return {"value": value, **{name: tensor.grad for name, tensor in given.items()}}


def rounded(given: Tensors, dtype: torch.dtype, device: str = "cpu") -> Tensors:
    return {name: tensor.detach().to(dtype).to(device) for name, tensor in given.items()}


def far(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.detach().double().cpu() - other.detach().double()).norm() / other.detach().double().norm())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 4 * 2**-8)])
@pytest.mark.parametrize("name", CASES)
def test_a_kernel_gives_what_its_reference_gives(name: str, dtype: torch.dtype, bound: float, device: str) -> None:
    """Relative to the whole tensor, values and gradients."""
    function, inputs = CASES[name]
    given = rounded(inputs, dtype)
    reference = value_and_gradients(function, rounded(given, torch.float64))
    found = value_and_gradients(function, rounded(given, dtype, device))
    assert found["value"].device.type == device
    for part, expected in reference.items():
        assert far(found[part], expected) < bound, part


@pytest.mark.parametrize("device", DEVICES)
def test_scores_and_the_choice_of_keys(device: str) -> None:
    """Ties go to the lower position on every device; numbers are whole, so that all devices have the same."""
    source = torch.Generator().manual_seed(3)
    queries = torch.randint(-2, 3, (1, T, 4, 16), generator=source).float()
    keys = torch.randint(-2, 3, (1, T, 16), generator=source).float()
    weights = torch.ones(1, T, 4)
    chosen: list[Any] = []
    for place in ("cpu", device):
        scores = index_scores(queries.to(place), keys.to(place), weights.to(place))
        chosen += [
            (scores.cpu(), select_topk(scores, torch.ones(T, T, dtype=torch.bool, device=place).tril(), 8).cpu())
        ]
    (scores, keep), (other_scores, other_keep) = chosen
    assert torch.equal(scores, other_scores)
    assert torch.equal(keep, other_keep)
    assert len(scores.unique()) < scores.numel() / 10, "there are ties"


@pytest.mark.parametrize(
    ("device", "name", "dtype"), [("cpu", "masked", torch.float32), gpu("cuda", "tilelang", torch.bfloat16)]
)
@pytest.mark.parametrize("heads", [8, 16, 64])
def test_attention_to_chosen_keys_in_the_space_of_latents(
    heads: int, device: str, name: str, dtype: torch.dtype
) -> None:
    """Megatron's kernel, with queries that see fewer keys than are kept; on a CPU the reference itself."""
    from posttrain.rl.megatron_backend.sparse_kernels import load_kernel

    kernel: Any = load_kernel(SimpleNamespace(sparse_attention=name)) or reference_kernel  # type: ignore[arg-type]
    rows = 2 * KEPT
    given = seeded(query=(rows, heads, LATENT + ROTARY), key=(rows, LATENT + ROTARY))
    seen = torch.ones(rows, rows, dtype=torch.bool).tril()
    scores = torch.rand(rows, rows, generator=torch.Generator().manual_seed(5))
    keep = select_topk(scores, seen, KEPT)
    ordered = torch.where(keep, torch.arange(rows), rows).sort(-1).values[:, :KEPT]
    places = ordered.masked_fill(ordered == rows, -1).int()

    def attended(by: Any) -> Callable[[Tensors], torch.Tensor]:
        return lambda part: by(part["query"], part["key"], places.to(part["key"].device), SCALE, LATENT)

    inputs = rounded(given, torch.bfloat16)
    reference = value_and_gradients(attended(reference_kernel), rounded(inputs, torch.float64))
    found = value_and_gradients(attended(kernel), rounded(inputs, dtype, device))
    for part, expected in reference.items():
        assert far(found[part], expected) < 4 * 2**-8, part


@pytest.mark.parametrize(
    ("device", "dtype", "bound"), [("cpu", torch.float32, 1e-5), gpu("cuda", torch.bfloat16, 8 * 2**-8)]
)
def test_the_gated_delta_rule_of_a_packed_row(device: str, dtype: torch.dtype, bound: float) -> None:
    """fla-core's kernel, which keeps states and products of a chunk in BF16; on a CPU ours."""
    from posttrain.rl.megatron_backend.gated_delta_net.delta_rule import gated_delta_rule

    lengths = torch.tensor([0, 200, 203, 267, 400], dtype=torch.int32)
    given = seeded(query=(400, 2, 128), key=(400, 2, 128), value=(400, 4, 128), decay=(400, 4), rate=(400, 4))

    def rule(part: Tensors) -> torch.Tensor:
        decay = -F.softplus(part["decay"].to(torch.promote_types(part["decay"].dtype, torch.float32)))
        heads = part["query"], part["key"], part["value"]
        return gated_delta_rule(*heads, decay, part["rate"].sigmoid(), lengths.to(part["key"].device))

    inputs = rounded(given, torch.bfloat16)
    reference = value_and_gradients(rule, rounded(inputs, torch.float64))
    found = value_and_gradients(rule, rounded(inputs, dtype, device))
    for part, expected in reference.items():
        assert far(found[part], expected) < bound, part
