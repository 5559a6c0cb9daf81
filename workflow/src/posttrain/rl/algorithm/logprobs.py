"""Log-probabilities of given tokens and the entropy of their distributions, without materialising all logits.

    logits(t)  = hidden(t) @ weight.T / temperature
    logprob(t) = logits(t)[target] - logsumexp(logits(t))
    entropy(t) = logsumexp(logits(t)) - sum over words of p(word) logits(t)[word]

Logits of T tokens are the largest activation of a step: 32,768 tokens x 154,880 words are 18.9 GiB in FP32, and the
softmax for the backward pass is as large again. So tokens are processed in chunks. The forward pass keeps the largest
logit and the sum of exponentials of each token. The backward pass turns a chunk's logits into their gradient in place,
and accumulates the gradients of hidden states and matrix. Only one tensor of [chunk, V] exists at a time: it holds the
last chunk from the forward to the backward pass, which recomputes the other chunks in it. So a row that fits into one
chunk is not computed twice; every other chunk costs one more product with the output matrix.

The temperature is that of sampling, because the trained policy must be the one that sampled.
Shapes: T tokens, H hidden size, V vocabulary (this rank's rows of it).

Sources: Chen et al., Training Deep Nets with Sublinear Memory Cost (arXiv 1604.06174); Shoeybi et al., Megatron-LM
(arXiv 1909.08053), section 3, for a vocabulary that is spread over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

# Exponentials are computed for this fraction of a chunk at a time, next to the logits.
BLOCKS_PER_CHUNK = 16


@dataclass(frozen=True)
class VocabularyShard:
    """The part of the vocabulary that the rows of an output matrix represent.

    Args:
        first: Word of the first row.
        num_words: Rows that represent words; the rest is padding.
        group: Ranks that share the vocabulary; None if this rank has all of it.
    """

    first: int
    num_words: int
    group: dist.ProcessGroup | None = None


def chunked_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    chunk_size: int,
    shard: VocabularyShard | None = None,
    weight_grad: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probability of each target, and the entropy at its position, from the last hidden states.

    Args:
        hidden: [T, H].
        weight: [V, H], the output matrix, of the same dtype.
        targets: [T] int64, in the whole vocabulary.
        temperature: Above 0.
        chunk_size: Tokens whose logits exist at a time; at least 1.
        shard: The words of the matrix rows; None: all, in order. Under tensor parallelism the gradient of the hidden
            states is this rank's part of a sum.
        weight_grad: [V, H] fp32, to which the backward pass adds the gradient of the matrix; autograd then gets none.

    Returns:
        [T] fp32 with a gradient, and [T] fp32 without; the same for every chunk size.

    Example:
        Logits (0, ln 3) and target 1: ln 3/4 = -0.2877 and 0.5623; at temperature 0.5 the logits are (0, ln 9):
        ln 9/10 = -0.1054 and 0.3251.
    """
    assert chunk_size >= 1, f"chunk_size is {chunk_size}"
    assert temperature > 0, f"temperature is {temperature}"
    assert len(targets) == len(hidden), f"{len(targets)} targets for {len(hidden)} tokens"
    shard = shard or VocabularyShard(0, len(weight))
    return _ChunkedLogprobs.apply(hidden, weight, targets, temperature, chunk_size, shard, weight_grad)


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        chunk_size: int,
        shard: VocabularyShard,
        weight_grad: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        words = weight[: shard.num_words]
        # A rank without real words contributes nothing, whatever the other ranks' largest logit is.
        largest = hidden.new_full((len(hidden),), torch.finfo(torch.float32).min, dtype=torch.float32)
        total, product, chosen = (torch.zeros_like(largest) for _ in range(3))
        room = _room_for_logits(hidden, words, chunk_size)
        for rows, logits in logit_chunks(hidden, words, temperature, chunk_size, room):
            largest[rows] = logits.amax(-1)
            logits.sub_(largest[rows, None])
            chosen[rows] = logits.gather(1, _column(targets[rows], shard)).squeeze(1)
            _exponentiate(logits, total[rows], product[rows])
        chosen *= _is_mine(targets, shard)
        top, total, product, chosen = _over_ranks(largest, total, product, chosen, targets, shard)
        ctx.save_for_backward(hidden, weight, targets, largest, (largest - top).exp() / total)
        ctx.settings = temperature, chunk_size, shard, weight_grad
        ctx.room = room  # holds the exponentials of the last chunk
        logprobs, entropies = chosen - total.log(), total.log() - product / total
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, largest, share = ctx.saved_tensors
        temperature, chunk_size, shard, weight_grad = ctx.settings
        words = weight[: shard.num_words]
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        sums = weight_grad
        if sums is None and ctx.needs_input_grad[1]:
            sums = torch.zeros_like(weight, dtype=torch.float32)
        grad = grad / temperature
        mine = grad * _is_mine(targets, shard)

        def add(rows: slice, exponentials: torch.Tensor) -> None:
            logits_grad = exponentials.mul_(-(grad[rows] * share[rows])[:, None])
            column = _column(targets[rows], shard)
            logits_grad.scatter_(1, column, logits_grad.gather(1, column) + mine[rows, None])
            logits_grad = logits_grad.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(logits_grad, words, out=grad_hidden[rows])
            if sums is not None:
                add_product(sums[: shard.num_words], logits_grad.T, hidden[rows])

        room, ctx.room = ctx.room, None  # a second backward pass would find it overwritten
        assert room is not None, "the backward pass of log-probabilities runs once"
        kept = _last_chunk(len(hidden), len(words), chunk_size)
        add(kept, room[: kept.stop - kept.start])
        for rows, logits in logit_chunks(hidden[: kept.start], words, temperature, chunk_size, room):
            add(rows, logits.sub_(largest[rows, None]).exp_())
        grad_weight = sums.to(weight.dtype) if sums is not None and weight_grad is None else None
        return grad_hidden, grad_weight, None, None, None, None, None


def _last_chunk(num_tokens: int, num_words: int, chunk_size: int) -> slice:
    """Return the rows of the last chunk; none where there are no logits."""
    return slice((num_tokens - 1) // chunk_size * chunk_size, num_tokens) if num_tokens and num_words else slice(0, 0)


def _room_for_logits(hidden: torch.Tensor, words: torch.Tensor, chunk_size: int) -> torch.Tensor:
    """Return memory for a chunk of logits [t, V] fp32."""
    return hidden.new_empty(min(chunk_size, len(hidden)), len(words), dtype=torch.float32)


def logit_chunks(
    hidden: torch.Tensor, words: torch.Tensor, temperature: float, chunk_size: int, room: torch.Tensor
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield each chunk's rows and its logits [t, V] fp32 divided by the temperature, in the memory of `room`."""
    if not len(hidden) or not len(words):
        return
    for start in range(0, len(hidden), chunk_size):
        rows = slice(start, min(start + chunk_size, len(hidden)))
        logits = room[: rows.stop - rows.start]
        if hidden.dtype == torch.float32:
            torch.mm(hidden[rows], words.T, out=logits)
        else:
            logits.copy_(hidden[rows] @ words.T)
        yield rows, logits.div_(temperature) if temperature != 1 else logits


def _exponentiate(logits: torch.Tensor, total: torch.Tensor, product: torch.Tensor) -> None:
    """Replace logits [t, V] by their exponentials, and write the sums of exp(logit) and of exp(logit) logit."""
    block = -(-len(logits) // BLOCKS_PER_CHUNK)
    for part, sums, products in zip(logits.split(block), total.split(block), product.split(block), strict=True):
        exponentials = part.exp()
        torch.sum(exponentials, -1, out=sums)
        torch.sum(part.mul_(exponentials), -1, out=products)
        part.copy_(exponentials)


def _is_mine(targets: torch.Tensor, shard: VocabularyShard) -> torch.Tensor:
    """Return [T] bool: whether this rank has the target's word."""
    return (targets >= shard.first) & (targets < shard.first + shard.num_words)


def _column(targets: torch.Tensor, shard: VocabularyShard) -> torch.Tensor:
    """Return [t, 1], the target's column in this rank's logits; an arbitrary one if another rank has it."""
    return (targets - shard.first).clamp(0, shard.num_words - 1)[:, None]


def _over_ranks(
    largest: torch.Tensor,
    total: torch.Tensor,
    product: torch.Tensor,
    chosen: torch.Tensor,
    targets: torch.Tensor,
    shard: VocabularyShard,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Combine the ranks' partial results for the whole vocabulary, relative to the global largest logit.

    Args:
        largest: [T], the largest logit.
        total: [T], sum of exp(logit - largest).
        product: [T], sum of exp(logit - largest) (logit - largest).
        chosen: [T], the target's logit - largest; 0 on ranks that do not have its word.
        targets: [T].
        shard: This rank's words.
    """
    if shard.group is None:
        return largest, total, product, chosen
    top = largest.clone()
    dist.all_reduce(top, dist.ReduceOp.MAX, group=shard.group)
    below = largest - top
    share = below.exp()
    sums = torch.stack([total * share, (product + below * total) * share, chosen + below * _is_mine(targets, shard)])
    dist.all_reduce(sums, group=shard.group)
    return top, sums[0], sums[1], sums[2]


def add_product(result: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add left @ right to an FP32 matrix; narrower inputs are multiplied as they are and accumulated in FP32."""
    if left.dtype == result.dtype:
        result.addmm_(left, right)
    else:
        result.add_(left @ right)
