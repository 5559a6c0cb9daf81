"""An episode's tokens are those that the model read and wrote, whatever its tokenizer and chat template do to text."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.rejections import rejected
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from posttrain.checkpoint.tiny.tokenizer import STOP_TOKENS, make_tokenizer
from posttrain.rl.data.chat import ChatTokenizer
from posttrain.rl.engines.responses import GenerateResult
from posttrain.rl.rollout.conversation import Conversation, continuation, drops_thinking
from posttrain.types import VersionSpan

USER = {"role": "user", "content": "12"}
TOOL = {"role": "tool", "content": "34"}
# ChatML that keeps thinking in the last turn only, like Qwen3's.
FORGETFUL = """{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.last and m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>
{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# Turns end with an ordinary token, the line break.
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def saved(folder: Path, tokenizer: PreTrainedTokenizerFast, template: str, *stops: str) -> ChatTokenizer:
    tokenizer.save_pretrained(folder)
    if template:
        (folder / "chat_template.jinja").write_text(template)
    ids = [tokenizer.convert_tokens_to_ids(stop) for stop in stops]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return ChatTokenizer(folder)


def chatml(folder: Path) -> ChatTokenizer:
    tokenizer = make_tokenizer(256)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]}
    )
    return saved(folder, tokenizer, FORGETFUL, "<|im_end|>")


def merging(folder: Path) -> ChatTokenizer:
    """A tokenizer with merges: `12` is one token, and so is a line break with the letter after it."""
    letters = [*"\n :?abcdefghijklmnopqrstuvwxyz0123456789"]
    merges = [("1", "2"), ("\n", "u")]
    vocabulary = {text: place for place, text in enumerate([*letters, *("".join(pair) for pair in merges)])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.decoder = decoders.Fuse()
    return saved(folder, PreTrainedTokenizerFast(tokenizer_object=backend), PLAIN, "\n")


def tiny(folder: Path) -> ChatTokenizer:
    return saved(folder, make_tokenizer(256), "", *STOP_TOKENS)


def sampled(chat: ChatTokenizer, *tokens: str) -> GenerateResult:
    ids = tuple(chat.tokenizer.convert_tokens_to_ids([*tokens]))
    return GenerateResult(ids, (-0.5,) * len(ids), "stop", 1, versions=(VersionSpan(1, len(ids)),))


def answered(
    chat: ChatTokenizer, response: Sequence[str], message: dict[str, Any], after: dict[str, Any], **options: Any
):
    conversation = Conversation(chat, [USER], **options)
    conversation.add_response(sampled(chat, *response), message)
    conversation.add_messages([after])
    return conversation


def test_the_next_turn_is_what_was_read_and_written_and_the_new_message(tmp_path: Path) -> None:
    chat = tiny(tmp_path)
    message = {"role": "assistant", "content": "56"}
    conversation = answered(chat, ["5", "6", "<|observation|>"], message, TOOL)
    assert chat.text_of(conversation.tokens) == chat.render_text([USER, message, TOOL])
    (segment,) = conversation.segments
    written = [token for token, mark in zip(segment.tokens, segment.loss_mask, strict=True) if mark]
    assert chat.text_of(written) == "56<|observation|>"
    assert segment.until_last_sampled().tokens == segment.tokens[: -len("\n34<") - 2 + 1]


def test_a_stop_token_of_another_role_stays_and_the_role_follows(tmp_path: Path) -> None:
    chat = tiny(tmp_path)
    conversation = answered(chat, ["5", "<|user|>"], {"role": "assistant", "content": "5"}, TOOL)
    assert chat.text_of(conversation.tokens).endswith("5<|user|><|observation|>\n34<|assistant|>\n")


def test_a_call_ends_before_the_template_goes_on(tmp_path: Path) -> None:
    chat = chatml(tmp_path)
    function = {"name": "probe", "arguments": {"a": "b"}}
    message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }
    conversation = answered(chat, ["<tool_call>", "1", "</tool_call>", "<|im_end|>"], message, TOOL)
    expected = "<tool_call>1</tool_call><|im_end|>\n<|im_start|>tool\n34<|im_end|>\n<|im_start|>assistant\n"
    assert chat.text_of(conversation.tokens).endswith(expected)


def exact(chat: ChatTokenizer, response: Sequence[str], message: dict[str, Any]) -> tuple[int, ...]:
    return answered(chat, response, message, USER).tokens


def rendered_again(chat: ChatTokenizer, response: Sequence[str], message: dict[str, Any]) -> tuple[int, ...]:
    """What trainers do that keep messages and tokenise them anew."""
    return chat.render([USER, message, USER])


HOSTILE: dict[str, tuple[Callable[[Path], ChatTokenizer], list[str], dict[str, Any]]] = {
    "decoding and encoding gives other tokens": (merging, ["1", "2", "\n"], {"role": "assistant", "content": "12"}),
    "a merge crosses the boundary of turns": (merging, ["3", "\n"], {"role": "assistant", "content": "3"}),
    "the template drops earlier thinking": (
        chatml,
        ["<think>", "\n", "7", "\n", "</think>", "\n", "3", "<|im_end|>"],
        {"role": "assistant", "content": "3", "reasoning_content": "7"},
    ),
}


@pytest.mark.parametrize("make_tokens", [exact, pytest.param(rendered_again, marks=pytest.mark.xfail(strict=True))])
@pytest.mark.parametrize("case", HOSTILE)
def test_what_was_sampled_stays_what_it_was(
    tmp_path: Path, case: str, make_tokens: Callable[[ChatTokenizer, Sequence[str], dict[str, Any]], tuple[int, ...]]
) -> None:
    """Rendering and tokenising the conversation anew fails in each case."""
    make, response, message = HOSTILE[case]
    chat = make(tmp_path)
    tokens, read = make_tokens(chat, response, message), chat.render([USER])
    assert tokens[: len(read) + len(response)] == (*read, *sampled(chat, *response).output_ids)
    assert chat.text_of(tokens).endswith(chat.render_text([USER]))


def test_a_template_that_drops_thinking_begins_a_segment(tmp_path: Path) -> None:
    chat = chatml(tmp_path)
    _, response, message = HOSTILE["the template drops earlier thinking"]
    conversation = answered(chat, response, message, USER, starts_segments=True)
    assert [len(segment.tokens) for segment in conversation.segments] == [
        len(chat.render([USER])) + 8,
        len(conversation.tokens),
    ]
    assert chat.text_of(conversation.tokens) == chat.render_text([USER, message, USER])
    assert sum(conversation.segments[1].loss_mask) == 0
    plain = {"role": "assistant", "content": "3"}
    assert len(answered(chat, ["3", "<|im_end|>"], plain, USER, starts_segments=True).segments) == 1


def test_templates_that_drop_thinking_are_known(tmp_path: Path) -> None:
    assert drops_thinking(chatml(tmp_path / "a"))
    assert not drops_thinking(tiny(tmp_path / "b"))


def test_a_template_without_ends_of_turns_is_refused(tmp_path: Path) -> None:
    chat = saved(tmp_path, make_tokenizer(256), "{% for m in messages %}{{ m.content }} {% endfor %}", "<|user|>")
    with rejected("template-without-turns"):
        continuation(chat, [USER], 3)
