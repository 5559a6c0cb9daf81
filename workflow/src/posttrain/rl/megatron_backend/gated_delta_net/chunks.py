"""The gated delta rule in torch, 64 tokens at a time, with a gradient that recomputes what it needs.

Within a chunk all tokens are computed together; only the state S [D_k, D_v] passes from chunk to chunk. Autograd would
keep several matrices of each chunk. Here the forward pass keeps a state per segment of chunks, and the backward pass
computes a segment again before it differentiates it, so memory beyond inputs, outputs and gradients stays small.

With c_i the sum of the log decays of a chunk up to token i, queries and keys normalised, and queries scaled:

    A_ij = b_i exp(c_i - c_j) k_i k_j   for j < i          P_ij = exp(c_i - c_j) q_i k_j   for j <= i
    V = (1 + A)^-1 b (v - exp(c) k S)                      O = exp(c) q S + P V
    S' = exp(c_63) S + (exp(c_63 - c) k)^T V

Shapes: n chunks, G key heads, R = N / G value heads of each, C = 64 tokens, D_k and D_v.

Source: as in `delta_rule`, section 3.3; the products of Householder matrices are those of Yang, Wang, Zhang, Shen,
Kim, Parallelizing Linear Transformers with the Delta Rule over Sequence Length, arXiv 2406.06484.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

import torch

CHUNK = 64
# Sequences, and chunks, computed together: more need more memory, fewer more calls of small operations.
SEQUENCES_AT_ONCE = CHUNKS_AT_ONCE = 8
NORM_EPS = 1e-6


@dataclass(frozen=True)
class Segment:
    """Successive chunks of some sequences, whose states are the only thing that the chunks before hand over.

    Args:
        tokens: [n, C] int64, the row's tokens in each chunk, sequences longest first in each step.
        is_token: [n, C] bool; the rest fills up the last chunk of a sequence.
        steps: Chunks of each step: one of every sequence that is as long.
        is_first: The sequences begin here.
    """

    tokens: torch.Tensor
    is_token: torch.Tensor
    steps: tuple[int, ...]
    is_first: bool

    def take(self, row: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a row's [T, H, ...] chunks [n, H, C, ...]; what fills up has the values of some token."""
        return row[self.tokens].transpose(1, 2).to(dtype, memory_format=torch.contiguous_format)

    def put(self, chunks: torch.Tensor, row: torch.Tensor) -> None:
        """Write chunks [n, H, C, ...] to their tokens of a row [T, H, ...]."""
        row[self.tokens[self.is_token]] = chunks.transpose(1, 2)[self.is_token].to(row.dtype)

    def starts(self) -> list[int]:
        """Return the first chunk of each step."""
        return [sum(self.steps[:step]) for step in range(len(self.steps))]


@lru_cache(maxsize=16)
def segments_of(lengths: tuple[int, ...]) -> tuple[Segment, ...]:
    """Return a row's segments, given its sequences' lengths; those of the same sequences follow each other."""
    starts = [0, *accumulate(lengths)]
    order = sorted((index for index, length in enumerate(lengths) if length), key=lambda index: -lengths[index])
    segments = []
    for first in range(0, len(order), SEQUENCES_AT_ONCE):
        members = order[first : first + SEQUENCES_AT_ONCE]
        segments += _segments_of_few([(starts[index], lengths[index]) for index in members])
    return tuple(segments)


def _segments_of_few(sequences: Sequence[tuple[int, int]]) -> list[Segment]:
    """Return the segments of sequences (start, length), longest first."""
    segments: list[Segment] = []
    chunks: list[tuple[int, int]] = []
    steps: list[int] = []
    for begin in range(0, sequences[0][1], CHUNK):
        step = [(start + begin, min(CHUNK, length - begin)) for start, length in sequences if length > begin]
        if steps and len(chunks) + len(step) > CHUNKS_AT_ONCE:
            segments.append(_segment(chunks, steps, not segments))
            chunks, steps = [], []
        chunks += step
        steps.append(len(step))
    return [*segments, _segment(chunks, steps, not segments)]


def _segment(chunks: Sequence[tuple[int, int]], steps: Sequence[int], is_first: bool) -> Segment:
    start, size = torch.tensor(chunks).unbind(1)
    place = torch.arange(CHUNK)
    is_token = place < size[:, None]
    return Segment(torch.where(is_token, start[:, None] + place, start[:, None]), is_token, tuple(steps), is_first)


class Chunks:
    """Values of a segment's chunks that depend on no earlier chunk.

    Args:
        segment: Which tokens.
        row: Queries, keys, values, log decays and betas of the row, as in `gated_delta_rule`.
        dtype: Of the computation.
    """

    def __init__(self, segment: Segment, row: Sequence[torch.Tensor], dtype: torch.dtype):
        query, key, value, decay, beta = row
        self.repeats = value.shape[1] // key.shape[1]
        self.scale = key.shape[-1] ** -0.5
        (self.query, self.query_size), (self.key, self.key_size) = (
            _normalised(segment.take(part, dtype).unsqueeze(2)) for part in (query, key)
        )
        self.query = self.query * self.scale
        self.value = self.grouped(segment.take(value, dtype))
        is_token = segment.is_token[:, None, None].to(dtype)
        self.beta = self.grouped(segment.take(beta, dtype)) * is_token
        self.sums = (self.grouped(segment.take(decay, dtype)) * is_token).cumsum(-1)

    def grouped(self, heads: torch.Tensor) -> torch.Tensor:
        """Return [n, N, ...] as [n, G, R, ...]."""
        return heads.unflatten(1, (-1, self.repeats))

    @cached_property
    def decay(self) -> torch.Tensor:
        """Decay since the chunk's start, [n, G, R, C, 1]."""
        return self.sums.exp().unsqueeze(-1)

    @cached_property
    def rest(self) -> torch.Tensor:
        """Decay from each token to the chunk's end, [n, G, R, C, 1]."""
        return (self.sums[..., -1:] - self.sums).exp().unsqueeze(-1)

    @cached_property
    def total(self) -> torch.Tensor:
        """Decay of the whole chunk, [n, G, R, 1, 1]."""
        return self.decay[..., -1:, :]

    @cached_property
    def between(self) -> torch.Tensor:
        """Decay from token j to token i, 0 if j comes later; [n, G, R, C (i), C (j)]."""
        is_later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=self.sums.device).triu(1)
        return (self.sums.unsqueeze(-1) - self.sums.unsqueeze(-2)).masked_fill(is_later, float("-inf")).exp_()

    @cached_property
    def keys_by_keys(self) -> torch.Tensor:
        """A over b, [n, G, R, C, C]."""
        return ((self.key @ self.key.mT) * self.between).tril_(-1)

    @cached_property
    def queries_by_keys(self) -> torch.Tensor:
        """P, [n, G, R, C, C]."""
        return (self.query @ self.key.mT) * self.between

    @cached_property
    def inverse(self) -> torch.Tensor:
        """(1 + A)^-1, [n, G, R, C, C]."""
        system = self.keys_by_keys * self.beta.unsqueeze(-1)
        one = torch.eye(CHUNK, dtype=system.dtype, device=system.device).expand_as(system)
        return torch.linalg.solve_triangular(system, one, upper=False, unitriangular=True)

    def news(self, step: slice, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return exp(c) k S and V of a step, both [m, G, R, C, D_v], from the state [m, G, R, D_k, D_v] before it."""
        known = self.decay[step] * (self.key[step] @ state)
        return known, self.inverse[step] @ (self.beta[step].unsqueeze(-1) * (self.value[step] - known))

    def after(self, step: slice, state: torch.Tensor, news: torch.Tensor) -> torch.Tensor:
        """Return the state after a step."""
        return self.total[step] * state + self.key[step].mT @ (self.rest[step] * news)


def _normalised(vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return vectors of length 1, and the factor that made them so."""
    factor = (vectors.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt_()
    return vectors * factor, factor


def _from_each_on(values: torch.Tensor, dim: int) -> torch.Tensor:
    """Return for each place the sum of the values from there on."""
    return values.flip(dim).cumsum(dim).flip(dim)


def _through_norm(grad: torch.Tensor, normal: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return the gradient of vectors from that of their normalised form."""
    return factor * (grad - normal * (grad * normal).sum(-1, keepdim=True))


class ChunkedRule(torch.autograd.Function):
    """The rule with its gradient; arguments as in `gated_delta_rule`, with lengths instead of boundaries."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> torch.Tensor:
        """Return the outputs [T, N, D_v]."""
        *row, lengths = arguments
        value = row[2]
        dtype = torch.float64 if value.dtype == torch.float64 else torch.float32
        output = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        state, states = value.new_empty(0, dtype=dtype), []
        for segment in segments_of(lengths):
            chunks = Chunks(segment, row, dtype)
            state = _first_state(segment, row, dtype) if segment.is_first else state[: segment.steps[0]]
            states.append(None if segment.is_first else state)
            state = _write_outputs(segment, chunks, state, output)
        ctx.save_for_backward(*row)
        ctx.states, ctx.lengths, ctx.dtype = states, lengths, dtype
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of queries, keys, values, decays and betas."""
        row, (grad,) = ctx.saved_tensors, grads
        results = [torch.empty(part.shape, dtype=part.dtype, device=part.device) for part in row]
        segments = segments_of(ctx.lengths)
        grad_state: torch.Tensor | None = None
        for segment, state in zip(reversed(segments), reversed(ctx.states), strict=True):
            chunks = Chunks(segment, row, ctx.dtype)
            before = _first_state(segment, row, ctx.dtype) if state is None else state
            of_segment = _SegmentGradient(segment, chunks, grad)
            grad_state = of_segment.through_states(before, grad_state)
            for part, result in zip(of_segment.of_inputs(), results, strict=True):
                segment.put(part, result)
            grad_state = None if segment.is_first else grad_state
        return (*results, None)


def _first_state(segment: Segment, row: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    key, value = row[1], row[2]
    heads = key.shape[1], value.shape[1] // key.shape[1]
    return value.new_zeros(segment.steps[0], *heads, key.shape[2], value.shape[2], dtype=dtype)


def _write_outputs(segment: Segment, chunks: Chunks, state: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Write a segment's outputs; returns the state after it, of the sequences in its last step."""
    made = torch.empty_like(chunks.value)
    for first, size in zip(segment.starts(), segment.steps, strict=True):
        step, state = slice(first, first + size), state[:size]
        _, news = chunks.news(step, state)
        made[step] = chunks.decay[step] * (chunks.query[step] @ state) + chunks.queries_by_keys[step] @ news
        state = chunks.after(step, state, news)
    segment.put(made.flatten(1, 2), output)
    return state


class _SegmentGradient:
    """The gradients of a segment's tokens, computed from its last step to its first.

    Args:
        segment: Which tokens.
        chunks: What they computed.
        grad: [T, N, D_v], the gradient of the outputs.
    """

    def __init__(self, segment: Segment, chunks: Chunks, grad: torch.Tensor):
        self.segment, self.chunks = segment, chunks
        is_token = segment.is_token[:, None, None, :, None].to(chunks.value.dtype)
        self.grad = chunks.grouped(segment.take(grad, chunks.value.dtype)) * is_token
        self.query, self.key = torch.zeros_like(chunks.query), torch.zeros_like(chunks.key)
        self.value, self.beta = torch.zeros_like(chunks.value), torch.zeros_like(chunks.beta)
        # Of log decays: of whole chunks, from the start to a token, and from a token to the end.
        self.decay, self.since_start, self.until_end = (torch.zeros_like(chunks.sums) for _ in range(3))
        self.inner = torch.empty_like(chunks.inverse)  # of P
        self.system = torch.empty_like(chunks.inverse)  # of A

    def through_states(self, state: torch.Tensor, grad_state: torch.Tensor | None) -> torch.Tensor:
        """Compute what passes through the states.

        Args:
            state: [m, G, R, D_k, D_v] before the segment.
            grad_state: Gradient of the state behind it, of fewer sequences if some have ended; None: of none.

        Returns:
            Gradient of the state before it.
        """
        states, steps = [], [slice(f, f + s) for f, s in zip(self.segment.starts(), self.segment.steps, strict=True)]
        for step in steps:
            state = state[: step.stop - step.start]
            known, news = self.chunks.news(step, state)
            states.append((state, known, news))
            state = self.chunks.after(step, state, news)
        for step, (state, known, news) in zip(reversed(steps), reversed(states), strict=True):
            behind = torch.zeros_like(state)
            if grad_state is not None:
                behind[: len(grad_state)] = grad_state
            grad_state = self._through_step(step, state, known, news, behind)
        assert grad_state is not None, "a segment has a step"
        return grad_state

    def _through_step(
        self, step: slice, state: torch.Tensor, known: torch.Tensor, news: torch.Tensor, behind: torch.Tensor
    ) -> torch.Tensor:
        """Add a step's gradients; returns that of the state before it from that of the state `behind` it."""
        chunks, grad = self.chunks, self.grad[step]
        query, key, beta = chunks.query[step], chunks.key[step], chunks.beta[step].unsqueeze(-1)
        kept = chunks.rest[step] * (key @ behind)
        grad_news = chunks.queries_by_keys[step].mT @ grad + kept
        solved = chunks.inverse[step].mT @ grad_news
        of_known = -chunks.decay[step] * beta * solved
        decayed = chunks.decay[step] * grad
        self.inner[step] = grad @ news.mT
        self.system[step] = -solved @ news.mT
        self.value[step] = beta * solved
        self.beta[step] = (solved * (chunks.value[step] - known)).sum(-1)
        of_query, of_key = decayed @ state.mT, of_known @ state.mT + (chunks.rest[step] * news) @ behind.mT
        self.query[step], self.key[step] = of_query.sum(2, keepdim=True), of_key.sum(2, keepdim=True)
        total = chunks.total[step][..., 0, 0] * (state * behind).sum((-1, -2))
        self.decay[step] = total.unsqueeze(-1)
        self.since_start[step] = (of_query * query).sum(-1) - (self.value[step] * known).sum(-1)
        self.until_end[step] = kept.mul_(news).sum(-1)
        return chunks.total[step] * behind + query.mT @ decayed + key.mT @ of_known

    def of_inputs(self) -> tuple[torch.Tensor, ...]:
        """Return the gradients of queries, keys, values, decays and betas, [n, heads, C, ...]."""
        chunks = self.chunks
        beta, system = chunks.beta.unsqueeze(-1), self.system.tril_(-1)
        of_beta = system * chunks.keys_by_keys
        self.beta += of_beta.sum(-1)
        between = of_beta.mul_(beta).addcmul_(self.inner, chunks.queries_by_keys)
        of_products = system.mul_(beta).mul_(chunks.between).sum(2, keepdim=True)
        of_inner = self.inner.mul_(chunks.between).sum(2, keepdim=True)
        of_query = self.query + of_inner @ chunks.key
        of_key = self.key + of_inner.mT @ chunks.query + (of_products + of_products.mT) @ chunks.key
        query = _through_norm(of_query * chunks.scale, chunks.query / chunks.scale, chunks.query_size)
        key = _through_norm(of_key, chunks.key, chunks.key_size)
        decay = self._of_decay(between)
        return tuple(part.flatten(1, 2) for part in (query, key, self.value, decay, self.beta))

    def _of_decay(self, between: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the log decays, [n, G, R, C].

        Token t's decay acts between the tokens before t and those from t on. Added up so, nothing cancels; as gradients
        of running sums, all that lies on one side of t would be added and subtracted again.

        Args:
            between: [n, G, R, C (i), C (j)], the gradient of log decays between two tokens j <= i.
        """
        across = _from_each_on(between, -2).tril_(-1).sum(-1)
        before = self.until_end.cumsum(-1) - self.until_end
        return self.decay + _from_each_on(self.since_start, -1) + before + across
