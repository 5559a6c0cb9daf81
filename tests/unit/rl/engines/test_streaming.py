"""What a chunk says, in each dialect; times are tested against an endpoint in tests/posttrain_serving/benchmark."""

import dataclasses

import pytest

from posttrain.rl.engines.calls import EngineError
from posttrain.rl.engines.streaming import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    Endpoint,
    StreamedRequest,
    Timeline,
    _body,
    _take,
)

ROLE = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}


def usage(count):
    return {"prompt_tokens": 7, "completion_tokens": count}


def told(api, chunks):
    line = Timeline(0.0)
    for place, chunk in enumerate(chunks):
        _take(line, float(place), chunk, Endpoint("http://x", "m", api))
    return line


def text(content, count=None):
    return {"choices": [{"text": content}]} | ({} if count is None else {"usage": usage(count)})


def delta(**content):
    return {"choices": [{"delta": content}]}


@pytest.mark.parametrize(
    ("api", "chunks", "times", "tokens"),
    [
        # a token each, and one without a text that is none
        (COMPLETIONS, [text("a"), text(""), text("b"), {"choices": [], "usage": usage(2)}], [0, 2], 2),
        # counted by the last chunk alone: five tokens came in two chunks
        (COMPLETIONS, [text("abc"), text("de"), {"choices": [], "usage": usage(5)}], [0, 1], 5),
        # counted by each: a token that is half a character has no text, and a chunk that adds no token has one
        (COMPLETIONS, [text("", 1), text("ü", 2), text("", 2), {"choices": [], "usage": usage(2)}], [0, 1], 2),
        # a last chunk that counts what none had announced brings no token
        (COMPLETIONS, [text("a"), {"choices": [], "usage": usage(4)}], [0], 4),
        (CHAT, [ROLE, delta(content="a"), delta(reasoning_content="b"), delta(tool_calls=[{}])], [1, 2, 3], 3),
        (CHAT, [ROLE, delta(), delta(content="a")], [2], 1),
        (GENERATE, [{"output_ids": [1]}, {"output_ids": [1]}, {"output_ids": [1, 2, 3]}], [0, 2], 3),
        (GENERATE, [{"output_ids": [9], "meta_info": {"completion_tokens": 2, "prompt_tokens": 7}}], [0], 2),
    ],
)
def test_chunks_with_tokens_have_a_time(api, chunks, times, tokens):
    line = told(api, chunks)
    assert (line.chunks, line.output_tokens) == (times, tokens)


def test_the_prompt_is_as_long_as_the_endpoint_says():
    assert told(COMPLETIONS, [text("a", 1)]).input_tokens == 7


def test_an_error_within_a_stream_is_one():
    with pytest.raises(EngineError, match="tells within its answer"):
        told(COMPLETIONS, [text("a"), {"error": {"message": "no memory"}}])


@pytest.mark.parametrize("api", [COMPLETIONS, CHAT])
def test_a_request_asks_for_its_length_its_seed_and_counts(api):
    messages = [{"role": "user", "content": "a"}]
    endpoint, request = Endpoint("http://x", "m", api), StreamedRequest(messages if api == CHAT else [1, 2], 5, 3, 0.5)
    body = _body(endpoint, request)
    assert body.get("messages" if api == CHAT else "prompt") == (messages if api == CHAT else [1, 2])
    assert (body["max_tokens"], body["seed"], body["temperature"]) == (5, 3, 0.5)
    assert "seed" not in _body(endpoint, dataclasses.replace(request, temperature=0.0))
    assert body["ignore_eos"]
    assert body["stream"]
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
