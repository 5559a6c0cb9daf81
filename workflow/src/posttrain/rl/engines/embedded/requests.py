"""Parses a /generate body into rows, or refuses it with a reason.

It accepts the SGLang parameters that this engine supports. It refuses, rather than ignores, a parameter that
would change the distribution in an unsupported way, because the log-probabilities would be those of another
model.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web

from posttrain.rl.engines.routes import ASKED

# Unsupported sampling parameters -> the neutral value with which a request may contain them.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "top_k": (-1, 1 << 30),
    "min_p": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_new_tokens": (0,),
    "n": (1,),
    "stop": (None, []),
    "logit_bias": (None, {}),
    "skip_special_tokens": (True, False),
}
KNOWN_PARAMETERS = {
    "max_new_tokens",
    "temperature",
    "top_p",
    "sampling_seed",
    "stop_token_ids",
    "ignore_eos",
    *NEUTRAL_VALUES,
}
# 0 would sample from nothing.
SMALLEST_TOP_P = 1e-6
# SGLang's own default (`SamplingParams.max_new_tokens`).
DEFAULT_MAX_NEW_TOKENS = 128
# OpenAI's own limit.
MOST_ALTERNATIVES = 20


class RequestError(ValueError):
    """A request that cannot be served; the text is returned with HTTP 400.

    Args:
        text: What is wrong.
        param: The wrong parameter, if any; OpenAI's error has a separate field for it.
    """

    def __init__(self, text: str, param: str | None = None):
        super().__init__(text)
        self.param = param


@dataclass(frozen=True)
class ModelLimits:
    """Limits for checking requests.

    Args:
        vocab_size: Token ids are below it.
        max_positions: Longest prompt and response together.
        eos_token_ids: Any of them ends a response.
        has_experts: The model has MoE layers.
    """

    vocab_size: int
    max_positions: int
    eos_token_ids: frozenset[int]
    has_experts: bool = False


@dataclass(frozen=True)
class Row:
    """One response to generate.

    Args:
        request_id: SGLang's rid.
        input_ids: The prompt.
        max_new_tokens: Length limit of the response; 0: only the prompt's log-probabilities.
        temperature: 0 is greedy.
        sampling_seed: None draws one.
        stop_token_ids: Any of them ends the response.
        top_p: Nucleus sampling probability.
        stop_texts: Function from the tokens so far to the stop text that they end with, or "".
        num_alternatives: Number of top tokens to report at every position.
        scores_prompt: Return log-probabilities of the prompt's tokens.
        tells_routes: Return the expert routes of the tokens.
    """

    request_id: str
    input_ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float
    sampling_seed: int | None
    stop_token_ids: frozenset[int]
    top_p: float = 1.0
    stop_texts: Callable[[Sequence[int]], str] | None = None
    num_alternatives: int = 0
    scores_prompt: bool = False
    tells_routes: bool = False


@dataclass(frozen=True)
class ParsedRequest:
    """A /generate body.

    Args:
        rows: The rows to generate.
        is_batch: The answer is a list, even for one row.
        stream: The answer is streamed token by token.
        told_from: First prompt token with log-probabilities in the answer; -1: none.
    """

    rows: tuple[Row, ...]
    is_batch: bool
    stream: bool
    told_from: int = -1


async def read_json(request: web.Request) -> dict[str, Any]:
    """Return the body as a JSON object; an empty body is an empty object.

    Raises:
        RequestError: The body is not a JSON object.
    """
    text = await request.text()
    try:
        body = json.loads(text) if text else {}
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    return body


def parse_request(body: Any, limits: ModelLimits) -> ParsedRequest:
    """Check a /generate body.

    Raises:
        RequestError: Saying which prompt or parameter is wrong, and what is allowed.
    """
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    prompts = body.get("input_ids")
    if not isinstance(prompts, list):
        raise RequestError("input_ids: a list of token ids, or a list of such lists, is needed (text is not served)")
    is_batch = bool(prompts) and isinstance(prompts[0], list)
    prompts = prompts if is_batch else [prompts]
    parameters = _per_prompt("sampling_params", body.get("sampling_params") or {}, len(prompts), dict)
    request_ids = _request_ids(body.get("rid"), len(prompts))
    stream = bool(body.get("stream", False))
    if stream and is_batch:
        raise RequestError("stream: one prompt per request, not a batch")
    tells_routes = bool(body.get(ASKED, False))
    if tells_routes and stream:
        raise RequestError(f"{ASKED}: not with stream")
    if tells_routes and not limits.has_experts:
        raise RequestError(f"{ASKED}: the model has no experts")
    told_from = number("the request", body, "logprob_start_len", -1, minimum=-1)
    most = number("the request", body, "top_logprobs_num", 0, 0, MOST_ALTERNATIVES)
    if (told_from >= 0 or most) and (stream or not body.get("return_logprob")):
        raise RequestError("logprob_start_len, top_logprobs_num: return_logprob = true is needed with them, no stream")
    more = {"tells_routes": tells_routes, "scores_prompt": told_from >= 0, "num_alternatives": most}
    rows = tuple(
        replace(_parse_row(index, prompt, parameters[index], request_ids[index], limits), **more)
        for index, prompt in enumerate(prompts)
    )
    return ParsedRequest(rows, is_batch, stream, told_from)


def _parse_row(index: int, prompt: Any, parameters: dict[str, Any], request_id: str, limits: ModelLimits) -> Row:
    where = f"prompt {index}"
    check_prompt(where, prompt, limits)
    _check_parameters(where, parameters)
    max_new_tokens = number(where, parameters, "max_new_tokens", DEFAULT_MAX_NEW_TOKENS, minimum=1)
    if len(prompt) + max_new_tokens > limits.max_positions:
        raise RequestError(
            f"{where}: {len(prompt)} tokens and max_new_tokens {max_new_tokens} exceed the model's "
            f"{limits.max_positions} positions"
        )
    stop = frozenset() if parameters.get("ignore_eos") else limits.eos_token_ids
    return Row(
        request_id=request_id,
        input_ids=tuple(prompt),
        max_new_tokens=int(max_new_tokens),
        temperature=number(where, parameters, "temperature", 1.0, minimum=0),
        sampling_seed=whole_number(where, parameters, "sampling_seed"),
        stop_token_ids=stop | frozenset(parameters.get("stop_token_ids") or ()),
        top_p=number(where, parameters, "top_p", 1.0, minimum=SMALLEST_TOP_P, maximum=1),
    )


def check_prompt(where: str, prompt: Any, limits: ModelLimits) -> None:
    """Raise `RequestError` unless a prompt is a list of vocabulary tokens; `where` names it."""
    if not isinstance(prompt, list) or not prompt:
        raise RequestError(f"{where}: empty; a prompt has at least one token")
    for position, token in enumerate(prompt):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < limits.vocab_size:
            allowed = f"the vocabulary, 0 to {limits.vocab_size - 1}"
            raise RequestError(f"{where}: token {token!r} at position {position} is not in {allowed}")


def check_neutral(where: str, parameters: Mapping[str, Any]) -> None:
    """Raise `RequestError` for a parameter that would change the distribution in an unsupported way."""
    for name, allowed in NEUTRAL_VALUES.items():
        if name in parameters and parameters[name] not in (None, *allowed):
            raise RequestError(
                f"{where}: {name} = {parameters[name]!r} is not supported by the embedded engine, only {allowed[0]!r}",
                name,
            )


def number(
    where: str, parameters: Mapping[str, Any], name: str, default: float, minimum: float, maximum: float = math.inf
) -> Any:
    """Return a numeric parameter (an integer if its default is one), or its default.

    Raises:
        RequestError: The value has the wrong type or is out of range.
    """
    value = parameters.get(name)
    if value is None:
        return default
    is_number = isinstance(value, int | type(default)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not minimum <= value <= maximum:
        allowed = f"at least {minimum}" if maximum == math.inf else f"between {minimum} and {maximum}"
        raise RequestError(f"{where}: {name} = {value!r}, {allowed} is needed", name)
    return value


def whole_number(where: str, parameters: Mapping[str, Any], name: str) -> int | None:
    """Return an integer parameter of any sign, None if absent.

    Raises:
        RequestError: It is something else.
    """
    value = parameters.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise RequestError(f"{where}: {name} = {value!r} is not a whole number", name)
    return value


def _check_parameters(where: str, parameters: dict[str, Any]) -> None:
    if unknown := sorted(parameters.keys() - KNOWN_PARAMETERS):
        raise RequestError(f"{where}: sampling parameter {', '.join(unknown)} is not supported by the embedded engine")
    check_neutral(where, parameters)


def _per_prompt(name: str, value: Any, count: int, kind: type) -> Sequence[Any]:
    if isinstance(value, kind):
        return [value] * count
    if isinstance(value, list) and len(value) == count and all(isinstance(item, kind) for item in value):
        return value
    raise RequestError(f"{name}: one for all prompts, or a list of {count}, is needed")


def _request_ids(value: Any, count: int) -> Sequence[str]:
    if isinstance(value, list):
        return _per_prompt("rid", value, count, str)
    prefix = value if isinstance(value, str) else uuid.uuid4().hex
    return [prefix] if count == 1 else [f"{prefix}_{index}" for index in range(count)]
