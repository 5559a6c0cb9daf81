"""Training loops over transformers' model, as one writes them in an afternoon: the peers of `benchmarks.trainer`.

All compute the same policy gradient and make one AdamW step (torch's fused kernel). They differ in how samples are
batched: padded to the longest of a micro-batch, one at a time, or packed into rows with attention sequence by sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from posttrain.types import Trajectory, TrajectoryGroup

# The loss of some samples, summed, ready for the backward pass.
Loss = Callable[[torch.nn.Module, Sequence[Trajectory], Sequence[float]], torch.Tensor]


def make_update(
    model: torch.nn.Module, groups: Sequence[TrajectoryGroup], batching: str, max_tokens: int, lr: float, clip: float
) -> Callable[[], float]:
    """Return a function that makes one update and returns the gradient norm before clipping.

    Args:
        model: transformers' model.
        groups: The rollout.
        batching: Key of `BATCHINGS`.
        max_tokens: Most tokens of a padded block or of a packed row.
        lr: Learning rate.
        clip: Largest gradient norm.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=0.0, fused=True)
    samples = [sample for group in groups for sample in group.trajectories]
    num_tokens = sum(sample.num_sampled for sample in samples)
    factors = [value / num_tokens for group in groups for value in advantages(group)]
    split, loss = BATCHINGS[batching]
    if batching == "packed":
        attend_by_sequence(model)

    def update() -> float:
        optimizer.zero_grad()
        for members in split([sample.num_tokens for sample in samples], max_tokens):
            loss(model, [samples[i] for i in members], [factors[i] for i in members]).backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, clip)
        optimizer.step()
        return float(norm)

    return update


def advantages(group: TrajectoryGroup) -> list[float]:
    """Return GRPO's advantages."""
    values = torch.tensor([sample.reward or 0.0 for sample in group.trajectories])
    return ((values - values.mean()) / (values.std() + 1e-6)).tolist()


def policy_loss(logits: torch.Tensor, targets: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Return the policy gradient of a rollout's first update.

    Args:
        logits: [T, V].
        targets: [T] int64.
        factors: [T] fp32, advantages times weights; 0 where a token does not count.
    """
    logprobs = -F.cross_entropy(logits, targets, reduction="none")
    return (-(logprobs - logprobs.detach()).exp() * factors).sum()


# ---- padded ----


def padded_micro_batches(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Yield samples of neighbouring length whose padded block keeps the budget."""
    members: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if members and (len(members) + 1) * lengths[members[0]] > max_tokens:
            yield members
            members = []
        members.append(index)
    yield members


def padded_loss(model: torch.nn.Module, samples: Sequence[Trajectory], factors: Sequence[float]) -> torch.Tensor:
    """Run a padded block; logits of all positions behind the shortest prompt."""
    longest, prompt = max(s.num_tokens for s in samples), min(len(s.prompt_tokens) for s in samples)
    ids, mask = torch.zeros(2, len(samples), longest, dtype=torch.long)
    keep = torch.zeros(len(samples), longest)
    for row, (sample, factor) in enumerate(zip(samples, factors, strict=True)):
        ids[row, : sample.num_tokens] = token_ids(sample)
        mask[row, : sample.num_tokens] = 1
        keep[row, len(sample.prompt_tokens) : sample.num_tokens] = factor
    # No mask where nothing is padded lets torch choose its causal kernel.
    padding = None if mask.all() else mask
    kept = longest - prompt + 1
    logits = model(input_ids=ids, attention_mask=padding, use_cache=False, logits_to_keep=kept).logits[:, :-1]
    return policy_loss(logits.flatten(0, 1), ids[:, prompt:].flatten(), keep[:, prompt:].flatten())


# ---- one at a time ----


def single_micro_batches(lengths: Sequence[int], _: int) -> Iterator[list[int]]:
    """Yield each sample alone."""
    return ([index] for index in range(len(lengths)))


def single_loss(model: torch.nn.Module, samples: Sequence[Trajectory], factors: Sequence[float]) -> torch.Tensor:
    """Run one sequence; logits of its response only."""
    (sample,), (factor,) = samples, factors
    targets = torch.tensor(sample.sampled_tokens)
    output = model(input_ids=token_ids(sample)[None], use_cache=False, logits_to_keep=len(targets) + 1)
    return policy_loss(output.logits[0, :-1], targets, torch.full((len(targets),), factor))


# ---- packed ----


def packed_micro_batches(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Yield samples that fill a row: the first row with room, longest samples first."""
    rows: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = (row for row in rows if sum(lengths[i] for i in row) + lengths[index] <= max_tokens)
        row = next(fits, None)
        if row is None:
            rows.append(row := [])
        row.append(index)
    yield from rows


def packed_loss(model: torch.nn.Module, samples: Sequence[Trajectory], factors: Sequence[float]) -> torch.Tensor:
    """Run a row of sequences; logits of their responses only."""
    lengths = [sample.num_tokens for sample in samples]
    starts = itertools.accumulate(lengths[:-1], initial=0)
    places = [
        torch.arange(start + len(s.prompt_tokens) - 1, start + s.num_tokens - 1)
        for start, s in zip(starts, samples, strict=True)
    ]
    output = model(
        input_ids=torch.cat([token_ids(s) for s in samples])[None],
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
        # Attention masks each sequence itself; a mapping keeps transformers from making a mask of the whole row.
        attention_mask=dict.fromkeys(("full_attention", "indexed_attention")),
        use_cache=False,
        logits_to_keep=torch.cat(places),
        lengths=lengths,
    )
    values = torch.tensor(factors).repeat_interleave(torch.tensor([s.num_sampled for s in samples]))
    return policy_loss(output.logits[0], torch.cat([torch.tensor(s.sampled_tokens) for s in samples]), values)


def attend_by_sequence(model: Any) -> None:
    """Let a model's attention treat each sequence of a row by itself.

    With an indexer, which reads the layer's input, the whole attention layer runs once for each sequence. Without one,
    the row is projected at once, and only the attention function loops.
    """
    if any(".indexer." in name for name, _ in model.named_parameters()):
        for layer in model.model.layers:
            layer.self_attn.forward = partial(_layer_by_sequence, layer.self_attn.forward)
    else:
        ALL_ATTENTION_FUNCTIONS.register("by_sequence", _attention_by_sequence)
        model.set_attn_implementation("by_sequence")


def _layer_by_sequence(
    forward: Callable[..., Any],
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    lengths: Sequence[int],
    **other: Any,
) -> tuple[torch.Tensor, None, None]:
    parts = zip(hidden_states.split(lengths, 1), *(t.split(lengths, 1) for t in position_embeddings), strict=True)
    outputs = []
    for hidden, cos, sin in parts:
        visible = torch.ones(1, 1, hidden.shape[1], hidden.shape[1], dtype=torch.bool).tril()
        given = other | {"attention_mask": visible}
        outputs.append(forward(hidden_states=hidden, position_embeddings=(cos, sin), **given)[0])
    return torch.cat(outputs, 1), None, None


def _attention_by_sequence(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    lengths: Sequence[int],
    **other: Any,
) -> tuple[torch.Tensor, None]:
    parts = zip(*(t.split(lengths, 2) for t in (query, key, value)), strict=True)
    return torch.cat([sdpa_attention_forward(module, q, k, v, None, **other)[0] for q, k, v in parts], 1), None


def token_ids(sample: Trajectory) -> torch.Tensor:
    """Return [T] int64, prompt and response."""
    return torch.tensor(sample.tokens)


BATCHINGS: dict[str, tuple[Callable[[Sequence[int], int], Iterator[list[int]]], Loss]] = {
    "padded": (padded_micro_batches, padded_loss),
    "single": (single_micro_batches, single_loss),
    "packed": (packed_micro_batches, packed_loss),
}
