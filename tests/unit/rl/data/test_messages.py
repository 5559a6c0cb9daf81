import datetime
import decimal
import uuid

import pytest
from tests.support.rejections import rejected

from posttrain.rl.data.keys import AbsentError
from posttrain.rl.data.messages import (
    PromptTemplate,
    RowError,
    answer_of,
    arguments_of,
    digest_of,
    fuller_answer,
    messages_of,
    plain,
    templated,
    tools_of,
    with_system_prompt,
)

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}

USER = {"role": "user", "content": "?"}


def _calling(*calls):
    return {"role": "assistant", "content": "", "tool_calls": list(calls)}


def test_text_and_messages():
    assert messages_of("1+1", "prompt") == ({"role": "user", "content": "1+1"},)
    given = [
        {"role": "user", "content": "?", "id": 3},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "name": "add", "content": "2", "tool_calls": None},
    ]
    assert messages_of(given, "prompt") == (
        {"role": "user", "content": "?", "id": 3},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "name": "add", "content": "2"},
    ), "whatever a template may read"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (3, "'prompt' is a int, expected messages or text"),
        ({}, "'prompt' is a dict, expected messages or text"),
        (" \n", "'prompt' is empty"),
        ([], "'prompt' is empty"),
        (["text"], "must hold messages .*: message 1 is a str, expected an object"),
        ([{"role": "user"}], r"message 1 \(user\) has no text as 'content'"),
        ([{"content": "a"}], "message 1 has no text as 'role'"),
        ([{"role": 3, "content": "a"}], "message 1 has a int as 'role'"),
        ([{"from": "human", "value": "a"}], r"has no text as 'role' \(ShareGPT's 'from' and 'value' are not read\)"),
        ([{"role": "user", "content": " "}], r"message 1 \(user\) has no text as 'content'"),
        ([USER, {"role": "user", "content": [{"type": "text"}]}], r"message 2 \(user\) has a list as 'content'"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "image_url"}]}],
            r"message 1 \(user\) has image, image_url in 'content': messages are text alone",
        ),
        ([{"role": "assistant", "content": "", "tool_calls": []}], "has no text as 'content'"),
        ([{"role": "assistant", "content": "a", "tool_calls": "add"}], r"\(assistant\): 'tool_calls' is a str"),
        ([_calling("add")], "call 1 names no function"),
        ([_calling(CALL, {"function": {"arguments": {}}})], "call 2 names no function"),
        ([_calling({"function": {"name": "add", "arguments": "a=1"}})], r"call 1 \(add\): 'arguments' is not JSON"),
        ([_calling({"name": "add", "arguments": '{"a": 1, "a": 2}'})], "'arguments' is not JSON .has 'a' twice"),
        ([_calling({"name": "add", "arguments": "[1]"})], "'arguments' is a list, expected an object or its JSON text"),
        ([_calling({"name": "add", "arguments": 3})], "'arguments' is a int"),
        ('[{"role": "user", "content": "a"}]', "is messages written as text"),
        ("[{'content': 'a', 'role': 'user'}]", "is messages written as text"),
    ],
)
def test_what_is_no_prompt(value, reason):
    with pytest.raises(RowError, match=reason):
        messages_of(value, "prompt")


def test_arguments_are_an_object_or_its_text():
    for given in ({"a": 1}, '{"a": 1}'):
        assert arguments_of({"name": "add", "arguments": given}) == {"a": 1}
    for given in ({}, "", " ", "{}", None):
        assert arguments_of({"name": "now", "arguments": given}) == {}


def test_a_response_to_learn_is_a_text_or_one_message():
    message = {"role": "assistant", "content": "a", "reasoning_content": "b", "name": None}
    kept = {"role": "assistant", "content": "a", "reasoning_content": "b"}
    assert answer_of("a") == {"role": "assistant", "content": "a"}
    assert answer_of(message) == answer_of([message]) == fuller_answer(message) == fuller_answer([message]) == kept
    for less in ("a", {"role": "assistant", "content": "a"}, USER | {"name": "b"}, [message, message], 3, None):
        assert fuller_answer(less) is None
    for wrong, reason in ((USER, "is a dict"), ([message, message], "is a list"), ([{"role": "assistant"}], "no text")):
        with pytest.raises(RowError, match=reason):
            answer_of(wrong)


def test_properties_that_are_null_are_no_schemas():
    town = {"type": "string", "default": None, "enum": ["a", None]}
    nested = {"properties": {"properties": {"type": "object", "properties": {"a": None}}, "b": None}}
    parameters = {"properties": {"town": town, "a": None, "o": nested}, "description": None}
    padded = {"name": "w", "parameters": parameters, "strict": None}
    (tool,) = tools_of([padded])
    assert tool == {
        "name": "w",
        "parameters": {
            "properties": {
                "town": town,
                "o": {"properties": {"properties": {"type": "object", "properties": {}}}},
            },
            "description": None,
        },
        "strict": None,
    }


def test_tools_are_lists_or_the_text_of_one():
    assert tools_of(None) is tools_of("") is tools_of("[]") is None
    assert tools_of([{"name": "a"}]) == tools_of('[{"name": "a"}]') == [{"name": "a"}]
    assert tools_of(['{"name": "a"}']) == [{"name": "a"}]
    for wrong in ('[{"name": "a", "name": "b"}]', "add", '"add"', {"name": "a"}, ["add"]):
        with pytest.raises(RowError, match="'tools'"):
            tools_of(wrong)


def test_a_template_takes_prompt_and_columns_and_no_braces_of_theirs():
    template = PromptTemplate(r"[{subject.name}, {level}] {prompt} In \boxed{}, {{as is}}: {prompt}")
    row = {"subject": {"name": "{prompt} {level}"}, "level": [3, "é"]}
    assert template.fill("{level} {x}", row) == (
        r'[{prompt} {level}, [3, "é"]] {level} {x} In \boxed{}, {as is}: {level} {x}'
    )
    assert template.columns == {"subject", "level"}
    with pytest.raises(AbsentError, match="'level' is missing"):
        template.fill("a", {"subject": {"name": "b"}})


def test_a_template_without_a_place_for_the_prompt():
    for text, value in (("Solve.", "'Solve.'"), ("{{prompt}}", "'{{prompt}}'")):
        with rejected("placeholder-missing", f" = {value} ", "{prompt}", key="data.prompt_template"):
            PromptTemplate(text)
    with rejected("not-a-path-of-keys", "'a b'", key="data.prompt_template"):
        PromptTemplate("{prompt} {a b}")


def test_the_template_is_around_the_last_message_of_the_user():
    messages = [{"role": role, "content": role} for role in ("user", "assistant", "user", "assistant")]
    filled = templated(messages, PromptTemplate("<{prompt}>"), {})
    assert [message["content"] for message in filled] == ["user", "assistant", "<user>", "assistant"]
    assert messages[2]["content"] == "user"
    with pytest.raises(RowError, match="no message is the user's"):
        templated([{"role": "system", "content": "a"}], PromptTemplate("<{prompt}>"), {})


def test_prompts_are_the_same_whatever_the_order_of_their_fields():
    assert digest_of([USER], None) == digest_of([{"content": "?", "role": "user"}], None)
    others = ([{**USER, "content": "!"}], None), ([USER], [{"name": "a"}]), ([USER, USER], None)
    assert digest_of([USER], None) not in {digest_of(*other) for other in others}


def test_a_system_prompt_is_put_before_or_in_the_place_of_one():
    user, new = {"role": "user", "content": "a"}, {"role": "system", "content": "new"}
    assert with_system_prompt([user], "new") == (new, user)
    assert with_system_prompt([{"role": "system", "content": "old"}, user], "new") == (new, user)


def test_values_of_tables_become_json():
    value = {
        "at": datetime.datetime(2026, 11, 24, 12, 30),
        "cost": decimal.Decimal("1.10"),
        "none": float("nan"),
        "pairs": [("a", 1), (True, None)],
    }
    assert plain(value) == {
        "at": "2026-11-24T12:30:00",
        "cost": 1.1,
        "none": None,
        "pairs": [["a", 1], [True, None]],
    }
    with pytest.raises(RowError, match="holds a bytes, for which JSON has no word"):
        plain([b"png"])
    assert plain([decimal.Decimal("42.00"), uuid.UUID(int=1)]) == [42, "00000000-0000-0000-0000-000000000001"]
    for value, reason in (
        (decimal.Decimal("0.10000000000000000001"), "no JSON number says exactly"),
        (decimal.Decimal("NaN"), "no JSON number"),
    ):
        with pytest.raises(RowError, match=reason):
            plain(value)
    for value in (datetime.datetime(2026, 11, 24), datetime.time(1), datetime.timedelta(1)):
        assert isinstance(plain(value), str)
        with pytest.raises(RowError, match="write it as text"):
            plain({"a": [value]}, strict=True)
    with pytest.raises(RowError, match="is nan"):
        plain([float("nan")], strict=True)
