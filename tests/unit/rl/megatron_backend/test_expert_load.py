"""What balances experts, against the published formulas written a second time."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from tests.support.megatron_single import test_config
from tests.support.small_updates import LR, apply, updates_of
from tests.support.tiny_checkpoint import TRAINED

NUM_EXPERTS, TOP_K = TRAINED.n_routed_experts, TRAINED.num_experts_per_tok


def balanced_config(**optimizer):
    config = test_config(TRAINED)
    return dataclasses.replace(
        config,
        optimizer=dataclasses.replace(config.optimizer, **optimizer),
        trainer=dataclasses.replace(config.trainer, max_tokens_per_gpu=96),
        training=dataclasses.replace(config.training, global_batch_size=12),
        algorithm=dataclasses.replace(config.algorithm, non_finite="skip_step"),
    )


def routers_of(policy):
    from megatron.core.transformer.moe.router import TopKRouter

    return [module for module in policy.chunks[0].modules() if isinstance(module, TopKRouter)]


def chosen(router, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores and choice as DeepSeek-V3 has them: the bias decides who is chosen, and nothing else."""
    scores = torch.sigmoid(hidden.flatten(0, 1) @ router.weight.T)
    places = (scores + router.expert_bias).topk(TOP_K).indices
    return scores, torch.zeros_like(scores).scatter(1, places, 1.0)


def inputs_of(policy, router, update) -> list[torch.Tensor]:
    """Return what the router reads in the micro-batches of an update, in a pass without gradients."""
    from posttrain.rl.megatron_backend.train_step import compute_logprobs

    seen: list[torch.Tensor] = []
    handle = router.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().clone()))
    compute_logprobs(policy, update.batches)
    handle.remove()
    return seen


def gradient_of(policy, update) -> torch.Tensor:
    apply(policy, update, lr=0.0)
    return routers_of(policy)[-1].weight.main_grad.clone()


def test_the_auxiliary_loss_is_the_mean_over_tokens_of_each_micro_batch(make_policy) -> None:
    coefficient = 0.3
    unclipped = {"clip_grad": 1e9}
    without = make_policy(balanced_config(**unclipped))
    with_it = make_policy(balanced_config(**unclipped, moe_aux_loss_coeff=coefficient))
    update = updates_of(without, 0)[0]
    router = routers_of(without)[-1]
    hidden = inputs_of(without, router, update)
    assert len(hidden) > 2
    weight, total, num_tokens = router.weight.detach().clone().requires_grad_(), 0.0, 0
    for rows in hidden:
        scores = torch.sigmoid(rows.flatten(0, 1) @ weight.T)
        share = (scores / scores.sum(1, keepdim=True)).mean(0)
        # DeepSeek-V3, arXiv 2412.19437, equation 18: who scores highest, the bias apart.
        highest = torch.zeros_like(scores).scatter(1, scores.topk(TOP_K).indices, 1.0)
        frequency = highest.mean(0).detach() * NUM_EXPERTS / TOP_K
        total += len(scores) * (share * frequency).sum()
        num_tokens += len(scores)
    (coefficient * total / num_tokens).backward()
    added = gradient_of(with_it, update) - gradient_of(without, update)
    assert added.norm() > 1e-4
    assert (added - weight.grad).abs().max() <= 1e-5 * weight.grad.abs().max() + 1e-8


def test_the_bias_moves_against_the_load_when_weights_move(make_policy) -> None:
    rate = 0.01
    policy = make_policy(balanced_config(router_bias_update_rate=rate))
    update = updates_of(policy, 0)[0]
    router = routers_of(policy)[-1]
    tokens = sum(chosen(router, rows)[1].sum(0) for rows in inputs_of(policy, router, update))
    before = router.expert_bias.clone()
    weights = update.weights.clone()
    spoilt = dataclasses.replace(update, weights=weights * math.inf)
    assert apply(policy, spoilt, LR).outcome == "non_finite"
    assert torch.equal(router.expert_bias, before)
    policy.expert_load.take()
    assert apply(policy, update, LR).outcome == "applied"
    assert tokens.max() > tokens.mean() > tokens.min()
    assert torch.equal(router.expert_bias, before + rate * (tokens.mean() - tokens).sign())
    load = policy.expert_load.take()
    assert load["moe/busiest_expert_max"] >= float(tokens.max() / tokens.mean())
    assert load["moe/router_bias_max"] == pytest.approx(
        max(float(r.expert_bias.abs().max()) for r in routers_of(policy))
    )


def test_load_by_hand(make_policy) -> None:
    """Every token goes to the same experts in each layer: they see E/k times the mean, and the others nothing."""
    policy = make_policy(balanced_config())
    for router in routers_of(policy):
        router.expert_bias.copy_(torch.arange(NUM_EXPERTS) * 100.0)
    apply(policy, updates_of(policy, 0)[0], LR)
    assert policy.expert_load.take() == {
        "moe/busiest_expert_max": NUM_EXPERTS / TOP_K,
        "moe/busiest_expert_mean": NUM_EXPERTS / TOP_K,
        "moe/idle_experts": 1 - TOP_K / NUM_EXPERTS,
        "moe/router_bias_max": 100.0 * (NUM_EXPERTS - 1),
    }


def test_norms_and_biases_decay_by_choice(make_policy) -> None:
    """Without a signal but for the decay: Adam's step of a zero gradient is the decay alone."""
    from posttrain.rl.megatron_backend.train_step import _apply

    for choice, factor in ((False, 1.0), (True, 1 - 0.1 * 0.5)):
        policy = make_policy(balanced_config(decay_norms_and_biases=choice, weight_decay=0.5))
        policy.wrapped[0].zero_grad_buffer()
        named = dict(policy.chunks[0].named_parameters())
        norm, matrix = named["decoder.final_layernorm.weight"], named["output_layer.weight"]
        before = norm.detach().clone(), matrix.detach().clone()
        _apply(policy, lr=0.1)
        assert torch.allclose(norm, before[0] * factor)
        assert torch.allclose(matrix, before[1] * (1 - 0.1 * 0.5))
