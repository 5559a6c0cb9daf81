"""Calls of tools as each kind of template shows them."""

from __future__ import annotations

import json

import pytest
from tests.support.rejections import rejected

from posttrain.checkpoint.tiny.tokenizer import make_tokenizer
from posttrain.errors import CheckpointError
from posttrain.rl.data.chat import ChatTokenizer
from posttrain.rl.data.tool_calls import OBJECT, TEXT, forms_of, in_form

# What stands for the calls; the forms of arguments that it shows; the call of `add` below.
GLM = "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson if v is not string else v }};{% endfor %}"
DEEPSEEK = "{{ '(' + c.function.arguments + ')' }}"
QWEN = "{% set a = c.function.arguments %}{{ a if a is string else a | tojson }}"
LLAMA = "{{ c.function.arguments | tojson }}"
TEMPLATES = {
    "glm": (GLM, {OBJECT}, "a=1;b=x;"),
    "deepseek": (DEEPSEEK, {TEXT}, '({"a": 1, "b": "x"})'),
    "qwen": (QWEN, {OBJECT, TEXT}, '{"a": 1, "b": "x"}'),
    "llama": (LLAMA, {OBJECT}, '{"a": 1, "b": "x"}'),
    "printed": ("{{ c.function.arguments }}", {TEXT}, '{"a": 1, "b": "x"}'),
    "no calls": ("", set(), ""),
}
AROUND = "{%- for m in messages %}{{ m.content }}|{% for c in m.tool_calls or [] %}%s{% endfor %}{% endfor %}"
ARGUMENTS = {"a": 1, "b": "x"}


def _messages(arguments, **more):
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    return [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [call], **more}]


@pytest.fixture
def chat_of(tmp_path):
    def chat_of(calls):
        make_tokenizer(256).save_pretrained(tmp_path)
        (tmp_path / "chat_template.jinja").write_text(AROUND.replace("%s", calls))
        return ChatTokenizer(tmp_path)

    return chat_of


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_and_object_are_shown_as_the_template_means_them(chat_of, name):
    template, forms, shown = TEMPLATES[name]
    chat = chat_of(template)
    assert forms_of(lambda *given: str(chat._as_given(*given, tokenize=False))) == forms
    for arguments in (ARGUMENTS, json.dumps(ARGUMENTS)):
        messages = _messages(arguments)
        assert str(chat._apply(messages, None, tokenize=False)) == f"q||{shown}"
        assert messages == _messages(arguments), "the row's own stay"


def test_what_the_template_takes_is_not_changed(chat_of):
    text = '{"b":"x","a":1}'
    assert str(chat_of(QWEN)._apply(_messages(text), None, tokenize=False)) == f"q||{text}"


def test_letters_stay_and_what_is_no_call_is_left_to_the_template():
    (_, message) = _messages({"b": "é"})
    (call,) = in_form(message, frozenset({TEXT}))["tool_calls"]
    assert call["function"]["arguments"] == '{"b": "é"}'
    assert in_form({"role": "assistant", "tool_calls": ["add"]}, frozenset({TEXT}))["tool_calls"] == ["add"]


def test_the_content_of_a_call_is_empty_not_none(chat_of):
    for more in ({}, {"content": None}, {"content": ""}):
        assert str(chat_of(LLAMA)._apply(_messages({}, **more), None, tokenize=False)) == "q||{}"
    assert str(chat_of(GLM)._apply(_messages("", content="so"), None, tokenize=False)) == "q|so|"


def test_a_call_without_function_around_it(chat_of):
    chat = chat_of(GLM.replace("c.function", "c"))
    messages = [{"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {"a": 1}}]}]
    assert str(chat._apply(messages, None, tokenize=False)) == "|a=1;"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (_messages("a=1"), "with message 2 (assistant): 'arguments' is not JSON"),
        ([*_messages({}), *_messages({})[:1], {"role": "assistant", "content": "", "tool_calls": [{"function": 3}]}],
         "with message 4 (assistant): "),
        ([{"role": "assistant", "content": "", "tool_calls": 3}], "rendered: TypeError: "),
    ],
)  # fmt: skip
def test_what_a_template_raises_names_the_message(chat_of, messages, words):
    with pytest.raises(CheckpointError) as raised:
        chat_of(GLM).render(messages)
    assert words in str(raised.value)
    assert "the chat template cannot be rendered" in str(raised.value)


@pytest.mark.parametrize("body", ["{{ 1 // 0 }}", "{{ messages[0].none.none }}", "{{ 'a' + 1 }}", "{{ {}['a']['b'] }}"])
def test_any_error_of_a_template_is_the_templates(tmp_path, body):
    make_tokenizer(256).save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(body)
    with rejected("template-rejects-messages"):
        ChatTokenizer(tmp_path).render([{"role": "user", "content": "a"}])
