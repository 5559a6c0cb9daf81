"""Episodes whose responses are fixed tokens, to be played by our loop and by others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.support.scripted_environments import ScriptedEnvironments

from posttrain.plan.resolve import resolve
from posttrain.rl.data.chat import ChatTokenizer
from posttrain.rl.engines.client import EngineClient
from posttrain.rl.engines.responses import GenerateRequest, GenerateResult
from posttrain.rl.environments.protocol import Message, Observation
from posttrain.rl.rollout.episode import Episode, EpisodeRunner
from posttrain.types import Prompt, VersionSpan

CONFIG = Path(__file__).parents[2] / "config"


@dataclass(frozen=True)
class Response:
    """A sampled response."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str = "stop"


@dataclass(frozen=True)
class ScriptedEpisode:
    """What is asked, answered and observed.

    Args:
        messages: The first ones.
        responses: In turn.
        observations: New messages after each response but the last.
        rewards: Of each turn but the last, and of the episode.
        tools: Schemas of functions.
    """

    messages: Sequence[dict[str, Any]]
    responses: Sequence[Response]
    observations: Sequence[Sequence[dict[str, Any]]]
    rewards: Sequence[float]
    tools: list[dict[str, Any]] | None = None

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Those of all sampled tokens."""
        return tuple(value for response in self.responses for value in response.logprobs)

    def as_json(self) -> dict[str, Any]:
        """Return it for a program without posttrain, with the rewards by name."""
        return asdict(self) | {"rewards": {f"turn {place}": value for place, value in enumerate(self.rewards)}}


def respond(chat: ChatTokenizer, *pieces: str) -> Response:
    """Return a response of which each piece is tokenised alone, with log-probabilities that are all different."""
    tokens = tuple(token for piece in pieces for token in chat.encode(piece))
    return Response(tokens, tuple(-0.123456789 - place / 128 for place in range(len(tokens))))


def play_ours(chat: ChatTokenizer, episode: ScriptedEpisode, history: str = "keep") -> Episode:
    """Return what `EpisodeRunner` makes of an episode."""

    def answer(number: int, action: Message) -> Observation:
        is_last = number == len(episode.responses) - 1
        messages = () if is_last else tuple(episode.observations[number])
        return Observation(messages, is_last, None if is_last else episode.rewards[number])

    async def sample(turn: int, request: GenerateRequest, engine: int | None) -> GenerateResult:
        response = episode.responses[turn]
        versions = (VersionSpan(turn, len(response.tokens)),)
        return GenerateResult(response.tokens, response.logprobs, response.finish_reason, turn, versions=versions)

    words = f"data.environment=calculator data.reward=environment environment.history={history}"
    settings = {"model": "qwen3_0.6b", "site": "local", "set": f"{words} rollout.max_response_tokens=4000"}
    config = resolve(settings, CONFIG).config
    environments = ScriptedEnvironments(answer, episode.tools, episode.rewards[-1])
    runner = EpisodeRunner(config, chat, environments, EngineClient(["http://none"], "", 1.0))
    return asyncio.run(runner.play(Prompt(0, tuple(episode.messages), ""), 0, sample))


def segments_of(episode: Episode) -> list[tuple[list[int], list[int]]]:
    """Return tokens and mask of each sequence that is trained on."""
    found, start = [], 0
    for length in episode.segment_lengths or (len(episode.tokens),):
        part = slice(start, start + length)
        found.append(([*episode.tokens[part]], [*episode.loss_mask[part]]))
        start += length
    return found
