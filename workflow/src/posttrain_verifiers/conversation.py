"""Translates between the messages of OpenAI's chat completions and those of posttrain's environments."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]


class Conversation:
    """What an agent has read and said in an episode.

    An agent's calls have names that are unique in a message. Here they are unique in the episode, as chats ask.
    """

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._numbers = itertools.count()
        self._call_ids: dict[str, str] = {}

    def read(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Return what is new in a request to the model.

        Args:
            messages: All of the request.

        Raises:
            ValueError: It does not go on from what the agent has read and said, or has more than text.
        """
        given, known = list(map(text_message, messages)), len(self._messages)
        for before, now in zip(self._messages, given, strict=False):
            if _identity(before) != _identity(now):
                raise ValueError(f"the harness has changed an earlier message ({before['role']})")
        new = given[known:]
        if not new or (known and any(message["role"] == "assistant" for message in new)):
            raise ValueError("the harness has begun another conversation")
        self._messages = given
        return [_with_calls(message, self._call_ids) for message in new]

    def say(self, action: Mapping[str, Any], is_cut: bool = False) -> dict[str, Any]:
        """Return an agent's message as a chat completion, and remember it.

        Args:
            action: "content", and perhaps "reasoning_content" and "tool_calls".
            is_cut: A limit has cut it.
        """
        message: Message = {"role": "assistant", "content": action.get("content") or ""}
        if action.get("reasoning_content"):
            message["reasoning_content"] = action["reasoning_content"]
        if calls := [self._call(call) for call in action.get("tool_calls") or ()]:
            message["tool_calls"] = calls
        self._messages.append(message)
        reason = "length" if is_cut else "tool_calls" if calls else "stop"
        choice = {"index": 0, "message": message, "finish_reason": reason}
        return {"id": "1", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        unique = f"call_{next(self._numbers)}"
        self._call_ids[unique] = call["id"]
        return {"id": unique, "type": "function", "function": {"name": name, "arguments": text}}


def text_message(message: Mapping[str, Any]) -> Message:
    """Return a chat message with a text as its content.

    Raises:
        ValueError: It has images or other parts.
    """
    content = message.get("content")
    if isinstance(content, list):
        if not all(part.get("type") == "text" for part in content):
            raise ValueError(f"a message ({message['role']}) has more than text")
        content = "".join(part["text"] for part in content)
    kept = ("reasoning_content", "tool_calls", "tool_call_id")
    return {"role": message["role"], "content": content or ""} | {
        name: message[name] for name in kept if message.get(name)
    }


def _identity(message: Message) -> tuple[Any, ...]:
    calls = [call["id"] for call in message.get("tool_calls", ())]
    return message["role"], message["content"], message.get("tool_call_id"), calls


def _with_calls(message: Message, call_ids: Mapping[str, str]) -> Message:
    """Return a message with the agent's own names of its calls, and with their arguments as objects."""
    if message["role"] == "tool":
        return {**message, "tool_call_id": call_ids.get(message["tool_call_id"], message["tool_call_id"])}
    if "tool_calls" not in message:
        return message
    return {**message, "tool_calls": list(map(_with_object, message["tool_calls"]))}


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = json.loads(call["function"]["arguments"] or "{}")
    return {**call, "function": {**call["function"], "arguments": arguments}}
