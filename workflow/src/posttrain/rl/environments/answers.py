"""Checks what environments answer, whatever process or service it comes from."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from posttrain.errors import one_line
from posttrain.rl.data.messages import TEXT_ALONE, media_in, tools_of, why_no_calls
from posttrain.rl.environments.protocol import EnvironmentFailure, EpisodeReward, Message, Observation, Start
from posttrain.rl.reward.job import checked_metric, checked_metrics

OBSERVED_ROLES = ("system", "user", "tool")
ROLES = (*OBSERVED_ROLES, "assistant")
MAX_SHOWN_CHARACTERS = 200
T = TypeVar("T")


def _checked(read: Callable[[Mapping[str, Any]], T]) -> Callable[[Any], T]:
    """Make a reader raise `EnvironmentFailure` for every wrong answer."""

    @functools.wraps(read)
    def checked(content: Any) -> T:
        try:
            if not isinstance(content, Mapping):
                raise ValueError(f"the answer is {_shown(content)}, expected an object")
            return read(content)
        except (TypeError, ValueError, RecursionError) as error:
            raise EnvironmentFailure("error", one_line(error)) from error

    return checked


@_checked
def start_of(content: Mapping[str, Any]) -> Start:
    """Read the answer to `reset`: {"messages", "tools"}.

    Raises:
        EnvironmentFailure: It is something else.
    """
    messages = _messages(content, ROLES)
    if not messages:
        raise ValueError("reset returned no messages")
    return Start(messages, tools_of(content.get("tools")))


@_checked
def observation_of(content: Mapping[str, Any]) -> Observation:
    """Read the answer to `step`: {"messages", "done", "reward"}.

    Raises:
        EnvironmentFailure: It is something else.
    """
    messages, done, reward = _messages(content, OBSERVED_ROLES), content.get("done"), content.get("reward")
    if not isinstance(done, bool):
        raise ValueError(f"'done' is {_shown(done)}, expected true or false")
    if not messages and not done:
        raise ValueError("step returned no messages, but the episode has not ended")
    return Observation(messages, done, None if reward is None else _number("reward", reward))


@_checked
def reward_of(content: Mapping[str, Any]) -> EpisodeReward:
    """Read the answer to `reward`: {"reward", "parts"}.

    Raises:
        EnvironmentFailure: It is something else.
    """
    parts = content.get("parts") or {}
    if not isinstance(parts, Mapping):
        raise ValueError(f"'parts' is {_shown(parts)}, expected numbers by name")
    numbers = {name: _number(name, value) for name, value in checked_metrics(parts).items()}
    return EpisodeReward(_number("reward", content.get("reward")), numbers)


@_checked
def actions_of(content: Mapping[str, Any]) -> tuple[Message, ...]:
    """Read the answer to `perfect`: {"messages"}.

    Raises:
        EnvironmentFailure: It is something else.
    """
    messages = _messages(content, ("assistant",))
    if not messages:
        raise ValueError("perfect returned no messages")
    return messages


def _messages(content: Mapping[str, Any], roles: Sequence[str]) -> tuple[Message, ...]:
    messages = content.get("messages")
    if not isinstance(messages, list):
        raise ValueError(f"'messages' is {_shown(messages)}, expected a list of messages")
    for number, message in enumerate(messages, start=1):
        if reason := _why_no_message(message, roles):
            raise ValueError(f"message {number} {reason}")
    json.dumps(messages, allow_nan=False)
    return tuple(messages)


def _why_no_message(message: Any, roles: Sequence[str]) -> str:
    """Return what is wrong with a message, if anything; a tool may answer with an empty text."""
    if not isinstance(message, dict):
        return f"is {_shown(message)}, expected an object"
    role, content, calls = (message.get(name) for name in ("role", "content", "tool_calls"))
    if role not in roles:
        return f"has {_shown(role)} as 'role', expected one of {', '.join(roles)}"
    if calls is not None and (reason := why_no_calls(calls)):
        return f"({role}): {reason}"
    if isinstance(content, str) or (calls and content is None):
        return ""
    if media := media_in(content):
        return f"({role}) has {media} in 'content': {TEXT_ALONE}"
    return f"({role}) has {_shown(content)} as 'content', expected a text"


def _number(name: str, value: Any) -> float:
    if not isinstance(value, int | float):
        raise ValueError(f"{name!r} is {_shown(value)}, expected a number")
    return checked_metric(name, value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}..."
