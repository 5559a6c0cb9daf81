"""Prefill and decode of one batch over a `transformers` model.

A batch is a function of its rows and the weights. Its composition determines the last bits of the
log-probabilities, so the caller chooses it, and running it again gives the same bits.

Rows with the same prompt (the samples of a group) share one prefill: the prompt's keys and values are
computed once and copied to each row. Prompts are padded on the left; padding is masked for every real query
and sees only itself, so no softmax row is empty. When a quarter of the rows have finished, the batch is
compacted to the rest.

Weights may change between two tokens. Then the cache is either kept, or dropped and computed again from prompts and
responses so far. Every token keeps the version of the weights that computed it.

A row may request log-probabilities of its prompt tokens, and the top tokens at every position. Both come from the same
forward passes and do not change the samples.

Shapes: B rows, U distinct prompts, S longest prompt, T tokens in the cache, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from posttrain.rl.engines.embedded.requests import Row
from posttrain.rl.engines.embedded.routes import RouteRecorder
from posttrain.rl.engines.embedded.sampling import RowSampler

# Prompt positions whose logits exist at a time.
SCORED_AT_A_TIME = 256
# Compacting the batch copies the cache; it pays off once this share of the rows has finished.
COMPACT_WHEN_FINISHED = 0.25
# Keys of transformers' masks by kind of layer.
INDEXED, FULL, LINEAR = "indexed_attention", "full_attention", "linear_attention"


# The top tokens at one position, with their log-probabilities.
Alternatives = list[tuple[int, float]]


@dataclass(frozen=True)
class PromptScores:
    """Log-probabilities of a prompt's tokens from the second on.

    Args:
        logprobs: The log-probability of each at temperature 1, float32 as Python floats.
        alternatives: Top tokens at each position, most likely first.
    """

    logprobs: list[float]
    alternatives: list[Alternatives]


@dataclass
class Response:
    """A row's response so far.

    Args:
        row: The request.
        output_ids: Tokens, the end token included.
        logprobs: The float32 log-probability of each, as Python floats.
        versions: Version of the weights that computed each token.
        finish_reason: None while it runs; then SGLang's object, {"type": "stop" | "length" | "abort"}.
        alternatives: Top tokens at each output position, most likely first, if requested.
        prompt_scores: Scores of the prompt's tokens from the second on, if requested.
        routes: Expert routes of the tokens read so far, chunks of [tokens, layers, experts per token], if requested.
    """

    row: Row
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str | None] = field(default_factory=list)
    finish_reason: dict[str, Any] | None = None
    alternatives: list[Alternatives] = field(default_factory=list)
    prompt_scores: PromptScores | None = None
    routes: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.finish_reason is None and not self.row.max_new_tokens:
            self.finish_reason = {"type": "length", "length": 0}

    @property
    def context(self) -> tuple[int, ...]:
        """Prompt and tokens so far."""
        return (*self.row.input_ids, *self.output_ids)

    def append(self, token: int, logprob: float, version: str | None) -> None:
        """Add a token, and finish the response if it is the last."""
        self.output_ids.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if token in self.row.stop_token_ids:
            self.finish_reason = {"type": "stop", "matched": token}
        elif self.row.stop_texts and (text := self.row.stop_texts(self.output_ids)):
            self.finish_reason = {"type": "stop", "matched": text}
        elif len(self.output_ids) == self.row.max_new_tokens:
            self.finish_reason = {"type": "length", "length": self.row.max_new_tokens}


def generate(
    model: Any,
    rows: Sequence[Row],
    after_step: Callable[[list[Response]], bool],
    weight_version: Callable[[], str | None] = lambda: None,
) -> list[Response]:
    """Generate one response per row.

    Args:
        model: A `transformers` causal language model on the CPU.
        rows: The batch.
        after_step: Called with all responses after every token; may wait while weights change, and may finish responses
            ("abort"). Returns whether the cache must be computed again.
        weight_version: Returns the version of the present weights.

    Returns:
        The responses, in the order of the rows.
    """
    responses = [Response(row) for row in rows]
    recorder = RouteRecorder(model) if any(row.tells_routes for row in rows) else None
    with torch.inference_mode(), recorder or nullcontext():
        batch = _Batch(model, responses, recorder, weight_version)
        logits = batch.prefill()
        while True:
            batch.sample(logits)
            is_stale = after_step(responses)
            if not batch.drop_finished(at_once=is_stale):
                return responses
            logits = batch.recompute() if is_stale else batch.decode()


class _Batch:
    """The running rows, with their cache, masks and random numbers."""

    def __init__(
        self,
        model: Any,
        responses: Sequence[Response],
        recorder: RouteRecorder | None,
        weight_version: Callable[[], str | None],
    ):
        self._model, self._recorder, self._weight_version = model, recorder, weight_version
        self._live = list(responses)
        self._cache = DynamicCache(config=model.config)
        self._sampler = RowSampler(
            [response.row.sampling_seed for response in responses],
            [response.row.temperature for response in responses],
            [response.row.top_p for response in responses],
        )
        self._tokens = torch.empty(0, dtype=torch.int64)

    def prefill(self) -> torch.Tensor:
        """Prefill the distinct prompts, copy their cache to the rows, and return the next-token logits [B, V]."""
        logits, hidden = self._read_contexts()
        self._score_prompts(hidden)
        return logits

    def recompute(self) -> torch.Tensor:
        """Drop the cache, read prompts and responses so far again, and return the next-token logits [B, V]."""
        self._cache = DynamicCache(config=self._model.config)
        return self._read_contexts()[0]

    def _read_contexts(self) -> tuple[torch.Tensor, dict[tuple[int, ...], torch.Tensor]]:
        """Fill the empty cache with every row's tokens; returns logits [B, V] and the hidden states per context."""
        contexts = [response.context for response in self._live]
        prompts = list(dict.fromkeys(contexts))
        longest = max(map(len, prompts))
        tokens = torch.tensor([(0,) * (longest - len(prompt)) + prompt for prompt in prompts])
        self._real = torch.tensor([[False] * (longest - len(prompt)) + [True] * len(prompt) for prompt in prompts])
        self._positions = (self._real.cumsum(-1) - 1).clamp(min=0)
        hidden = self._forward(tokens)
        logits = self._model.lm_head(hidden[:, -1])
        place = {prompt: index for index, prompt in enumerate(prompts)}
        places = [place[context] for context in contexts]
        self._tell_routes(places, len(prompts))
        self._keep(torch.tensor(places))
        self._positions = self._positions[:, -1:]
        return logits[places], dict(zip(prompts, hidden, strict=True))

    def decode(self) -> torch.Tensor:
        """Append the sampled tokens to the cache and return the logits after them, [B, V]."""
        self._real = torch.cat([self._real, torch.ones(len(self._live), 1, dtype=torch.bool)], dim=1)
        self._positions = self._positions + 1
        hidden = self._forward(self._tokens[:, None])
        self._tell_routes(range(len(self._live)), len(self._live))
        return self._model.lm_head(hidden[:, -1])

    def sample(self, logits: torch.Tensor) -> None:
        """Sample a token for every row; finished rows that are still in the batch discard theirs."""
        self._tokens, logprobs = self._sampler.sample(logits)
        most = max(response.row.num_alternatives for response in self._live)
        likeliest = _likeliest(self._sampler.distribution(logits), most) if most else None
        for place, (token, logprob) in enumerate(zip(self._tokens.tolist(), logprobs.tolist(), strict=True)):
            response = self._live[place]
            if response.finish_reason is None:
                response.append(token, logprob, self._version)
                if likeliest:
                    response.alternatives.append(likeliest[place][: response.row.num_alternatives])

    def drop_finished(self, at_once: bool = False) -> bool:
        """Compact the batch if enough rows have finished, or `at_once`; returns False if all have finished."""
        kept = [index for index, response in enumerate(self._live) if response.finish_reason is None]
        if kept and (at_once or len(self._live) - len(kept) >= COMPACT_WHEN_FINISHED * len(self._live)):
            self._live = [self._live[index] for index in kept]
            self._sampler.keep(kept)
            self._tokens = self._tokens[kept]
            self._keep(torch.tensor(kept))
        return bool(kept)

    def _tell_routes(self, places: Sequence[int], num_rows: int) -> None:
        """Append the last pass's routes to each running response; `places` are their rows in that pass."""
        if not self._recorder:
            return
        routes = self._recorder.take(num_rows)
        for response, place in zip(self._live, places, strict=True):
            if response.finish_reason is None:
                told = routes[place]
                if len(told) > 1:  # everything is read, at first or again
                    response.routes = [told[-len(response.context) :]]
                else:
                    response.routes.append(told)

    def _score_prompts(self, hidden: dict[tuple[int, ...], torch.Tensor]) -> None:
        """Set the prompt scores of each response that requests them; `hidden` is [S, H] per prompt."""
        wanted: dict[tuple[int, ...], int] = {}
        for row in (response.row for response in self._live if response.row.scores_prompt):
            wanted[row.input_ids] = max(wanted.get(row.input_ids, 0), row.num_alternatives)
        scores = {prompt: self._scores(prompt, hidden[prompt], most) for prompt, most in wanted.items()}
        for response in self._live:
            if response.row.scores_prompt:
                found, most = scores[response.row.input_ids], response.row.num_alternatives
                response.prompt_scores = PromptScores(found.logprobs, [place[:most] for place in found.alternatives])

    def _scores(self, prompt: tuple[int, ...], hidden: torch.Tensor, most: int) -> PromptScores:
        scores = PromptScores([], [])
        # Skip the padding before the prompt, and its last token, which predicts the response.
        before, targets = hidden[len(hidden) - len(prompt) : -1], torch.tensor(prompt[1:])
        for start in range(0, len(targets), SCORED_AT_A_TIME):
            places = slice(start, start + SCORED_AT_A_TIME)
            logprobs = torch.log_softmax(self._model.lm_head(before[places]).float(), dim=-1)
            scores.logprobs.extend(logprobs.gather(1, targets[places, None])[:, 0].tolist())
            scores.alternatives.extend(_likeliest(logprobs, most))
        return scores

    def _keep(self, rows: torch.Tensor) -> None:
        """Select `rows` (which may repeat) in the cache, the mask and the positions."""
        self._cache.reorder_cache(cast(torch.LongTensor, rows))
        self._real, self._positions = self._real[rows], self._positions[rows]

    def _forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the last layer's output for `tokens` [B, Q], as [B, Q, H]."""
        self._version = self._weight_version()
        return self._model.model(
            input_ids=tokens,
            attention_mask=self._mask(tokens.shape[1]),
            position_ids=self._positions,
            past_key_values=self._cache,
            use_cache=True,
        ).last_hidden_state

    def _mask(self, num_queries: int) -> Any:
        """Return the masks in the form that the model takes, for the last `num_queries` positions.

        A gated delta net multiplies its input by a mask of 0 and 1, so padding before a prompt leaves convolution and
        recurrent state as empty as they are without it. Tokens that are decoded are no padding.
        """
        mask = _additive_mask(self._real, num_queries=num_queries, dtype=self._model.dtype)
        if hasattr(self._model.config, "index_topk"):
            return {INDEXED: mask}
        if LINEAR in (getattr(self._model.config, "layer_types", None) or ()):
            is_padded = num_queries > 1 and not self._real.all()
            return {FULL: mask, LINEAR: self._real[:, -num_queries:] if is_padded else None}
        return mask


def _likeliest(logprobs: torch.Tensor, count: int) -> list[Alternatives]:
    """Return the top tokens of each row of [B, V]."""
    values, tokens = logprobs.topk(min(count, logprobs.shape[-1]))
    return [list(zip(ids, row, strict=True)) for ids, row in zip(tokens.tolist(), values.tolist(), strict=True)]


def _additive_mask(real: torch.Tensor, num_queries: int, dtype: torch.dtype) -> torch.Tensor:
    """Return an additive mask: 0 for visible keys and the dtype's minimum elsewhere.

    Args:
        real: [B, T] bool, False on padding.
        num_queries: Q; the queries are the last Q positions.
        dtype: Dtype of the activations.

    Returns:
        [B, 1, Q, T]: each query sees the non-padding keys up to it, and always itself.
    """
    keys = torch.arange(real.shape[1])
    queries = keys[-num_queries:, None]
    visible = ((keys <= queries) & real[:, None, :]) | (keys == queries)
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)[:, None]
