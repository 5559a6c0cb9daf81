"""Parses a body of /v1/completions or /v1/chat/completions into rows, or refuses it with a reason.

It accepts the parameters of OpenAI's API that this engine supports, and SGLang's additions `ignore_eos`,
`stop_token_ids` and `chat_template_kwargs`. As in `requests`, no parameter that would change the answer is ignored.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.rl.data.chat import DECIDED_VARIABLES
from posttrain.rl.data.messages import TEXT_ALONE, media_in
from posttrain.rl.engines.embedded.requests import (
    MOST_ALTERNATIVES,
    NEUTRAL_VALUES,
    SMALLEST_TOP_P,
    ModelLimits,
    RequestError,
    Row,
    check_neutral,
    check_prompt,
    number,
    whole_number,
)
from posttrain.rl.engines.embedded.texts import Texts

# OpenAI's own defaults and limits.
DEFAULT_MAX_TOKENS = 16
MOST_CHOICES = 128
# Both endpoints accept these; `user` and `model` have no effect.
_SHARED = {"model", "user", "temperature", "top_p", "stop", "seed", "n", "logprobs", "stream", "max_tokens"}
_OF_SGLANG = {"ignore_eos", "stop_token_ids"}
_NEUTRAL = {name: allowed for name, allowed in NEUTRAL_VALUES.items() if name not in ("n", "stop")}
_OF_COMPLETIONS = {"prompt", "echo", "best_of", "suffix"}
_OF_CHAT = {
    "messages",
    "tools",
    "tool_choice",
    "max_completion_tokens",
    "top_logprobs",
    "response_format",
    "chat_template_kwargs",
}


@dataclass(frozen=True)
class Asked:
    """A parsed OpenAI request.

    Args:
        rows: The n choices of each prompt, consecutive.
        num_choices: n, choices per prompt.
        stops: Stop texts.
        with_logprobs: Return log-probabilities.
        echoes: Text of each prompt if the answer echoes it.
    """

    rows: tuple[Row, ...]
    num_choices: int
    stops: tuple[str, ...]
    with_logprobs: bool
    echoes: tuple[str, ...] = ()


def parse_completions(body: Mapping[str, Any], texts: Texts, limits: ModelLimits) -> Asked:
    """Check a body of /v1/completions.

    Raises:
        RequestError: Saying which prompt or parameter is wrong, and what is allowed.
    """
    _refuse_unknown(body, _OF_COMPLETIONS)
    _allow_only(body, "best_of", body.get("n") or 1)
    _allow_only(body, "suffix", "")
    given = _prompts(body.get("prompt"))
    prompts = [texts.encode(one) if isinstance(one, str) else one for one in given]
    logprobs = body.get("logprobs")
    count = 0 if logprobs is None else number("the request", body, "logprobs", 0, 0, MOST_ALTERNATIVES)
    echo = _flag(body, "echo")
    max_tokens = number("the request", body, "max_tokens", DEFAULT_MAX_TOKENS, minimum=0 if echo else 1)
    rows, stops = _rows(body, texts, limits, prompts, max_tokens, count, echo and logprobs is not None)
    echoes = tuple(one if isinstance(one, str) else texts.spelled(one) for one in given) if echo else ()
    return Asked(rows, len(rows) // len(prompts), stops, logprobs is not None, echoes)


def parse_chat(body: Mapping[str, Any], texts: Texts, limits: ModelLimits) -> Asked:
    """Check a body of /v1/chat/completions.

    Raises:
        RequestError: Saying which message or parameter is wrong, and what is allowed.
    """
    _refuse_unknown(body, _OF_CHAT)
    _allow_only(body, "tool_choice", "auto", "none")
    _allow_only(body, "response_format", {"type": "text"})
    tools = _objects(body, "tools") if body.get("tools") and body.get("tool_choice") != "none" else None
    more = body.get("chat_template_kwargs") or {}
    if not isinstance(more, dict) or not more.keys().isdisjoint(DECIDED_VARIABLES):
        allowed = f"an object without {', '.join(DECIDED_VARIABLES)}"
        raise RequestError(f"chat_template_kwargs = {more!r}, {allowed} is needed", "chat_template_kwargs")
    prompt = texts.render(_messages(body), tools, more)
    with_logprobs = _flag(body, "logprobs")
    count = number("the request", body, "top_logprobs", 0, 0, MOST_ALTERNATIVES)
    if count and not with_logprobs:
        raise RequestError("top_logprobs: logprobs = true is needed with it", "top_logprobs")
    name = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    max_tokens = number("the request", body, name, max(1, limits.max_positions - len(prompt)), minimum=1)
    rows, stops = _rows(body, texts, limits, [prompt], max_tokens, count)
    return Asked(rows, len(rows), stops, with_logprobs)


def _rows(
    body: Mapping[str, Any],
    texts: Texts,
    limits: ModelLimits,
    prompts: Sequence[list[int]],
    max_tokens: int,
    num_alternatives: int,
    scores_prompt: bool = False,
) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    """Return the rows of all choices, and the stop texts."""
    where, request_id = "the request", uuid.uuid4().hex
    for place, prompt in enumerate(prompts):
        check_prompt(f"prompt {place}", prompt, limits)
        if len(prompt) + max_tokens > limits.max_positions:
            said = (
                f"{len(prompt)} tokens and max_tokens {max_tokens} exceed the model's {limits.max_positions} positions"
            )
            raise RequestError(f"prompt {place}: {said}", "max_tokens")
    stops, seed = _stops(body), whole_number(where, body, "seed")
    ending = frozenset() if _flag(body, "ignore_eos") else limits.eos_token_ids
    temperature = number(where, body, "temperature", 1.0, minimum=0)
    top_p = number(where, body, "top_p", 1.0, minimum=SMALLEST_TOP_P, maximum=1)
    rows = tuple(
        Row(
            request_id=f"{request_id}_{place}_{choice}",
            input_ids=tuple(prompt),
            max_new_tokens=max_tokens,
            temperature=temperature,
            sampling_seed=None if seed is None else seed + choice,
            stop_token_ids=ending | _token_ids(body, "stop_token_ids"),
            top_p=top_p,
            stop_texts=texts.stopping_at(stops) if stops else None,
            num_alternatives=num_alternatives,
            scores_prompt=scores_prompt,
        )
        for place, prompt in enumerate(prompts)
        for choice in range(number(where, body, "n", 1, 1, MOST_CHOICES))
    )
    return rows, stops


def _prompts(value: Any) -> list[str | list[int]]:
    """Return the list of prompts, given a text, a list of tokens, or a list of either."""
    if isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], int)):
        value = [value]
    if not isinstance(value, list) or not value or not all(isinstance(one, str | list) for one in value):
        raise RequestError("prompt: a text, a list of token ids, or a list of either is needed", "prompt")
    return value


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages, with multi-part contents joined."""
    found = _objects(body, "messages")
    for place, message in enumerate(found):
        parts = message.get("content")
        if isinstance(parts, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
            message["content"] = "".join(str(part.get("text", "")) for part in parts)
        if media := media_in(message.get("content")):
            raise RequestError(f"messages[{place}]: {media} in its content; {TEXT_ALONE}", "messages")
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str | None):
            raise RequestError(f"messages[{place}]: a role, and a content that is text, are needed", "messages")
    return found


def _objects(body: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    value = body.get(name)
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        raise RequestError(f"{name}: a list of objects is needed", name)
    return [dict(item) for item in value]


def _stops(body: Mapping[str, Any]) -> tuple[str, ...]:
    value = body.get("stop") or []
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise RequestError(f"stop = {value!r}, a text or a list of texts is needed, none of them empty", "stop")
    return tuple(stops)


def _token_ids(body: Mapping[str, Any], name: str) -> frozenset[int]:
    value = body.get(name) or []
    if not isinstance(value, list) or not all(isinstance(token, int) for token in value):
        raise RequestError(f"{name} = {value!r}, a list of token ids is needed", name)
    return frozenset(value)


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise RequestError(f"{name} = {value!r}, true or false is needed", name)
    return bool(value)


def _allow_only(body: Mapping[str, Any], name: str, *allowed: Any) -> None:
    if body.get(name) not in (None, *allowed):
        raise RequestError(f"{name} = {body[name]!r} is not supported, only {allowed[0]!r}", name)


def _refuse_unknown(body: Mapping[str, Any], own: set[str]) -> None:
    if unknown := sorted(body.keys() - own - _SHARED - _OF_SGLANG - _NEUTRAL.keys()):
        raise RequestError(f"{', '.join(unknown)}: not supported by the embedded engine", unknown[0])
    if body.get("stream"):
        raise RequestError("stream = true is not supported, only false: /generate streams", "stream")
    check_neutral("the request", {name: value for name, value in body.items() if name in _NEUTRAL})
