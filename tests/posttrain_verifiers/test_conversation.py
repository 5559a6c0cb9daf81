"""What of a request to the model an agent has not read yet, and what becomes of its calls."""

from __future__ import annotations

import pytest

from posttrain_verifiers.conversation import Conversation, text_message

ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "add"}]
CALL = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
ACTION = {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL, {**CALL, "id": "call_1"}]}


def said(conversation: Conversation, action: dict, is_cut: bool = False) -> dict:
    (choice,) = conversation.say(action, is_cut)["choices"]
    return choice


def test_only_what_is_new_is_read() -> None:
    conversation = Conversation()
    assert conversation.read(ASKED) == ASKED
    answer = said(conversation, {"role": "assistant", "content": "what?"})["message"]
    more = [{"role": "user", "content": [{"type": "text", "text": "1 "}, {"type": "text", "text": "+ 2"}]}]
    assert conversation.read([*ASKED, answer, *more]) == [{"role": "user", "content": "1 + 2"}]


def test_calls_have_names_of_their_own_in_the_episode() -> None:
    conversation = Conversation()
    conversation.read(ASKED)
    first = said(conversation, ACTION)
    assert first["finish_reason"] == "tool_calls"
    message = first["message"]
    assert [call["id"] for call in message["tool_calls"]] == ["call_0", "call_1"]
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert message["reasoning_content"] == "hm"
    results = [{"role": "tool", "tool_call_id": f"call_{n}", "content": str(n), "name": "add"} for n in range(2)]
    read = conversation.read([*ASKED, message, *results])
    assert read == [{"role": "tool", "tool_call_id": f"call_{n}", "content": str(n)} for n in range(2)]
    again = said(conversation, {**ACTION, "tool_calls": [CALL]})["message"]
    assert [call["id"] for call in again["tool_calls"]] == ["call_2"]
    result = {"role": "tool", "tool_call_id": "call_2", "content": "3"}
    assert conversation.read([*ASKED, message, *results, again, result]) == [{**result, "tool_call_id": "call_0"}]


def test_arguments_that_are_no_object_stay_what_they_are() -> None:
    call = {"id": "call_0", "function": {"name": "add", "arguments": "1 + 2"}}
    choice = said(Conversation(), {"content": "", "tool_calls": [call]})
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == "1 + 2"


def test_how_a_response_ended() -> None:
    message = {"role": "assistant", "content": "7"}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    completion = {"id": "1", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
    assert Conversation().say({"content": "7"}) == completion
    assert said(Conversation(), ACTION, is_cut=True)["finish_reason"] == "length"


def test_a_prompt_may_have_earlier_turns() -> None:
    """Their calls have texts as arguments, ours objects."""
    earlier = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{**CALL, "function": {"name": "f", "arguments": ""}}],
    }
    (read,) = Conversation().read([earlier])
    assert read == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {}}}],
    }


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{**ASKED[0], "content": "Be long."}, *ASKED[1:]], r"has changed an earlier message \(system\)"),
        (ASKED[:1], "has begun another conversation"),
        ([*ASKED, {"role": "assistant", "content": "7"}], "has begun another conversation"),
        ([*ASKED, {"role": "assistant", "content": "8"}], r"has changed an earlier message \(assistant\)"),
        ([*ASKED, {"role": "assistant", "content": "7"}, ASKED[1], {"role": "assistant", "content": "8"}], "has begun"),
        ([*ASKED, {"role": "assistant", "content": "7", "tool_calls": [CALL]}], "an earlier message"),
    ],
)
def test_a_harness_that_rewrites_the_conversation_is_refused(messages: list[dict], reason: str) -> None:
    conversation = Conversation()
    conversation.read(ASKED)
    conversation.say({"content": "7"})
    with pytest.raises(ValueError, match=reason):
        conversation.read(messages)


def test_images_are_refused() -> None:
    parts = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    with pytest.raises(ValueError, match=r"a message \(user\) has more than text"):
        text_message({"role": "user", "content": parts})
