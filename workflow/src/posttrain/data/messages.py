"""From the prompt of a row to chat messages: checks, the system prompt, the template."""

from __future__ import annotations

import datetime
import decimal
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.data.keys import Key, kind_of, parse_key
from posttrain.errors import ConfigError, Problem

# What a chat template may read of a message.
FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id")
# {name}, or a brace that is doubled to stand for itself.
_SLOT = re.compile(r"\{\{|\}\}|\{([A-Za-z_][^{}]*)\}")


class RowError(ValueError):
    """Something of a row is not as it should be; the text says what."""


def messages_of(value: Any, key: str) -> tuple[dict[str, Any], ...]:
    """Return the chat messages that a prompt is.

    Args:
        value: Messages, or a text, which becomes one of the user.
        key: Where it was found, for the message.

    Raises:
        RowError: It is neither, or empty.
    """
    if isinstance(value, str):
        value = [{"role": "user", "content": value}] if value.strip() else []
    if not isinstance(value, list):
        raise RowError(f"{key!r} is {kind_of(value)}, expected messages or text")
    if not value:
        raise RowError(f"{key!r} is empty")
    if not all(map(_is_message, value)):
        raise RowError(f"{key!r} must hold messages with the texts 'role' and 'content'")
    return tuple({name: message[name] for name in FIELDS if message.get(name) is not None} for message in value)


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict) or not _is_text(message.get("role")):
        return False
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        return False
    # Who calls a tool may say nothing beside.
    return _is_text(message.get("content")) or (bool(calls) and message.get("content") in (None, ""))


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def answer_of(value: Any) -> dict[str, Any]:
    """Return the assistant's message that a given response is.

    Args:
        value: Its text, or a list with this one message.

    Raises:
        RowError: It is something else.
    """
    if _is_text(value):
        return {"role": "assistant", "content": value}
    if not isinstance(value, list) or len(value) != 1 or not _is_message(value[0]) or value[0]["role"] != "assistant":
        raise RowError(f"is {kind_of(value)}, expected a text or one message of the assistant, to be learned")
    return {name: value[0][name] for name in FIELDS if value[0].get(name) is not None}


def tools_of(value: Any) -> list[dict[str, Any]] | None:
    """Return the tools of a row, None for none.

    Args:
        value: JSON schemas of functions, or the JSON text of a list of them.

    Raises:
        RowError: It is something else.
    """
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError as error:
            raise RowError(f"'tools' is not JSON ({error})") from error
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RowError("'tools' must hold the JSON schemas of functions")
    return value


class PromptTemplate:
    """Text with places for the prompt and for columns.

    Args:
        text: `{prompt}` is the last user message's text, `{key}` any column. Doubled braces stand for single ones,
            and so do braces without a name between them, as in `\\boxed{}`.
        setting: Where it stands, for messages.
        needed: What has the place of `prompt` in it.

    Raises:
        ConfigError: The prompt has no place in it, or a name is no key.
    """

    def __init__(self, text: str, setting: str = "data.prompt_template", needed: str = "prompt"):
        self._text, self._needed = text, needed
        slots = {found[1] for found in _SLOT.finditer(text) if found[1]}
        if needed not in slots:
            remedy = f"put {{{needed}}} where the {needed} belongs"
            raise ConfigError([Problem(setting, repr(text), f"a text with {{{needed}}}", remedy)])
        self._keys: Mapping[str, Key] = {slot: parse_key(slot, setting) for slot in slots if slot != needed}

    @property
    def columns(self) -> set[str]:
        """The columns that it names."""
        return {key.column for key in self._keys.values()}

    def fill(self, text: str, row: Mapping[str, Any]) -> str:
        """Return the text for a row; braces in what is put into it mean nothing.

        Raises:
            AbsentError: The row lacks a column that the template names.
        """
        values = {slot: _as_text(key.find(row)) for slot, key in self._keys.items()} | {self._needed: text}
        return _SLOT.sub(lambda found: values[found[1]] if found[1] else found[0][0], self._text)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(plain(value), ensure_ascii=False)


def templated(
    messages: Sequence[dict[str, Any]], template: PromptTemplate, row: Mapping[str, Any]
) -> tuple[dict[str, Any], ...]:
    """Return messages whose last one of the user went through a template.

    Raises:
        RowError: None is the user's.
        AbsentError: See `PromptTemplate.fill`.
    """
    last = max((place for place, message in enumerate(messages) if message["role"] == "user"), default=None)
    if last is None:
        raise RowError("no message is the user's, which data.prompt_template could be put around")
    filled = {**messages[last], "content": template.fill(messages[last]["content"], row)}
    return (*messages[:last], filled, *messages[last + 1 :])


def with_system_prompt(messages: Sequence[dict[str, Any]], text: str) -> tuple[dict[str, Any], ...]:
    """Return messages that begin with a system prompt, which takes the place of one of their own."""
    rest = messages[1:] if messages[0]["role"] == "system" else messages
    return ({"role": "system", "content": text}, *rest)


def plain(value: Any, strict: bool = False) -> Any:
    """Return a value in JSON's types.

    Args:
        value: JSON's types, times, decimals, and lists and objects of them.
        strict: Refuse NaN and infinities, which otherwise become null, as which tables mean them.

    Raises:
        RowError: JSON has no word for it.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        if strict:
            raise RowError(f"is {value}")
        return None
    if isinstance(value, Mapping):
        return {str(name): plain(item, strict) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, strict) for item in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal | datetime.timedelta):
        return str(value)
    raise RowError(f"holds {kind_of(value)}, for which JSON has no word")
