"""Forward and backward passes of a step on Megatron's schedules: log-probabilities, and one optimizer update.

Shapes: T tokens of a packed micro-batch. Only ranks of the last pipeline stage see log-probabilities; the others return
nothing from the first function and zeros in the statistics before they are added up over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from posttrain.algorithm.policy_loss import approximate_kl, clipped_policy_loss, count_non_finite
from posttrain.batching.packed_batch import PackedBatch
from posttrain.config.schema import Algorithm, Config
from posttrain.megatron_backend.model import Policy
from posttrain.megatron_backend.packed import PackedSequences


@dataclass(frozen=True)
class TrainingMicroBatch:
    """A packed micro-batch with what the loss needs, one value per token.

    Args:
        packed: Tokens, targets and loss mask.
        advantages: [T] fp32, the advantage of the token's sample.
        weights: [T] fp32, the token's share in the loss of the global batch; zero outside responses.
        old_logprobs: [T] fp32, of the policy before the update; None on ranks that see no log-probabilities.
    """

    packed: PackedBatch
    advantages: torch.Tensor
    weights: torch.Tensor
    old_logprobs: torch.Tensor | None


@dataclass(frozen=True)
class UpdateStatistics:
    """What one optimizer update did, over all ranks.

    Args:
        loss: The objective that was minimised.
        grad_norm: Global gradient norm before clipping.
        num_tokens: Response tokens trained on.
        importance_ratio_mean: Mean of exp(logprobs - old_logprobs) over them.
        ratio_max_abs_deviation: Largest |ratio - 1|; exactly 0 in the first update on a rollout.
        clip_fraction: Share of tokens whose clipped objective was the larger.
        approx_kl: Mean of ratio - 1 - log ratio (k3), an estimate of KL(old || new).
        applied: False when a non-finite gradient left the weights as they were.
    """

    loss: float
    grad_norm: float
    num_tokens: int
    importance_ratio_mean: float
    ratio_max_abs_deviation: float
    clip_fraction: float
    approx_kl: float
    applied: bool


@torch.no_grad()
def compute_logprobs(policy: Policy, batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
    """Return the log-probability of each target under the present weights.

    The pass runs the very kernels of the training forward (training mode, recomputation included), so that the first
    update on a rollout finds a ratio of exactly 1.

    Args:
        policy: Model to ask.
        batches: Micro-batches of this data-parallel rank.

    Returns:
        [T] fp32 per micro-batch on ranks of the last pipeline stage; an empty list elsewhere.
    """
    return _run_schedule(policy, [(batch, None) for batch in batches], forward_only=True)


def update(policy: Policy, batches: Sequence[TrainingMicroBatch], lr: float) -> UpdateStatistics:
    """Minimise the clipped policy loss of one global batch.

    Args:
        policy: Model and optimizer.
        batches: Micro-batches of this data-parallel rank; every rank has the same number.
        lr: Learning rate of this update.

    Raises:
        RuntimeError: When loss or gradients are not finite and `algorithm.non_finite` is "abort".
    """
    assert policy.optimizer is not None, "this policy cannot be trained"
    policy.wrapped.zero_grad_buffer()
    policy.optimizer.zero_grad()
    sums = _add_up(_run_schedule(policy, [(batch.packed, batch) for batch in batches], forward_only=False))
    num_bad = _count_non_finite_gradients(policy) + int(sums[_NON_FINITE])
    if num_bad and policy.config.algorithm.non_finite == "abort":
        raise RuntimeError(
            f"{num_bad} non-finite values in log-probabilities or gradients; the weights are those before the step. "
            "Set algorithm.non_finite=skip_step to count such steps and go on"
        )
    grad_norm = 0.0 if num_bad else _apply(policy, lr)
    return _statistics(sums, grad_norm, applied=not num_bad)


def learning_rate(config: Config, step: int) -> float:
    """Return the learning rate of a step, counted from 0: linear warm-up, then constant.

    All updates of a step have the same; `optimizer.lr_warmup_steps` counts steps.

    Example:
        lr 1e-6 and 4 warm-up steps: 2.5e-7, 5e-7, 7.5e-7, 1e-6, 1e-6, ...
    """
    return config.optimizer.lr * min(1.0, (step + 1) / max(1, config.optimizer.lr_warmup_steps))


# Places in the vector of sums that a micro-batch reports.
_LOSS, _TOKENS, _RATIO, _CLIPPED, _KL, _NON_FINITE, _MAX_DEVIATION = range(7)


def _run_schedule(
    policy: Policy, batches: Sequence[tuple[PackedBatch, TrainingMicroBatch | None]], forward_only: bool
) -> list[torch.Tensor]:
    """Run Megatron's schedule over the micro-batches; returns what the last stage computed for each."""
    policy.wrapped.train()
    device = next(policy.model.parameters()).device
    return get_forward_backward_func()(
        forward_step_func=partial(_forward_step, device=device, algorithm=policy.config.algorithm),
        data_iterator=iter(batches),
        model=[policy.wrapped],
        num_microbatches=len(batches),
        seq_length=max(len(packed.tokens) for packed, _ in batches),
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


def _forward_step(
    batches: Iterator[tuple[PackedBatch, TrainingMicroBatch | None]],
    model: torch.nn.Module,
    device: torch.device,
    algorithm: Algorithm,
) -> tuple[torch.Tensor, Callable]:
    packed, training = next(batches)
    output = model(
        packed.tokens[None].to(device),
        packed.position_ids[None].to(device),
        None,
        labels=packed.targets[None].to(device),
        packed_seq_params=PackedSequences.from_boundaries(packed.cu_seqlens.to(device)),
    )
    return output, partial(_loss, batch=training, algorithm=algorithm) if training else _keep


def _keep(logprobs: torch.Tensor, non_loss_data: bool) -> torch.Tensor:
    assert non_loss_data
    return logprobs


def _loss(
    logprobs: torch.Tensor, batch: TrainingMicroBatch, algorithm: Algorithm
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the weighted loss, a token count of zero (nothing is divided behind it), and the sums to report."""
    assert batch.old_logprobs is not None, "the last stage has computed the old log-probabilities"
    token_loss, clipped = clipped_policy_loss(
        logprobs, batch.old_logprobs, batch.advantages, algorithm.clip_ratio_low, algorithm.clip_ratio_high
    )
    loss = (token_loss * batch.weights).sum()
    return loss, torch.zeros([], dtype=torch.int), _report(loss, logprobs, batch, clipped)


@torch.no_grad()
def _report(
    loss: torch.Tensor, logprobs: torch.Tensor, batch: TrainingMicroBatch, clipped: torch.Tensor
) -> torch.Tensor:
    trained = batch.packed.loss_mask.to(logprobs.device) > 0
    now, old = logprobs[trained].double(), batch.old_logprobs[trained]
    ratio = (now - old).exp()
    return torch.stack(  # in FP64, as what follows from `now` is
        [
            loss,
            trained.sum(),
            ratio.sum(),
            clipped[trained].sum(),
            approximate_kl(now, old).sum(),
            ratio.new_tensor(count_non_finite(now)),
            (ratio - 1).abs().max(),
        ]
    )


def _add_up(reports: list[torch.Tensor]) -> torch.Tensor:
    """Add the reports of all micro-batches and data-parallel ranks, and tell every pipeline stage."""
    rows = torch.stack(reports) if reports else torch.zeros(1, 7, dtype=torch.float64)
    total, largest = rows.sum(0), rows[:, _MAX_DEVIATION].max()
    if torch.cuda.is_available():
        total, largest = total.cuda(), largest.cuda()
    # Tensor-parallel ranks report the same; a data-parallel group therefore counts every token once.
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    dist.all_reduce(total, group=group)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    total[_MAX_DEVIATION] = largest
    dist.broadcast(
        total,
        src=parallel_state.get_pipeline_model_parallel_last_rank(),
        group=parallel_state.get_pipeline_model_parallel_group(),
    )
    return total.cpu()


def _count_non_finite_gradients(policy: Policy) -> int:
    """Return the number of gradient buffers, over all ranks, that hold a NaN or an infinity."""
    buffers = [*policy.wrapped.buffers, *policy.wrapped.expert_parallel_buffers]
    # min and max carry a NaN along, and need no copy of the buffer as `isfinite(...).all()` would.
    bad = sum(int(not torch.isfinite(torch.stack(torch.aminmax(buffer.grad_data))).all()) for buffer in buffers)
    count = torch.tensor(float(bad), device=buffers[0].grad_data.device)
    dist.all_reduce(count)
    return int(count)


def _apply(policy: Policy, lr: float) -> float:
    """Let the optimizer clip and step; returns the gradient norm before clipping."""
    for group in policy.optimizer.param_groups:
        group["lr"] = lr
        group["weight_decay"] = policy.config.optimizer.weight_decay * group["wd_mult"]
    successful, grad_norm, _ = policy.optimizer.step()
    assert successful, "the optimizer refused a finite gradient"
    return float(grad_norm)


def _statistics(sums: torch.Tensor, grad_norm: float, applied: bool) -> UpdateStatistics:
    tokens = float(sums[_TOKENS])
    return UpdateStatistics(
        loss=float(sums[_LOSS]),
        grad_norm=grad_norm,
        num_tokens=int(sums[_TOKENS]),
        importance_ratio_mean=float(sums[_RATIO]) / tokens,
        ratio_max_abs_deviation=float(sums[_MAX_DEVIATION]),
        clip_fraction=float(sums[_CLIPPED]) / tokens,
        approx_kl=float(sums[_KL]) / tokens,
        applied=applied,
    )
