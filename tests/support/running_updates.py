"""Requests whose weights change while they run, and the log-probabilities that their tokens should have."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from posttrain.rl.engines.client import EngineClient
from posttrain.rl.engines.responses import GenerateRequest, GenerateResult
from posttrain.types import VersionSpan


@dataclasses.dataclass
class Sampled:
    """A response, made by one request or, where pauses abort them, by several.

    Args:
        prompt: Its prompt.
        answers: The requests' results.
    """

    prompt: list[int]
    answers: list[GenerateResult] = dataclasses.field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [token for answer in self.answers for token in answer.output_ids]

    @property
    def logprobs(self) -> torch.Tensor:
        return torch.tensor([logprob for answer in self.answers for logprob in answer.logprobs])

    @property
    def spans(self) -> list[VersionSpan]:
        return [span for answer in self.answers for span in answer.versions]


async def sample_to_its_end(client: EngineClient, prompt: Sequence[int], length: int, seed: int) -> Sampled:
    """Sample a response, and go on where a pause aborts it."""
    made = Sampled([*prompt])
    while len(made.tokens) < length:
        left = length - len(made.tokens)
        request = GenerateRequest([*prompt, *made.tokens], seed, left, ignore_eos=True)
        made.answers.append(await client.sample(request))
        assert made.answers[-1].finish_reason == "abort" or len(made.tokens) == length
        seed += 1
    return made


def random_prompts(count: int, vocab_size: int, length: int = 9) -> list[list[int]]:
    drawn = random.Random(3)
    return [[drawn.randrange(5, vocab_size) for _ in range(length)] for _ in range(count)]


@torch.no_grad()
def fresh_logprobs(models: Mapping[int | None, Any], made: Sampled) -> torch.Tensor:
    """Return each token's log-probability in one pass of its version's weights over all that precedes it."""
    tokens, prompt, found, start = torch.tensor([made.prompt + made.tokens]), len(made.prompt), [], 0
    for span in made.spans:
        logprobs = torch.log_softmax(models[span.version](tokens).logits[0].float(), dim=-1)
        places = range(prompt + start, prompt + start + span.num_tokens)
        found += [logprobs[place - 1, tokens[0, place]] for place in places]
        start += span.num_tokens
    return torch.stack(found)


@torch.no_grad()
def kept_cache_logprobs(models: Mapping[int | None, Any], made: Sampled) -> torch.Tensor:
    """Return each token's log-probability where the cache of earlier tokens is that of earlier weights.

    The pass that samples a token is also the one that puts the token before it into the cache.
    """
    tokens, prompt, found, start, cache = made.prompt + made.tokens, len(made.prompt), [], 0, None
    for span in made.spans:
        begin = prompt + start - 1 if start else 0
        end = prompt + start + span.num_tokens - 1
        given = torch.tensor([tokens[begin:end]])
        output = models[span.version](given, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logprobs = torch.log_softmax(output.logits[0, -span.num_tokens :].float(), dim=-1)
        found += [logprobs[place, token] for place, token in enumerate(tokens[end + 1 - span.num_tokens : end + 1])]
        start += span.num_tokens
    return torch.stack(found)
