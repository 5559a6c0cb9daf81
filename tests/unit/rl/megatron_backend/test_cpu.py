"""What a CPU's trainer does instead of Megatron's kernels."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tests.support.small_updates import LR, apply, trained_config, updates_of
from torch.optim.adamw import adamw

from posttrain.rl.megatron_backend import cpu, cpu_functions
from posttrain.rl.megatron_backend.cpu import FusedAdam

SETTINGS = {"lr": 0.01, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.1}


def test_adam_moves_weights_as_the_paper_does_and_goes_on_from_an_older_state():
    """Version 0.2 saved the same state, with moments that torch's loop over parameters had computed."""
    generator = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(7, 33, generator=generator)
    ours = torch.nn.Parameter(start.clone())
    optimizer = FusedAdam([ours], **SETTINGS)
    theirs, moments = start.double(), torch.zeros(2, 33, dtype=torch.float64)
    older, first, second = start.clone(), torch.zeros(33), torch.zeros(33)
    for step, gradient in enumerate(gradients):
        if step == 3:
            state = {"exp_avg": first.clone(), "exp_avg_sq": second.clone()}
            ours.data.copy_(older)
            group = optimizer.state_dict()["param_groups"][0]
            optimizer.load_state_dict({"state": {0: state}, "param_groups": [group | {"step": 3}]})
        ours.grad = gradient
        optimizer.step()
        _by_the_paper(theirs, moments, gradient.double(), step + 1)
        options = {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False, "maximize": False}
        count = [torch.tensor(float(step))]
        adamw([older], [gradient], [first], [second], [], count, beta1=0.9, beta2=0.98, foreach=False, **options)
        assert (ours.detach() - theirs).abs().max() <= 1e-6
    assert set(optimizer.state[ours]) == {"exp_avg", "exp_avg_sq"}
    assert optimizer.param_groups[0]["step"] == 6


def _by_the_paper(weight: torch.Tensor, moments: torch.Tensor, gradient: torch.Tensor, step: int) -> None:
    """Move `weight` by algorithm 2 of Loshchilov and Hutter, in FP64."""
    rate, decay, (beta1, beta2) = SETTINGS["lr"], SETTINGS["weight_decay"], SETTINGS["betas"]
    moments[0].mul_(beta1).add_((1 - beta1) * gradient)
    moments[1].mul_(beta2).add_((1 - beta2) * gradient**2)
    first, second = moments[0] / (1 - beta1**step), moments[1] / (1 - beta2**step)
    weight -= rate * (first / (second.sqrt() + SETTINGS["eps"]) + decay * weight)


@pytest.fixture(scope="module")
def updated(make_policy):
    """Return a policy, and what makes its update of some micro-batches."""
    policy = make_policy(trained_config())
    update = updates_of(policy, 0)[0]

    assert len(update.batches) > 2
    return policy, partial(apply, policy, update, LR)


def test_linear_layers_add_their_gradients_to_megatrons_buffers(updated, monkeypatch):
    policy, run = updated
    linears = [part for part in policy.chunks[0].decoder.modules() if hasattr(part, "gradient_accumulation_fusion")]
    assert len(linears) > 20
    seen = []
    add = cpu_functions.add_product
    monkeypatch.setattr(cpu_functions, "add_product", lambda *args: (seen.append(args[0].data_ptr()), add(*args)))
    run()
    assert {part.weight.main_grad.data_ptr() for part in linears if part.weight.requires_grad} == set(seen)


def test_gradients_added_by_products_are_those_of_autograd(make_policy):
    """The first update of two policies, one of which lets autograd make each gradient and adds it then."""
    grads = []
    for is_fused in (True, False):
        policy = make_policy(trained_config())
        for part in policy.chunks[0].modules():
            if hasattr(part, "gradient_accumulation_fusion"):
                part.gradient_accumulation_fusion = is_fused
        apply(policy, updates_of(policy, 0)[0], 0.0)
        grads.append(torch.cat([buffer.grad_data for buffer in policy.buffers]))
    assert (grads[0] - grads[1]).abs().max() <= 1e-6 * grads[1].abs().max()
    assert grads[1].abs().max() > 0


def test_a_rank_without_peers_copies_no_buffer(updated):
    policy, run = updated
    with torch.profiler.profile(record_shapes=True) as profiled:
        run()
    copied = {event.input_shapes[0][0] for event in profiled.events() if _copies_a_vector(event)}
    assert not copied & {buffer.grad_data.numel() for buffer in policy.buffers}


def _copies_a_vector(event: Any) -> bool:
    return event.name == "aten::copy_" and len(event.input_shapes[0]) == 1


def test_a_collective_with_peers_runs():
    calls = []
    exchange = cpu._if_there_are_peers(lambda *args, **options: calls.append((args, options)))
    whole = torch.zeros(4)
    exchange(whole, whole[:2], group=_Group(2), async_op=True)
    assert len(calls) == 1
    exchange(whole, whole, group=_Group(1), async_op=True).wait()
    assert len(calls) == 1
    with pytest.raises(AssertionError, match="the buffer itself"):
        exchange(whole, torch.zeros(4), group=_Group(1))


class _Group:
    def __init__(self, size: int):
        self._size = size

    def size(self) -> int:
        return self._size
