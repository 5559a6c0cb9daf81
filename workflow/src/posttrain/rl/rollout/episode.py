"""Episodes: an agent acts in an environment, turn by turn, until one of them ends it.

A prompt with one response is an episode without an environment (`Episode.of_response`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from posttrain.config.environment import OWN_PARSER
from posttrain.config.schema import Config
from posttrain.errors import ConfigError
from posttrain.rl.data.chat import ChatTokenizer
from posttrain.rl.engines.responses import GenerateRequest, GenerateResult
from posttrain.rl.engines.routes import RoutesLayout
from posttrain.rl.environments.protocol import (
    EnvironmentFailure,
    Environments,
    EpisodeReward,
    Message,
    OpenEnvironment,
    Start,
)
from posttrain.rl.environments.tool_calls import parse_action
from posttrain.rl.rollout.conversation import Conversation
from posttrain.rl.rollout.response_limit import longest_response
from posttrain.store import parse_json
from posttrain.types import Prompt, VersionSpan

log = logging.getLogger(__name__)

# Tries to start an environment: a service may be busy, a worker process may die of another episode.
MOST_STARTS = 3
# Doubled before each: a service that is started again is away for some seconds.
START_PAUSE_SECONDS = 0.5
# Samples a response: the turn from 0, its request without a seed, and the number of the engine whose prefix cache has
# the earlier turns.
Respond = Callable[[int, GenerateRequest, int | None], Awaitable[GenerateResult]]
# Parses a text's calls of functions with a parser of the engine's; returns the rest of the text, and the calls.
ParseCalls = Callable[[str, Sequence[Mapping[str, Any]], str], Awaitable[tuple[str, Sequence[Mapping[str, Any]]]]]


@dataclass(frozen=True)
class Episode:
    """What was read and sampled for one trajectory, before it is graded.

    Args:
        tokens: See `Trajectory`, as the next four.
        loss_mask: One per token.
        logprobs: One per sampled token.
        versions: Of the sampled tokens.
        segment_lengths: Empty if there is one segment.
        finish_reason: "stop", or "length" if a limit ended the last response or the episode.
        last_response: The tokens of the last response.
        routes: Expert routes of each segment, [tokens, layers, experts per token]; empty if not requested.
        grade: What the environment says of it; None without an environment.
        parts: Numbers of the episode, by metric.
    """

    tokens: tuple[int, ...]
    loss_mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[VersionSpan, ...]
    finish_reason: str
    last_response: tuple[int, ...]
    segment_lengths: tuple[int, ...] = ()
    routes: tuple[np.ndarray, ...] = field(default=(), compare=False)
    grade: EpisodeReward | EnvironmentFailure | None = None
    parts: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def of_response(prompt_tokens: Sequence[int], response: GenerateResult) -> Episode:
        """Return the episode of a prompt with one response."""
        count = len(response.output_ids)
        return Episode(
            tokens=(*prompt_tokens, *response.output_ids),
            loss_mask=(0,) * len(prompt_tokens) + (1,) * count,
            logprobs=response.logprobs,
            versions=response.versions,
            finish_reason=response.finish_reason,
            last_response=response.output_ids,
            routes=() if response.routes is None else (response.routes,),
        )

    @staticmethod
    def not_begun(failure: EnvironmentFailure) -> Episode:
        """Return the episode of an environment that failed before anything was sampled; it is no trajectory."""
        return Episode((), (), (), (), "stop", (), grade=failure)


class EpisodeRunner:
    """Plays episodes.

    Args:
        config: The resolved configuration.
        tokenizer: Renders messages and decodes responses.
        environments: Opens environments.
        parse_calls: Parses tool calls if `environment.tool_call_parser` is one of the engine's; see
            `EngineClient.parse_tool_calls`.
        temperature: Of sampling; None: as in training.
        limits_prompts: The trainer's limits of prompts and of its context hold, too.
        routes: Layout in which engines report expert routes; None: they do not.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: ChatTokenizer,
        environments: Environments,
        parse_calls: ParseCalls,
        temperature: float | None = None,
        limits_prompts: bool = True,
        routes: RoutesLayout | None = None,
    ):
        self._limits_prompts, self._routes = limits_prompts, routes
        self._config, self._settings = config, config.environment
        self._temperature = config.rollout.temperature if temperature is None else temperature
        self._tokenizer, self._environments, self._parse_calls = tokenizer, environments, parse_calls

    async def play(self, prompt: Prompt, seed: int, respond: Respond) -> Episode:
        """Return a finished episode.

        Args:
            prompt: The environment's row.
            seed: The environment's.
            respond: Samples a response.

        Raises:
            EnvironmentFailure: The environment failed before the first response. Later failures are the episode's
                grade.
        """
        environment, start = await self._begin(prompt, seed)
        try:
            starts_segments = self._settings.history == "template"
            conversation = Conversation(self._tokenizer, start.messages, start.tools, starts_segments)
            longest = self._longest(prompt, conversation.num_prompt_tokens)
            return await self._play(environment, conversation, longest, respond)
        finally:
            await environment.close()

    def _longest(self, prompt: Prompt, num_prompt_tokens: int) -> int:
        """Return the limit for everything after the first prompt, whose length is the environment's choice."""
        if not self._limits_prompts:
            return self._config.rollout.max_response_tokens
        try:
            return longest_response(self._config, prompt.prompt_id, num_prompt_tokens)
        except ConfigError as error:
            told = "; ".join(f"{problem.key}={problem.value}: {problem.allowed}" for problem in error.problems)
            raise EnvironmentFailure("error", f"what reset returns is too long: {told}") from error

    async def _begin(self, prompt: Prompt, seed: int) -> tuple[OpenEnvironment, Start]:
        """Return an environment that has begun. Nothing is sampled yet, so another try is as good as the first."""
        for num_failed in itertools.count(1):
            environment = None
            try:
                environment = await self._environments.open(seed)
                return environment, await environment.reset(row_of(prompt))
            except BaseException as error:
                if environment:
                    await environment.close()
                if num_failed == MOST_STARTS or not isinstance(error, EnvironmentFailure):
                    raise
                log.warning("prompt %d: %s; its environment is started again", prompt.prompt_id, error)
                await asyncio.sleep(START_PAUSE_SECONDS * 2**num_failed)
        raise AssertionError("unreachable")

    async def _play(
        self, environment: OpenEnvironment, conversation: Conversation, longest: int, respond: Respond
    ) -> Episode:
        played = _Played(conversation)
        end = ""
        while not end:
            request = self._request(conversation, longest)
            began = time.perf_counter()
            response = await respond(played.num_turns, request, played.engine)
            played.note_response(request, response, time.perf_counter() - began)
            try:
                action = await self._read(response, conversation.tools)
            except EnvironmentFailure as failure:
                conversation.add_response(response, {"role": "assistant", "content": ""})
                return played.episode("stop", failure)
            conversation.add_response(response, action)
            try:
                is_cut = response.finish_reason == "length"
                end = "truncated" if is_cut else await self._step(environment, action, played, longest)
            except EnvironmentFailure as failure:
                return played.episode("stop", failure)
        finish_reason = "stop" if end in ("done", "turns") else "length"
        return played.episode(finish_reason, await _reward(environment, played, end))

    async def _step(self, environment: OpenEnvironment, action: Message, played: _Played, longest: int) -> str:
        """Let the environment answer an action; returns why the episode has ended, "" if it goes on."""
        began = time.perf_counter()
        observation = await environment.step(action)
        played.note_observation(action, observation.reward, time.perf_counter() - began)
        conversation = played.conversation
        if observation.done or played.num_turns >= self._settings.max_turns:
            # No response follows, so that the tokens of these messages are not needed.
            conversation.messages += map(dict, observation.messages)
            return "done" if observation.done else "turns"
        conversation.add_messages(observation.messages)
        return "" if len(conversation.tokens) - conversation.num_prompt_tokens < longest else "tokens"

    async def _read(self, response: GenerateResult, tools: Sequence[Mapping[str, Any]] | None) -> Message:
        """Return what a response says, as a message."""
        text, parser = self._tokenizer.text_of_turn(response.output_ids), self._settings.tool_call_parser
        if parser == OWN_PARSER or not tools:
            return parse_action(text, tools)
        action = parse_action(text, None)
        content, calls = await self._parse_calls(action["content"], tools, parser)
        called = [_call(number, call["name"], call["parameters"]) for number, call in enumerate(calls)]
        return {**action, "content": content} | ({"tool_calls": called} if called else {})

    def _request(self, conversation: Conversation, longest: int) -> GenerateRequest:
        room = longest - (len(conversation.tokens) - conversation.num_prompt_tokens)
        return GenerateRequest(
            input_ids=conversation.tokens,
            sampling_seed=0,
            max_new_tokens=min(room, self._settings.max_turn_tokens or room),
            temperature=self._temperature,
            routes=self._routes,
        )


class _Played:
    """What has happened in an episode so far."""

    def __init__(self, conversation: Conversation):
        self.conversation = conversation
        self.num_turns = self.num_calls = self.num_read = self.num_cached = 0
        self.engine_seconds = self.environment_seconds = 0.0
        self.turn_rewards = list[float]()
        self.last_response: tuple[int, ...] = ()
        self.engine: int | None = None

    def note_response(self, request: GenerateRequest, response: GenerateResult, seconds: float) -> None:
        self.num_turns += 1
        self.num_read += len(request.input_ids)
        self.num_cached += response.num_cached
        self.engine_seconds += seconds
        self.last_response, self.engine = response.output_ids, response.engine

    def note_observation(self, action: Message, reward: float | None, seconds: float) -> None:
        self.num_calls += len(action.get("tool_calls") or ())
        self.environment_seconds += seconds
        self.turn_rewards += [] if reward is None else [reward]

    def episode(self, finish_reason: str, grade: EpisodeReward | EnvironmentFailure) -> Episode:
        """Return the finished episode, without what was read after the last sampled token of each segment."""
        segments = [segment.until_last_sampled() for segment in self.conversation.segments]
        kept = [segment for segment in segments if segment.tokens]
        return Episode(
            tokens=tuple(token for segment in kept for token in segment.tokens),
            loss_mask=tuple(mark for segment in kept for mark in segment.loss_mask),
            logprobs=tuple(self.conversation.logprobs),
            versions=tuple(self.conversation.versions),
            segment_lengths=tuple(len(segment.tokens) for segment in kept) if len(kept) > 1 else (),
            finish_reason=finish_reason,
            last_response=self.last_response,
            routes=tuple(segment.routes for segment in kept if segment.routes is not None),
            grade=grade,
            parts={
                "episode/turns": self.num_turns,
                "episode/tool_calls": self.num_calls,
                "episode/segments": len(kept),
                "episode/observed_tokens": self.conversation.num_observed,
                "perf/engine_seconds": self.engine_seconds,
                "perf/environment_seconds": self.environment_seconds,
                "perf/prefix_hit_rate": self.num_cached / self.num_read,
            },
        )


async def _reward(environment: OpenEnvironment, played: _Played, end: str) -> EpisodeReward | EnvironmentFailure:
    """Return the environment's grade, with the rewards of the turns added."""
    told = {"messages": played.conversation.messages, "num_turns": played.num_turns, "end": end}
    try:
        graded = await environment.reward(told)
    except EnvironmentFailure as failure:
        return failure
    if not played.turn_rewards:
        return graded
    of_turns = sum(played.turn_rewards)
    return EpisodeReward(graded.reward + of_turns, {**graded.parts, "turn_rewards": of_turns})


def _call(number: int, name: str, arguments: str) -> dict[str, Any]:
    """Return a call of SGLang's parser in the form of `Environment.step`."""
    with contextlib.suppress(ValueError):
        if isinstance(parsed := parse_json(arguments, finite=True), dict):
            return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": parsed}}
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def row_of(prompt: Prompt) -> dict[str, Any]:
    """Return the row that an environment is reset with."""
    tools = {"tools": prompt.tools} if prompt.tools else {}
    return {**prompt.columns, **tools, "messages": [*prompt.messages], "label": prompt.label}
