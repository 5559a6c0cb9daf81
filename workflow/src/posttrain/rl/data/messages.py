"""Converts a row's prompt to chat messages: checks, system prompt, prompt template."""

from __future__ import annotations

import datetime
import decimal
import json
import math
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from posttrain.errors import ConfigError, Problem
from posttrain.rl.data.keys import Key, kind_of, parse_key
from posttrain.store import parse_json

# Names that datasets use for the assistant's role.
ANSWERING_ROLES = ("assistant", "model", "gpt", "bot")
TEXT_ALONE = "messages are text alone, for models with a vision tower, too"
# {name}, or an escaped (doubled) brace.
_SLOT = re.compile(r"\{\{|\}\}|\{([A-Za-z_][^{}]*)\}")


class RowError(ValueError):
    """A row is invalid; the text says why.

    Args:
        reason: The fault.
        remedy: An alternative to correcting the row.
    """

    def __init__(self, reason: str, remedy: str = ""):
        super().__init__(reason)
        self.remedy = remedy


def messages_of(value: Any, key: str) -> tuple[dict[str, Any], ...]:
    """Return a prompt as chat messages.

    Args:
        value: Messages, or a text, which becomes a user message.
        key: Key of the prompt, for messages.

    Raises:
        RowError: The value is neither, or is empty.
    """
    if isinstance(value, str):
        if _is_text_of_messages(value):
            raise RowError(f"{key!r} is messages written as text, expected the messages themselves, or plain text")
        value = [{"role": "user", "content": value}] if value.strip() else []
    if not isinstance(value, list):
        raise RowError(f"{key!r} is {kind_of(value)}, expected messages or text")
    if not value:
        raise RowError(f"{key!r} is empty")
    for number, message in enumerate(value, start=1):
        if reason := _why_no_message(message):
            raise RowError(f"{key!r} must hold messages with the texts 'role' and 'content': message {number} {reason}")
    return tuple(map(_without_nulls, value))


def _is_text_of_messages(text: str) -> bool:
    """Return whether a text is a list of messages in JSON or Python notation, as in CSV cells."""
    return bool(re.match(r"""\s*\[\s*\{\s*["'](role|content)["']\s*:""", text))


def _why_no_message(message: Any) -> str:
    """Return what is wrong with a message, if anything."""
    if not isinstance(message, dict):
        return f"is {kind_of(message)}, expected an object"
    role, content, calls = (message.get(name) for name in ("role", "content", "tool_calls"))
    if not _is_text(role):
        named = " (ShareGPT's 'from' and 'value' are not read)" if "from" in message else ""
        return f"has {'no text' if isinstance(role, str | None) else kind_of(role)} as 'role'{named}"
    if calls is not None and (reason := why_no_calls(calls)):
        return f"({role}): {reason}"
    if _is_text(content) or (calls and content in (None, "")):  # a message with tool calls may have no content
        return ""
    if media := media_in(content):
        return f"({role}) has {media} in 'content': {TEXT_ALONE}"
    return f"({role}) has {'no text' if isinstance(content, str | None) else kind_of(content)} as 'content'"


def media_in(content: Any) -> str:
    """Return the kinds of parts that are no text in a message's content in OpenAI's form, "" for none.

    Example:
        [{"type": "text", "text": "What is it?"}, {"type": "image_url", ...}] gives "image_url".
    """
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    return ", ".join(sorted({str(part["type"]) for part in parts if part.get("type") not in (None, "text")}))


def why_no_calls(calls: Any) -> str:
    """Return what is wrong with a message's tool calls, if anything."""
    if not isinstance(calls, list):
        return f"'tool_calls' is {kind_of(calls)}, expected a list"
    for number, call in enumerate(calls, start=1):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not _is_text(function.get("name")):
            return f"call {number} names no function"
        try:
            arguments_of(function)
        except RowError as error:
            return f"call {number} ({function['name']}): {error}"
    return ""


def arguments_of(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments as an object, parsing JSON text if necessary.

    Raises:
        RowError: They are neither.
    """
    given = function.get("arguments")
    if isinstance(given, str):
        try:
            given = parse_json(given, unique_names=True) if given.strip() else {}
        except ValueError as error:
            raise RowError(f"'arguments' is not JSON ({error})") from error
    if not isinstance(given, dict | None):
        raise RowError(f"'arguments' is {kind_of(given)}, expected an object or its JSON text")
    return given or {}


def _without_nulls(message: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if value is not None}


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def answer_of(value: Any) -> dict[str, Any]:
    """Return an offline response as an assistant message.

    Args:
        value: A text, a message, or a list with one message.

    Raises:
        RowError: It is something else.
    """
    if _is_text(value):
        return {"role": "assistant", "content": value}
    messages = [value] if isinstance(value, dict) else value
    if not isinstance(messages, list) or len(messages) != 1 or not is_answer(messages[0]):
        reason = _why_no_message(messages[0]) if isinstance(messages, list) and len(messages) == 1 else ""
        told = f"; its message {reason}" if reason else ""
        raise RowError(f"is {kind_of(value)}, expected a text or one message of the assistant, to be learned{told}")
    return _without_nulls(messages[0])


def is_answer(message: Any) -> bool:
    """Return whether a value is an assistant message."""
    return not _why_no_message(message) and bool(message["role"] == "assistant")


def fuller_answer(value: Any) -> dict[str, Any] | None:
    """Return the assistant message that contains a label, if it has more than text, such as reasoning.

    Args:
        value: A message, a list with one, or anything else.
    """
    message = value[0] if isinstance(value, list) and len(value) == 1 else value
    is_more = isinstance(message, dict) and bool(message.keys() - {"role", "content"})
    return _without_nulls(message) if is_more and is_answer(message) else None


def tools_of(value: Any) -> list[dict[str, Any]] | None:
    """Return the tools of a row, None for none.

    Args:
        value: JSON schemas of functions, the JSON text of each, or that of a list of them.

    Raises:
        RowError: It is something else.
    """
    tools = _json_of(value)
    if not tools:
        return None
    tools = list(map(_json_of, tools)) if isinstance(tools, list) else tools
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError("'tools' must hold the JSON schemas of functions")
    return [_without_null_schemas(tool) for tool in tools]


def _json_of(value: Any) -> Any:
    if not isinstance(value, str) or not value.strip():
        return value
    try:
        return parse_json(value, unique_names=True)
    except ValueError as error:
        raise RowError(f"'tools' is not JSON ({error})") from error


def _without_null_schemas(value: Any, is_of_properties: bool = False) -> Any:
    """Return a schema without null properties, which tables add as padding."""
    if isinstance(value, list):
        return [_without_null_schemas(item) for item in value]
    if not isinstance(value, dict):
        return value
    given = {name: item for name, item in value.items() if item is not None or not is_of_properties}
    # A property may itself be named "properties"; its value is then a schema.
    return {
        name: _without_null_schemas(item, name == "properties" and not is_of_properties) for name, item in given.items()
    }


class PromptTemplate:
    """A text with placeholders for the prompt and for columns.

    Args:
        text: `{prompt}` is the last user message's text, `{key}` any column. Doubled braces stand for single ones,
            and so do braces without a name between them, as in `\\boxed{}`.
        setting: The setting that gives it, for messages.
        needed: Name of the required placeholder.

    Raises:
        ConfigError: The required placeholder is missing, or a name is not a valid key.
    """

    def __init__(self, text: str, setting: str = "data.prompt_template", needed: str = "prompt"):
        self._text, self._needed = text, needed
        slots = {found[1] for found in _SLOT.finditer(text) if found[1]}
        if needed not in slots:
            remedy = f"put {{{needed}}} where the {needed} belongs"
            raise ConfigError(
                [Problem("placeholder-missing", setting, repr(text), f"a text with {{{needed}}}", remedy)]
            )
        self._keys: Mapping[str, Key] = {slot: parse_key(slot, setting) for slot in slots if slot != needed}

    @property
    def columns(self) -> set[str]:
        """Columns named by the template."""
        return {key.column for key in self._keys.values()}

    def fill(self, text: str, row: Mapping[str, Any]) -> str:
        """Fill the template for a row; braces in inserted values are literal.

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
    """Apply a template to the last user message.

    Raises:
        RowError: There is no user message.
        AbsentError: See `PromptTemplate.fill`.
    """
    last = max((place for place, message in enumerate(messages) if message["role"] == "user"), default=None)
    if last is None:
        raise RowError("no message is the user's, which data.prompt_template could be put around")
    filled = {**messages[last], "content": template.fill(messages[last]["content"], row)}
    return (*messages[:last], filled, *messages[last + 1 :])


def with_system_prompt(messages: Sequence[dict[str, Any]], text: str) -> tuple[dict[str, Any], ...]:
    """Put a system prompt first, replacing an existing one."""
    rest = messages[1:] if messages[0]["role"] == "system" else messages
    return ({"role": "system", "content": text}, *rest)


def plain(value: Any, strict: bool = False) -> Any:
    """Convert a value to JSON types; decimals become numbers, UUIDs and times become text.

    Args:
        value: The value.
        strict: Reject NaN and infinities, which otherwise become null (missing values in tables), and times, whose text
            in the source is unknown.

    Raises:
        RowError: JSON cannot represent it.
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
    if isinstance(value, decimal.Decimal):
        return _number_of(value)
    if isinstance(value, uuid.UUID):
        return str(value)
    if isinstance(value, datetime.date | datetime.time | datetime.timedelta):
        if strict:
            raise RowError(f"holds {kind_of(value)}, which may have been any text: write it as text")
        return str(value) if isinstance(value, datetime.timedelta) else value.isoformat()
    raise RowError(f"holds {kind_of(value)}, for which JSON has no word")


def _number_of(value: decimal.Decimal) -> int | float:
    if value.is_finite() and value == value.to_integral_value():
        return int(value)
    if not value.is_finite() or decimal.Decimal(repr(float(value))) != value:
        raise RowError(f"holds the decimal {value}, which no JSON number says exactly: write it as text")
    return float(value)


def digest_of(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> int:
    """Return a hash for finding duplicate prompts, which takes less memory than their texts."""
    return xxhash.xxh3_128_intdigest(json.dumps([list(messages), tools], sort_keys=True).encode())
