"""Converts tool call arguments to the type that a chat template renders.

Some templates iterate over an object (GLM), some insert JSON text (DeepSeek), some accept both (Qwen). The first fail
on text; the second fail on an object or render it in Python notation. So each template is tried once with a test call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from posttrain.rl.data.messages import arguments_of

OBJECT, TEXT = "object", "text"
_NAME, _VALUE = "probed_name", "probed value"
_ARGUMENTS = {_NAME: _VALUE}
# Its parameters have another name, so that the probed name appears only in a call.
_PARAMETERS = {"type": "object", "properties": {"a": {"type": "string", "description": "b"}}}
_TOOL = {"type": "function", "function": {"name": "probe", "description": "A probe", "parameters": _PARAMETERS}}
# Messages and tools -> text.
Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], str]


def forms_of(render: Render) -> frozenset[str]:
    """Return the argument types that a template renders correctly; empty if it renders no calls.

    Args:
        render: The template; whatever it raises says that it does not take the form.
    """
    shown, text = _shown(render, _ARGUMENTS), json.dumps(_ARGUMENTS)
    found = {OBJECT} if _NAME in shown and _VALUE in shown and str(_ARGUMENTS) not in shown else set()
    return frozenset(found | ({TEXT} if text in _shown(render, text) else set()))


def _shown(render: Render, arguments: Any) -> str:
    function = {"name": "probe", "arguments": arguments}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "probe0001", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "b", "name": "probe", "tool_call_id": "probe0001"},
    ]
    try:
        return render(messages, [_TOOL])
    except Exception:  # a template is somebody's program: it raises what it likes
        return ""


def in_form(message: Mapping[str, Any], forms: frozenset[str]) -> dict[str, Any]:
    """Return a message with its call arguments in a type that the template renders.

    Raises:
        RowError: They are neither an object nor its JSON text.
    """
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return dict(message)
    # Templates add a text to the content, or print it: that of a call alone is empty, not null.
    return {**message, "content": message.get("content") or "", "tool_calls": [_call(call, forms) for call in calls]}


def _call(call: Any, forms: frozenset[str]) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _function(call["function"], forms)}
    return _function(call, forms)


def _function(function: dict[str, Any], forms: frozenset[str]) -> dict[str, Any]:
    given = function.get("arguments")
    if isinstance(given, str) and forms == {OBJECT}:
        return {**function, "arguments": arguments_of(function)}
    if isinstance(given, dict) and forms == {TEXT}:
        return {**function, "arguments": json.dumps(given, ensure_ascii=False)}
    return function
