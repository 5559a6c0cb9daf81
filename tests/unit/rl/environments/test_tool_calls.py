"""Responses of agents as messages."""

from __future__ import annotations

import json

import pytest

from posttrain.rl.environments.tool_calls import parse_action

TOOLS = [{"type": "function", "function": {"name": "add"}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def functions(text: str, tools=TOOLS):
    return [call["function"] for call in parse_action(text, tools).get("tool_calls", [])]


def test_content_thinking_and_calls():
    message = parse_action(f"<think>\nOne call.\n</think>\nLet me add.\n{CALL}\n{CALL}", TOOLS)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert message == {
        "role": "assistant",
        "content": "Let me add.",
        "reasoning_content": "One call.",
        "tool_calls": [{"id": "call_0", **call}, {"id": "call_1", **call}],
    }


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("42", None, "42"),
        ("begun by the prompt</think>42", "begun by the prompt", "42"),
        ("<think></think>42", None, "42"),
        ("<think>cut", "cut", ""),
        ("a</think>b</think>c", "a", "b</think>c"),
        ("so <think>x", None, "so <think>x"),
    ],
)
def test_thinking(text, reasoning, content):
    message = parse_action(text, TOOLS)
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)


def test_a_call_within_thinking_is_a_thought():
    message = parse_action(f"<think>{CALL}</think>42", TOOLS)
    assert "tool_calls" not in message
    assert CALL in message["reasoning_content"]


@pytest.mark.parametrize(
    "body",
    [
        *("", "add(1)", '{"name": "add"', '["add"]', '{"arguments": {}}', '{"name": 3}', '{"name": ""}'),
        *('{"name": "add", "arguments": "\\ud800"}', "[" * 100_000),
    ],
)
def test_a_malformed_call_stays_content(body):
    text = f"first <tool_call>{body}</tool_call>"
    assert parse_action(text, TOOLS) == {"role": "assistant", "content": text}


def test_of_several_calls_only_malformed_ones_stay():
    text = f"<tool_call>add</tool_call>{CALL}"
    assert functions(text) == [{"name": "add", "arguments": {"a": 1}}]
    assert parse_action(text, TOOLS)["content"] == "<tool_call>add</tool_call>"


def test_a_call_that_was_cut_stays_content():
    text = CALL.removesuffix("</tool_call>")
    assert parse_action(text, TOOLS) == {"role": "assistant", "content": text.strip()}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [({"a": {"b": [1]}}, {"a": {"b": [1]}}), ("1+1", "1+1"), ([1], "[1]"), (None, "null"), (3, "3")],
)
def test_arguments_that_are_no_object_are_texts(arguments, expected):
    text = f"<tool_call>{json.dumps({'name': 'add', 'arguments': arguments})}</tool_call>"
    assert functions(text) == [{"name": "add", "arguments": expected}]


def test_arguments_may_be_left_out_and_other_functions_be_called():
    assert functions('<tool_call>{"name": "list"}</tool_call>') == [{"name": "list", "arguments": {}}]


@pytest.mark.parametrize("tools", [None, []])
def test_without_tools_nothing_is_called(tools):
    assert parse_action(CALL, tools) == {"role": "assistant", "content": CALL}
