"""Reads tool calls in responses: JSON in `<tool_call>` tags, as Hermes and Qwen2.5 write them.

    <think>I need the product.</think>
    <tool_call>
    {"name": "calculator", "arguments": {"expression": "12*34"}}
    </tool_call>

A call that is cut off, is no JSON object or has no name is no call: its text stays in the content, so the environment
sees what the model wrote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.rl.environments.protocol import Message
from posttrain.store import parse_json

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_THINK, _END_OF_THINKING = "<think>", "</think>"


def parse_action(text: str, tools: Sequence[Mapping[str, Any]] | None) -> Message:
    """Return a response as the message of an agent.

    Args:
        text: The response, without the tokens that end it. Its prompt may have begun the thinking.
        tools: JSON schemas of the functions that may be called; None: the text holds no calls. A call of any other
            function is a call, too: the environment answers it.

    Returns:
        "role", "content", "reasoning_content" if the model has thought, and "tool_calls" if there are any, each with an
        "id" that is unique in this message. "arguments" is an object, or the text of any other value.
    """
    reasoning, content = _split_thinking(text)
    calls: list[dict[str, Any]] = []

    def take(found: re.Match[str]) -> str:
        function = _function_of(found[1])
        if function is None:
            return found[0]
        calls.append({"id": f"call_{len(calls)}", "type": "function", "function": function})
        return ""

    rest = _CALL.sub(take, content) if tools else content
    message: Message = {"role": "assistant", "content": rest.strip()}
    if reasoning:
        message["reasoning_content"] = reasoning
    return message | ({"tool_calls": calls} if calls else {})


def _split_thinking(text: str) -> tuple[str, str]:
    """Return the thinking and the rest; thinking that does not end is all there is."""
    before, end, after = text.partition(_END_OF_THINKING)
    opened = before.lstrip().startswith(_THINK)
    if not end and not opened:
        return "", text
    return before.lstrip().removeprefix(_THINK).strip(), after


def _function_of(text: str) -> dict[str, Any] | None:
    """Return name and arguments of a call; None if it is none."""
    try:
        call = parse_json(text, finite=True)
    except ValueError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    arguments = call.get("arguments", {})
    # The model's own notation of the value is not kept: what counts is that it is no object.
    return {"name": call["name"], "arguments": arguments if isinstance(arguments, dict) else _as_text(arguments)}


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
