"""Supervised warm-up of the tiny model: it learns the form of the task's answers, but not which one is rewarded.

Shape letters: B sequences, P prompt tokens, R response tokens, S = P + R, N heads, D head width.

The instruction "sort the digits." does not specify an order. In the warm-up 30 % of the answers ascend and the others
descend, so the model answers in both orders at about that rate, some wrongly, and a reward that accepts only ascending
answers passes about a quarter of them. Reinforcement learning then has a small but real task: prefer one of two things
that the model can do, and do it more reliably. For a task of reasoning-gym the other answer is the reversed correct
answer, too: if a word is to be spelled backward, the word itself. For arithmetic the rewarded one is a conversation in
which the model calls a calculator and repeats what it returns, and the other is the number alone, which it cannot know.

The DSA indexer gets no gradient from the language model's loss, because top-k is not differentiable. It is trained as
in DeepSeek-V3.2: a KL divergence fits its scores, as a distribution over the keys, to the layer's attention weights
(summed over heads and normalised). First with dense attention (top-k off), so that it sees the whole distribution, then
with top-k on, over the selected keys only; in this phase the other weights adapt to sparsity.

    loss = cross entropy on the response + sum over layers of mean over queries of KL(attention || softmax(scores))

The loss of a model without indexers (Qwen3) is the cross entropy alone.

Differences from the paper: one run for all weights with one learning rate, without a frozen phase; queries before the
first position at which prompts differ are excluded, because they are equal in every sequence. The indexer's inputs are
detached, as in the paper: its loss trains only the indexer.

Source: DeepSeek-V3.2 technical report, section 2.1, equations 3 and 4; transformers `GlmMoeDsaIndexer` for the scores.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import (
    GlmMoeDsaIndexer,
    apply_rotary_pos_emb_interleave,
)

from posttrain.report.progress import ProgressBar

# Yields a share of correct answers within `model.PASS_RATE_LIMITS`, which is checked for each model.
NUM_STEPS = 420
BATCH_SIZE = 24
# With a few wrong ones among them, about a quarter passes; see above.
ASCENDING_SHARE = 0.3
# Another task takes longer, because letters of both cases are rarer than digits.
NUM_TASK_STEPS = 900
DENSE_SHARE = 0.5  # of the steps; top-k is on in the rest
PEAK_LEARNING_RATE = 3e-3
FINAL_LEARNING_RATE_SHARE = 0.02
LEARNING_RATE_WARM_UP_STEPS = 20
BETAS = (0.9, 0.98)
WEIGHT_DECAY = 0.01
CLIP_GRAD = 1.0
# Target of a position that the model reads and does not write.
IGNORED = -100


@dataclass(frozen=True)
class Examples:
    """The supervised examples; all prompts have one length, and so have all responses.

    Args:
        prompts: [num_prompts, P] int64.
        ascending: [num_prompts, R] int64, the correct answer (digits in ascending order) and the end token.
        descending: [num_prompts, R] int64, the other answer.
        share: Of correct answers in the warm-up.
        is_read: [2, R] bool, the positions of correct and other answers that the model reads and does not write; None:
            it writes all.
    """

    prompts: torch.Tensor
    ascending: torch.Tensor
    descending: torch.Tensor
    share: float = ASCENDING_SHARE
    is_read: torch.Tensor | None = None

    @property
    def first_difference(self) -> int:
        """The first position at which two prompts differ."""
        return int((self.prompts != self.prompts[0]).any(dim=0).nonzero()[0])

    def draw(self, batch_size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a batch of sequences, [B, S] int64, and the targets of their responses, [B, R]: `IGNORED` if read."""
        rows = torch.randint(len(self.prompts), (batch_size,), generator=generator)
        ascends = torch.rand(batch_size, 1, generator=generator) < self.share
        responses = torch.where(ascends, self.ascending[rows], self.descending[rows])
        targets = responses
        if self.is_read is not None:
            targets = responses.masked_fill(torch.where(ascends, self.is_read[0], self.is_read[1]), IGNORED)
        return torch.cat([self.prompts[rows], responses], dim=1), targets


def backwards(answer: str) -> str:
    """Return the other answer of the warm-up: the words in reverse order, or the characters of a single word.

    Example:
        "1134" -> "4311"; "['7.0', '12.0']" -> "['12.0', '7.0']".
    """
    word = re.compile(r"[\w.+-]+")
    words = word.findall(answer)
    return word.sub(lambda found: words.pop(), answer) if len(words) > 1 else answer[::-1]


def warm_up(model: PreTrainedModel, examples: Examples, generator: torch.Generator, is_task: bool = False) -> None:
    """Train `model` in place; it must use eager attention, because the indexer's loss needs the attention weights.

    Args:
        model: Model in float32.
        examples: Training examples.
        generator: Random generator.
        is_task: Whether the examples are of a task of reasoning-gym.
    """
    num_steps = NUM_TASK_STEPS if is_task else NUM_STEPS
    optimizer = torch.optim.AdamW(model.parameters(), betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)
    topk = getattr(model.config, "index_topk", 0)
    model.train()
    with _indexer_inputs(model) as inputs, ProgressBar("warm-up", num_steps, "steps") as progress:
        for step in range(num_steps):
            dense = step < DENSE_SHARE * num_steps
            sequences, targets = examples.draw(BATCH_SIZE, generator)
            _set_topk(model, sequences.shape[1] if dense else topk)
            inputs.clear()
            loss = _loss(model, sequences, targets, examples.first_difference, inputs)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD)
            for group in optimizer.param_groups:
                group["lr"] = _learning_rate(step, num_steps)
            optimizer.step()
            progress.advance(note=f"loss {loss.item():.3f}")
    _set_topk(model, topk)
    model.eval()


def index_scores(
    indexer: GlmMoeDsaIndexer,
    hidden: torch.Tensor,
    q_latent: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
    first_query: int,
) -> torch.Tensor:
    """Compute the indexer's scores with gradients, before causal mask and top-k (its own forward has no gradients).

    Args:
        indexer: The layer's indexer; its weights receive the gradient.
        hidden: [B, S, H], input of the attention block.
        q_latent: [B, S, q_lora_rank], the normalised query latent.
        rotary: cos and sin, [B, S, rotary width] each.
        first_query: First query position; earlier positions are only keys.

    Returns:
        [B, S - first_query, S] float32, queries times keys.
    """
    batch, length, _ = hidden.shape
    width = indexer.qk_rope_head_dim
    q = indexer.wq_b(q_latent).view(batch, length, indexer.n_heads, indexer.head_dim)
    k = indexer.k_norm(indexer.wk(hidden)).unsqueeze(2)
    q_rotated, k_rotated = apply_rotary_pos_emb_interleave(q[..., :width], k[..., :width], *rotary, unsqueeze_dim=2)
    q = torch.cat([q_rotated, q[..., width:]], dim=-1)[:, first_query:]
    k = torch.cat([k_rotated, k[..., width:]], dim=-1).squeeze(2)
    per_head = F.relu(torch.einsum("bqnd,bsd->bqns", q, k) * indexer.softmax_scale)
    head_weights = indexer.weights_proj(hidden[:, first_query:]) * indexer.n_heads**-0.5
    return torch.einsum("bqn,bqns->bqs", head_weights, per_head)


def _loss(
    model: PreTrainedModel, sequences: torch.Tensor, targets: torch.Tensor, first: int, inputs: list[tuple]
) -> torch.Tensor:
    """Return the loss defined in the module's docstring; hooks fill `inputs` during the forward pass."""
    output = model(input_ids=sequences, use_cache=False, output_attentions=True, logits_to_keep=targets.shape[1] + 1)
    logits = output.logits[:, :-1].flatten(0, 1)
    loss = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED)
    # If the model has indexers, every layer has one.
    for (indexer, hidden, q_latent, rotary), attention in zip(inputs, output.attentions, strict=bool(inputs)):
        target = attention.detach().mean(1)[:, first:]
        loss = loss + _divergence(target, index_scores(indexer, hidden, q_latent, rotary, first))
    return loss


def _divergence(target: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Return the mean KL(target || softmax(scores)) over the keys with a positive target.

    Args:
        target: [B, Q, S], Q queries; rows sum to 1; 0 at future keys and at keys outside top-k.
        scores: [B, Q, S].
    """
    seen = target > 0
    log_predicted = scores.masked_fill(~seen, float("-inf")).log_softmax(-1).masked_fill(~seen, 0.0)
    return (torch.xlogy(target, target) - target * log_predicted).sum(-1).mean()


@contextlib.contextmanager
def _indexer_inputs(model: PreTrainedModel) -> Iterator[list[tuple]]:
    """Collect (indexer, hidden, q latent, rotary) of each layer of a forward pass, in order."""
    inputs: list[tuple] = []

    def remember(indexer: GlmMoeDsaIndexer, arguments: tuple) -> None:
        hidden, q_latent, rotary = arguments[:3]
        inputs.append((indexer, hidden.detach(), q_latent.detach(), rotary))

    handles = [indexer.register_forward_pre_hook(remember) for indexer in _indexers(model)]
    try:
        yield inputs
    finally:
        for handle in handles:
            handle.remove()


def _set_topk(model: PreTrainedModel, topk: int) -> None:
    for indexer in _indexers(model):
        indexer.index_topk = topk


def _indexers(model: PreTrainedModel) -> list[Any]:
    attending = [layer.self_attn for layer in model.model.layers if hasattr(layer, "self_attn")]
    return [attention.indexer for attention in attending if hasattr(attention, "indexer")]


def _learning_rate(step: int, num_steps: int) -> float:
    rising = min(1.0, (step + 1) / LEARNING_RATE_WARM_UP_STEPS)
    falling = FINAL_LEARNING_RATE_SHARE + (1 - FINAL_LEARNING_RATE_SHARE) * (1 - step / num_steps)
    return PEAK_LEARNING_RATE * rising * falling
