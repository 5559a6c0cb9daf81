import datetime
import decimal

import pytest

from posttrain.data.keys import AbsentError
from posttrain.data.messages import (
    PromptTemplate,
    RowError,
    messages_of,
    plain,
    templated,
    tools_of,
    with_system_prompt,
)
from posttrain.errors import ConfigError

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def test_text_and_messages():
    assert messages_of("1+1", "prompt") == ({"role": "user", "content": "1+1"},)
    given = [
        {"role": "user", "content": "?", "id": 3},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "name": "add", "content": "2", "tool_calls": None},
    ]
    assert messages_of(given, "prompt") == (
        {"role": "user", "content": "?"},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "name": "add"},
    )


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (3, "'prompt' is a int, expected messages or text"),
        ({}, "'prompt' is a dict, expected messages or text"),
        (" \n", "'prompt' is empty"),
        ([], "'prompt' is empty"),
        (["text"], "must hold messages"),
        ([{"role": "user"}], "must hold messages"),
        ([{"role": "user", "content": " "}], "must hold messages"),
        ([{"role": "user", "content": [{"type": "text"}]}], "must hold messages"),
        ([{"role": "assistant", "content": "", "tool_calls": []}], "must hold messages"),
        ([{"role": "assistant", "content": "a", "tool_calls": "add"}], "must hold messages"),
    ],
)
def test_what_is_no_prompt(value, reason):
    with pytest.raises(RowError, match=reason):
        messages_of(value, "prompt")


def test_tools_are_lists_or_the_text_of_one():
    assert tools_of(None) is tools_of("") is tools_of("[]") is None
    assert tools_of([{"name": "a"}]) == tools_of('[{"name": "a"}]') == [{"name": "a"}]
    for wrong in ("add", '"add"', {"name": "a"}, ["add"]):
        with pytest.raises(RowError, match="'tools'"):
            tools_of(wrong)


def test_a_template_takes_prompt_and_columns_and_no_braces_of_theirs():
    template = PromptTemplate(r"[{subject.name}, {level}] {prompt} In \boxed{}, {{as is}}: {prompt}")
    row = {"subject": {"name": "{prompt} {level}"}, "level": 3}
    assert template.fill("{level} {x}", row) == (r"[{prompt} {level}, 3] {level} {x} In \boxed{}, {as is}: {level} {x}")
    assert template.columns == {"subject", "level"}
    with pytest.raises(AbsentError, match="'level' is missing"):
        template.fill("a", {"subject": {"name": "b"}})


def test_a_template_without_a_place_for_the_prompt():
    for text, value in (("Solve.", "'Solve.'"), ("{{prompt}}", "'{{prompt}}'")):
        with pytest.raises(ConfigError) as raised:
            PromptTemplate(text)
        assert (raised.value.problems[0].key, raised.value.problems[0].value) == ("data.prompt_template", value)
    with pytest.raises(ConfigError, match=r"data\.prompt_template = 'a b'"):
        PromptTemplate("{prompt} {a b}")


def test_the_template_is_around_the_last_message_of_the_user():
    messages = [{"role": role, "content": role} for role in ("user", "assistant", "user", "assistant")]
    filled = templated(messages, PromptTemplate("<{prompt}>"), {})
    assert [message["content"] for message in filled] == ["user", "assistant", "<user>", "assistant"]
    assert messages[2]["content"] == "user"
    with pytest.raises(RowError, match="no message is the user's"):
        templated([{"role": "system", "content": "a"}], PromptTemplate("<{prompt}>"), {})


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
        "cost": "1.10",
        "none": None,
        "pairs": [["a", 1], [True, None]],
    }
    with pytest.raises(RowError, match="holds a bytes, for which JSON has no word"):
        plain([b"png"])
    with pytest.raises(RowError, match="is nan"):
        plain([float("nan")], strict=True)
