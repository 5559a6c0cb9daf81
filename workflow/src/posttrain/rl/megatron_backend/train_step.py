"""Forward and backward passes of a step on Megatron's schedules: log-probabilities, and one optimizer update.

The `Objective` defines token losses; here they are weighted, summed and differentiated. Shapes: T tokens of a packed
micro-batch. Only ranks of the last pipeline stage have log-probabilities; on other ranks `compute_logprobs` returns an
empty list, and statistics are zero before the sum over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from posttrain.report.rank_progress import AFTER_PASSES, BACKWARD, FORWARD, report_mark
from posttrain.rl.algorithm.finite import are_finite
from posttrain.rl.algorithm.objective import Objective, TokenBatch
from posttrain.rl.algorithm.statistics import MEAN, STATISTICS
from posttrain.rl.batching.packed_batch import PackedBatch
from posttrain.rl.megatron_backend.model import Policy
from posttrain.rl.megatron_backend.packed import PackedSequences
from posttrain.rl.megatron_backend.ranks import largest_of_ranks

# Outcome of an update.
APPLIED, NON_FINITE, NO_SIGNAL = "applied", "non_finite", "no_signal"


@dataclass(frozen=True)
class TrainingMicroBatch:
    """A packed micro-batch: the inputs of the model and of the objective."""

    packed: PackedBatch
    tokens: TokenBatch


@dataclass(frozen=True)
class UpdateStatistics:
    """Statistics of one optimizer update, over all ranks.

    Args:
        loss: The objective that was minimised.
        grad_norm: Global gradient norm before clipping; 0 if the update was not applied.
        num_tokens: Response tokens trained on.
        named: Statistics by their names in `rl.algorithm.statistics`: the entropy, and the objective's own.
        outcome: "applied", or "non_finite" or "no_signal" (all advantages are zero) if the weights did not change.
    """

    loss: float
    grad_norm: float
    num_tokens: int
    named: Mapping[str, float]
    outcome: str


@torch.no_grad()
def compute_logprobs(policy: Policy, batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
    """Return the log-probability of each target under the current weights.

    The pass uses the same kernels as the training forward (training mode, with recomputation), so the first update on a
    rollout computes the same values bit for bit.

    Args:
        policy: The model.
        batches: Micro-batches of this data-parallel rank.

    Returns:
        [T] fp32 per micro-batch on ranks of the last pipeline stage; an empty list elsewhere.
    """
    return _run_schedule(policy, [(batch, None) for batch in batches])


def update(
    policy: Policy,
    objective: Objective,
    batches: Sequence[TrainingMicroBatch],
    lr: float,
    has_signal: bool = True,
    look: Callable[[list[torch.Tensor]], None] | None = None,
    is_last: bool = True,
) -> UpdateStatistics:
    """Minimise the objective on one global batch.

    Args:
        policy: Model and optimizer.
        objective: The training objective.
        batches: Micro-batches of this data-parallel rank; every rank has the same number.
        lr: Learning rate of this update.
        has_signal: If False, the weights do not change: otherwise decay and momentum would move them without a sample.
        look: For the first update on a rollout, whose own log-probabilities are the old ones. Called on every rank with
            the values that `compute_logprobs` would return, before the weights change; if it raises, they do not.
        is_last: No update follows at once, so the new weights are gathered on every rank when this returns. Otherwise
            the gather overlaps with the next update's forward pass.

    Raises:
        RuntimeError: Loss or gradients are not finite and `algorithm.non_finite` is "abort".
    """
    assert policy.optimizer is not None, "this policy cannot be trained"
    for chunk in policy.wrapped:
        chunk.zero_grad_buffer()
    policy.optimizer.zero_grad()
    _weigh_auxiliary_loss(policy, batches)
    biases = [bias.clone() for bias in policy.expert_load.biases]
    said = _run_schedule(policy, [(batch.packed, batch) for batch in batches], objective, is_first=look is not None)
    if look:
        look([logprobs for logprobs, _ in said])
    sums = _add_up([report for _, report in said], objective)
    num_bad = _count_non_finite_gradients(policy) + int(sums["non_finite"])
    if num_bad and policy.config.algorithm.non_finite == "abort":
        raise RuntimeError(
            f"{num_bad} non-finite values in log-probabilities or gradients; the weights are those before the step. "
            "Set algorithm.non_finite=skip_step to count such steps and go on"
        )
    outcome = NON_FINITE if num_bad else APPLIED if has_signal else NO_SIGNAL
    grad_norm = _apply(policy, lr) if outcome == APPLIED else 0.0
    if outcome != APPLIED:
        for bias, before in zip(policy.expert_load.biases, biases, strict=True):
            bias.copy_(before)  # Megatron updates it once it has the gradients
    if is_last:
        for chunk in policy.wrapped:
            chunk.start_param_sync(force_sync=True)
    return UpdateStatistics(
        loss=sums["loss"],
        grad_norm=grad_norm,
        num_tokens=int(sums["num_tokens"]),
        named={name: sums[name] / (sums["num_tokens"] if _is_mean(name) else 1) for name in _statistics(objective)},
        outcome=outcome,
    )


def _run_schedule(
    policy: Policy,
    batches: Sequence[tuple[PackedBatch, TrainingMicroBatch | None]],
    objective: Objective | None = None,
    is_first: bool = False,
) -> list[Any]:
    """Run Megatron's schedule over the micro-batches; returns the last stage's result for each.

    Args:
        policy: Model to run.
        batches: Inputs of each forward pass and its loss.
        objective: Defines the loss; None for forward passes only, which return log-probabilities.
        is_first: No update since the rollout: missing old log-probabilities equal the current ones.
    """
    for chunk in policy.wrapped:
        if not chunk.training:
            chunk.train()
    answers = get_forward_backward_func()(
        forward_step_func=partial(_forward_step, policy=policy, objective=objective, is_first=is_first),
        data_iterator=[iter(batches) for _ in policy.wrapped],
        model=policy.wrapped,
        num_microbatches=len(batches),
        seq_length=max(len(packed.tokens) for packed, _ in batches),
        micro_batch_size=1,
        forward_only=objective is None,
        collect_non_loss_data=objective is None,
    )
    report_mark(AFTER_PASSES)
    return answers


def _forward_step(
    batches: Iterator[tuple[PackedBatch, TrainingMicroBatch | None]],
    model: torch.nn.Module,
    policy: Policy,
    objective: Objective | None,
    is_first: bool,
) -> tuple[torch.Tensor, Callable]:
    packed, training = next(batches)
    device = policy.device
    report_mark(FORWARD)
    ranks = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
    turn = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    row = PackedSequences.from_boundaries(packed.cu_seqlens.to(device), *ranks, turn)
    if policy.replay:
        row.routes = policy.replay.routes_of(packed, row, model, device)
    tokens, targets, mask = (row.cut(t.to(device))[None] for t in (packed.tokens, packed.targets, packed.loss_mask))
    output = model(tokens, row.position_ids[None], None, labels=targets, loss_mask=mask, packed_seq_params=row)
    if training is None or objective is None:
        return output, _keep
    output.register_hook(_begin_backward)
    return output, partial(_loss, batch=training.tokens, objective=objective, is_first=is_first)


def _begin_backward(_: torch.Tensor) -> None:
    """Report that this stage's backward pass has begun."""
    report_mark(BACKWARD)


def _keep(answers: torch.Tensor, non_loss_data: bool) -> torch.Tensor:
    assert non_loss_data
    return answers[0]


def _loss(
    answers: torch.Tensor, batch: TokenBatch, objective: Objective, is_first: bool = False
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Return the weighted loss, a token count of zero (so Megatron does not normalise), log-probabilities and report.

    Args:
        answers: [2, T], the model's log-probability of each response token, and the entropy at its position.
        batch: The objective's inputs.
        objective: Defines the loss.
        is_first: See `_run_schedule`.
    """
    batch = batch.to(answers.device)
    logprobs, entropies = answers
    if is_first and objective.needs.old_logprobs and batch.old_logprobs is None:
        batch = replace(batch, old_logprobs=logprobs.detach())
    losses, statistics = objective.token_losses(logprobs, batch)
    loss = (losses * batch.weights).sum()
    report = _report(loss, logprobs, batch, {**statistics, "entropy": entropies}, objective)
    return loss, torch.zeros([], dtype=torch.int), (logprobs.detach(), report)


@torch.no_grad()
def _report(
    loss: torch.Tensor,
    logprobs: torch.Tensor,
    batch: TokenBatch,
    statistics: Mapping[str, torch.Tensor],
    objective: Objective,
) -> torch.Tensor:
    """Return the values of `_names(objective)` for this micro-batch, in FP64, without a device sync."""
    trained = batch.is_response
    values = [loss, trained.sum(), (trained & ~torch.isfinite(logprobs)).sum()]
    for name in _statistics(objective):
        of_tokens = statistics[name].double()
        if _is_mean(name):
            values.append(of_tokens.masked_fill(~trained, 0.0).sum())
        else:  # -inf for a row of padding only
            values.append(of_tokens.masked_fill(~trained, -math.inf).max())
    return torch.stack([value.double() for value in values])


def _names(objective: Objective) -> tuple[str, ...]:
    return ("loss", "num_tokens", "non_finite", *_statistics(objective))


def _statistics(objective: Objective) -> tuple[str, ...]:
    """Return the token statistics to report: the model's and the objective's."""
    return ("entropy", *objective.statistics)


def _is_mean(name: str) -> bool:
    return STATISTICS[name].over_tokens == MEAN


def _add_up(reports: list[torch.Tensor], objective: Objective) -> dict[str, float]:
    """Return sums (or maxima) over all micro-batches and data-parallel ranks, on every pipeline stage."""
    names = _names(objective)
    is_largest = torch.tensor([name in STATISTICS and not _is_mean(name) for name in names])
    rows = torch.stack(reports) if reports else torch.zeros(1, len(names), dtype=torch.float64)
    total, largest = rows.sum(0), rows.amax(0)
    if torch.cuda.is_available():
        total, largest, is_largest = total.cuda(), largest.cuda(), is_largest.cuda()
    # Tensor- and context-parallel ranks report the same, so a data-parallel group counts every token once.
    group = parallel_state.get_data_parallel_group()
    dist.all_reduce(total, group=group)
    largest = largest_of_ranks(largest, group)
    total = torch.where(is_largest, largest, total)
    dist.broadcast(
        total,
        src=parallel_state.get_pipeline_model_parallel_last_rank(),
        group=parallel_state.get_pipeline_model_parallel_group(),
    )
    return dict(zip(names, total.cpu().tolist(), strict=True))


def _weigh_auxiliary_loss(policy: Policy, batches: Sequence[TrainingMicroBatch]) -> None:
    """Make the routers' auxiliary loss a mean over the update's tokens.

    Megatron multiplies it by a micro-batch's token count, and expects gradients to be divided by the total.
    """
    if coefficient := policy.config.optimizer.moe_aux_loss_coeff:
        tokens = torch.tensor(float(sum(len(batch.packed.tokens) for batch in batches)), device=policy.device)
        dist.all_reduce(tokens, group=parallel_state.get_data_parallel_group())
        policy.settings.moe_aux_loss_coeff = coefficient / float(tokens)


def _count_non_finite_gradients(policy: Policy) -> int:
    """Return the number of gradient buffers, over all ranks, that hold a NaN or an infinity."""
    bad = sum(int(not are_finite(buffer.grad_data)) for buffer in policy.buffers)
    count = torch.tensor(float(bad), device=policy.device)
    dist.all_reduce(count)
    return int(count)


def _apply(policy: Policy, lr: float) -> float:
    """Clip and step; returns the gradient norm before clipping."""
    assert policy.optimizer is not None, "this policy cannot be trained"
    settings = policy.config.optimizer
    for group in policy.optimizer.param_groups:
        group["lr"] = lr
        share = 1.0 if settings.decay_norms_and_biases else group["wd_mult"]
        group["weight_decay"] = settings.weight_decay * share
    successful, grad_norm, _ = policy.optimizer.step()
    assert successful, "the optimizer refused a finite gradient"
    return float(grad_norm)
