"""KL divergence of quantised weights from the original: over the whole vocabulary in FP32, and between engines.

    KL(p || q) = sum_v p(v) (log p(v) - log q(v))     p of the original's weights, q of the quantised ones

at every token of the original's responses. Codes are dequantised and activations stay in FP32, so this measures only
the weights; an engine that also quantises activations adds to it.

Engines only return their likeliest tokens. Let S be the tokens that both engines return at a position, and R one event
for all other tokens:

    KL_S(p || q) = sum_{v in S} p(v) (log p(v) - log q(v)) + p(R) (log p(R) - log q(R))

All terms are known. By the data-processing inequality this is at most the full KL, and equal to it if R is empty. It
includes weights, kernels and the engine's activation precision. Source: Cover and Thomas, Elements of Information
Theory, theorem 2.7.1 (log sum inequality).

Only one decoder layer is in memory at a time: all sequences pass through it before the next is read. GLM-5's largest
layer takes 39 GB in FP32, the whole model 3 TB.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from posttrain.checkpoint.formats.hf_layout import read_object
from posttrain.checkpoint.quantization.dequantize import QuantizedCheckpoint
from posttrain.config.families import FAMILIES
from posttrain.errors import CheckpointError
from posttrain.report.progress import ProgressBar
from posttrain.rl.engines.embedded.model import build_model
from posttrain.rl.engines.embedded.stable_topk import make_indexers_stable
from posttrain.rl.engines.embedded.weights import views_by_hub_name

HEAD = "lm_head.weight"
# Rows of logits at a time; 160 MB with GLM-5's 154,880 tokens.
ROWS_AT_A_TIME = 256
# Engines return float32, so a smaller remaining probability is rounding.
TINY = 1e-7


@dataclass(frozen=True)
class Sample:
    """A prompt and its response.

    Args:
        tokens: Token ids of prompt and response.
        num_prompt_tokens: Number of prompt tokens.
    """

    tokens: tuple[int, ...]
    num_prompt_tokens: int


@dataclass(frozen=True)
class Divergence:
    """The divergence that quantisation caused in the next-token distribution.

    Args:
        mean: KL per token of the responses, in nats.
        p99: 99th percentile of the KL per token.
        largest: Maximum of the KL per token.
        same_first: Fraction of tokens with the same likeliest token.
        num_tokens: Number of compared tokens.
        covered: Fraction of the original's probability on individually compared tokens; 1 over the whole vocabulary.
    """

    mean: float
    p99: float
    largest: float
    same_first: float
    num_tokens: int
    covered: float = 1.0


@dataclass(frozen=True)
class Likeliest:
    """An engine's likeliest tokens at N positions.

    Args:
        tokens: Token ids [N, K] int, likeliest first.
        logprobs: Their log-probabilities [N, K] float.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor


class CheckpointLogprobs:
    """A checkpoint's final hidden states for sequences, and their log-probabilities.

    Args:
        folder: Checkpoint in Hub layout, in BF16, FP32 or a format of `QuantizedCheckpoint`.
        sequences: Sequences of any lengths.
        device: Device that computes the layers.

    Raises:
        CheckpointError: A weight is missing or has the wrong shape.
    """

    def __init__(self, folder: Path, sequences: Sequence[Sample], device: str = "cpu"):
        self._weights, self._device = QuantizedCheckpoint(folder), device
        with torch.device("meta"):
            model = build_model(folder, torch.float32)
        make_indexers_stable(model)
        self._prefix = FAMILIES[read_object(folder / "config.json")["model_type"]].text_prefix
        # A stored copy of a tied output matrix may be outdated, so use the embedding.
        self.head = self._tensor(f"{self._prefix}embed_tokens.weight" if model.config.tie_word_embeddings else HEAD)
        self.hidden = self._forward(model, sequences)

    def logprobs(self, rows: slice) -> torch.Tensor:
        """Return log-probabilities of all tokens after some positions, [R, V] float32."""
        return torch.log_softmax(self.hidden[rows].to(self._device) @ self.head.T, dim=-1)

    @torch.inference_mode()
    def _forward(self, model: Any, sequences: Sequence[Sample]) -> torch.Tensor:
        """Return the hidden states that predict response tokens, [N, H] float32 on the host."""
        inner = model.model
        inner.rotary_emb = type(inner.rotary_emb)(config=model.config).to(self._device)
        for name in ("embed_tokens", "norm"):
            self._fill(getattr(inner, name), f"{self._prefix}{name}.")
        longest = max(len(one.tokens) for one in sequences)
        # Attention is causal, so the padding after a sequence does not affect its tokens.
        padded = torch.tensor([[*one.tokens, *(0,) * (longest - len(one.tokens))] for one in sequences])
        with ProgressBar("layers in FP32", len(inner.layers), "layers") as progress:
            for number, layer in enumerate(inner.layers):
                layer.forward = functools.partial(self._through, layer, layer.forward, number, progress.advance)
            found = inner(input_ids=padded.to(self._device), use_cache=False).last_hidden_state
        told = [
            found[place, one.num_prompt_tokens - 1 : len(one.tokens) - 1].cpu() for place, one in enumerate(sequences)
        ]
        return torch.cat(told)

    def _through(
        self,
        layer: Any,
        forward: Callable[..., Any],
        number: int,
        advance: Callable[[], None],
        *given: Any,
        **named: Any,
    ) -> Any:
        """Load a layer, run it on each sequence separately, and free its memory."""
        self._fill(layer, f"{self._prefix}layers.{number}.")
        count = given[0].shape[0]
        answers = [forward(*_row(given, row, count), **_row(named, row, count)) for row in range(count)]
        layer.to("meta")
        advance()
        return pytree.tree_map(lambda *rows: torch.cat(rows) if rows[0] is not None else None, *answers)

    def _fill(self, module: Any, prefix: str) -> None:
        module.to_empty(device=self._device)
        named = {prefix + name: tensor for name, tensor in module.state_dict(keep_vars=True).items()}
        for name, view in views_by_hub_name(named).items():
            view.copy_(self._tensor(name, tuple(view.shape)))

    def _tensor(self, name: str, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        if name not in self._weights.names:
            raise CheckpointError("no-such-tensor", f"{self._weights.reader.folder}: {name} is missing")
        found = self._weights.shape(name)
        if shape is not None and found != shape:
            raise CheckpointError(
                "tensor-shape", f"{self._weights.reader.folder}: {name} has shape {found}, the model's is {shape}"
            )
        return self._weights.tensor(name).float().to(self._device)


@torch.inference_mode()
def divergence(original: CheckpointLogprobs, other: CheckpointLogprobs) -> Divergence:
    """Compare two checkpoints token by token on the same sequences."""
    found, same = [], 0
    for start in range(0, len(original.hidden), ROWS_AT_A_TIME):
        rows = slice(start, start + ROWS_AT_A_TIME)
        ours, theirs = original.logprobs(rows), other.logprobs(rows)
        # Rounding may make a sum of cancelling terms negative.
        found.append((ours.exp() * (ours - theirs)).sum(dim=-1).clamp_min(0).double())
        same += int((ours.argmax(dim=-1) == theirs.argmax(dim=-1)).sum())
    return _summary(torch.cat(found), same)


def truncated_divergence(original: Likeliest, other: Likeliest) -> Divergence:
    """Compare two engines' likeliest tokens at the same positions; see the module docstring.

    Example:
        (a 0.6, b 0.3) and (a 0.5, c 0.4): 0.6 log(0.6 / 0.5) + 0.4 log(0.4 / 0.5).
    """
    ours, theirs = original.logprobs.double(), other.logprobs.double()
    is_same = original.tokens[:, :, None] == other.tokens[:, None, :]
    both, matched = is_same.any(dim=2), (theirs[:, None, :].exp() * is_same).sum(dim=2)
    zero = torch.zeros((), dtype=torch.float64)
    each = torch.where(both, ours.exp() * (ours - matched.clamp_min(TINY).log()), zero).sum(dim=1)
    seen = torch.where(both, ours.exp(), zero).sum(dim=1)
    left, others_left = 1 - seen, (1 - torch.where(both, matched, zero).sum(dim=1)).clamp_min(TINY)
    tail = torch.where(left > TINY, left * (left.clamp_min(TINY).log() - others_left.log()), zero)
    same = int((original.tokens[:, 0] == other.tokens[:, 0]).sum())
    return replace(_summary((each + tail).clamp_min(0), same), covered=float(seen.mean()))


def _summary(nats: torch.Tensor, same_first: int) -> Divergence:
    p99 = float(nats.sort().values[max(-(-99 * len(nats) // 100) - 1, 0)])
    return Divergence(float(nats.mean()), p99, float(nats.max()), same_first / len(nats), len(nats))


def _row(given: Any, row: int, count: int) -> Any:
    """Return one sequence's part of a batch."""
    return pytree.tree_map(
        lambda value: (
            value[row : row + 1] if isinstance(value, torch.Tensor) and value.shape[:1] == (count,) else value
        ),
        given,
    )
