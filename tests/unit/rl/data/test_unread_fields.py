"""What a template leaves out is found wherever it leaves it out."""

from __future__ import annotations

import json

import pytest

from posttrain.checkpoint.tiny.tokenizer import make_tokenizer, stop_token_ids
from posttrain.rl.data.chat import ChatTokenizer
from posttrain.rl.data.unread_fields import UnreadField, find_unread
from posttrain.types import Prompt

SHOWS = (
    "{%- if tools %}{{ tools | tojson }}{% endif %}{%- for m in messages %}<|{{ m.role }}|>"
    "{%- if m.role == 'assistant' %}<think>{{ m.reasoning_content or '' }}</think>{% endif %}{{ m.content }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}<|assistant|><think>{% endif %}"
)


@pytest.fixture
def chat_of(tmp_path):
    def chat_of(template):
        make_tokenizer(256).save_pretrained(tmp_path)
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": stop_token_ids()}))
        (tmp_path / "chat_template.jinja").write_text(template)
        return ChatTokenizer(tmp_path)

    return chat_of


def _prompt(number, *messages, **more):
    return Prompt(number, ({"role": "user", "content": f"q{number}"}, *messages), "1", **more)


def _answer(**more):
    return {"role": "assistant", "content": "a", **more}


def test_all_that_is_shown_is_not_named(chat_of):
    turns = [_answer(reasoning_content="b", thoughts=""), {"role": "tool", "content": "c"}]
    prompts = [_prompt(0, *turns, tools=[{"name": "t"}])]
    assert find_unread(chat_of(SHOWS), prompts) == []


def test_fields_that_no_name_of_the_template_reads(chat_of):
    prompts = [_prompt(i, _answer(thoughts="b", id=str(i)), {"role": "tool", "content": "c"}) for i in range(30)]
    found = find_unread(chat_of(SHOWS), prompts)
    assert found == [
        UnreadField("assistant", "id", 20, 20, 30),
        UnreadField("assistant", "thoughts", 20, 20, 30),
    ]
    assert [field.is_link for field in found] == [True, False]
    assert (
        str(found[1])
        == "'thoughts' of the assistant (30 prompts with it): not shown in 20 of 20 places that were tried"
    )


def test_work_is_bounded(chat_of):
    """Four messages of a prompt are tried, and fifty fields; the contents of user and assistant are two of them."""
    many = {f"field{number:02}": "b" for number in range(60)}
    found = find_unread(chat_of(SHOWS), [_prompt(0, *[_answer(thoughts="b")] * 5), _prompt(1, _answer(**many))])
    assert found[0] == UnreadField("assistant", "thoughts", 4, 4, 1)
    assert [field.name for field in found[1:]] == [*many][:47]


def test_a_template_that_shows_the_last_reasoning_alone(chat_of):
    last = SHOWS.replace(
        "m.reasoning_content or ''", "m.reasoning_content if loop.index > 3 and m.reasoning_content else ''"
    )
    turns = [_answer(reasoning_content="b"), {"role": "user", "content": "c"}] * 2
    assert find_unread(chat_of(last), [_prompt(0, *turns)]) == [UnreadField("assistant", "reasoning_content", 1, 2, 1)]


def test_roles_and_tools_that_are_passed_over(chat_of):
    users = "{%- for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    prompts = [_prompt(0, {"role": "developer", "content": "be kind"}, tools=[{"name": "t"}]), _prompt(1)]
    assert find_unread(chat_of(users), prompts) == [
        UnreadField("", "tools", 1, 1, 1),
        UnreadField("developer", "content", 1, 1, 1),
    ]


def test_what_the_template_insists_on_is_read(chat_of):
    insists = "{% for m in messages %}{{ m.content if m.mood else raise_exception('no mood') }}{% endfor %}"
    assert find_unread(chat_of(insists), [Prompt(0, ({"role": "user", "content": "a", "mood": "b"},), "1")]) == []


def test_what_the_template_insists_on_in_one_prompt_alone(chat_of):
    insists = (
        "{% for m in messages %}{{ m.content if m.mood or m.content == 'b' else raise_exception('no') }}{% endfor %}"
    )
    prompts = [Prompt(i, ({"role": "user", "content": text, "mood": "c"},), "1") for i, text in enumerate("ab")]
    assert find_unread(chat_of(insists), prompts) == [UnreadField("user", "mood", 1, 2, 2)]


def test_the_response_to_learn(chat_of):
    prompts = [_prompt(0), _prompt(1)]

    def answer(prompt):
        return _answer(**({"reasoning_content": "b"} if prompt.prompt_id == 0 else {"thoughts": "b"}))

    found = find_unread(chat_of(SHOWS), prompts, answer)
    assert found == [UnreadField("response to learn", "thoughts", 1, 1, 1)]
    assert str(found[0]).startswith("'thoughts' of the response to learn (1 prompt with it)")
    # Of the turns before it one has a field, and only there it is tried.
    first, user = _answer(mood="b", reasoning_content="b"), {"role": "user", "content": "c"}
    turns = [first, user, _answer(), user]
    prompts = [_prompt(0, *turns)]
    assert find_unread(chat_of(SHOWS), prompts, lambda prompt: _answer()) == [UnreadField("assistant", "mood", 1, 1, 1)]
