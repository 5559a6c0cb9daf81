"""Each mistake of template or tokenizer, made on purpose."""

import json
from pathlib import Path

import pytest

from posttrain.checkpoint.tiny.tokenizer import CHAT_TEMPLATE, make_tokenizer, stop_token_ids
from posttrain.data.chat import ChatTokenizer
from posttrain.data.rendered import check_rendered
from posttrain.errors import CheckpointError
from posttrain.types import Prompt

SOUND = [Prompt(i, ({"role": "user", "content": f"sort {i}"},), f"{i + 100}") for i in range(4)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tokenizer(256).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": stop_token_ids()}))
    return tmp_path


def found(folder: Path, prompts: list[Prompt] = SOUND) -> list[str]:
    return [str(problem) for problem in check_rendered(ChatTokenizer(folder), folder, prompts)]


def test_nothing_is_said_of_a_sound_model(folder: Path) -> None:
    assert found(folder) == []


def test_no_generation_prompt(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE.split("{%- if add_generation_prompt")[0])
    (problem,) = found(folder)
    assert "no generation prompt" in problem


@pytest.mark.parametrize("place", ["begin", "end"])
def test_doubled_tokens(folder: Path, place: str) -> None:
    doubled = "<|endoftext|>" * 2
    (folder / "chat_template.jinja").write_text(
        doubled + CHAT_TEMPLATE
        if place == "begin"
        else CHAT_TEMPLATE.replace(
            "{%- endfor %}", f"{{%- if message.role == 'assistant' %}}{doubled}{{% endif %}}{{%- endfor %}}"
        )
    )
    (problem,) = found(folder)
    assert "twice in a row in 4 of 4 prompts" in problem


@pytest.mark.parametrize(("stops", "words"), [([50, 64], "[64] of [50, 64]"), ([58], "without the tokenizer's own 52")])
def test_stop_tokens(folder: Path, stops: list[int], words: str) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    assert words in "".join(found(folder))


CHATML = "{%- for m in messages %}<sop>{{ m.role }}\n{{ m.content }}<eop>\n{%- endfor %}"
CHATML += "{%- if add_generation_prompt %}<sop>assistant\n{%- endif %}"


@pytest.mark.parametrize(
    ("template", "stops", "words"),
    [
        (
            CHATML,
            stop_token_ids(),
            "'<eop><sop>user' ends an answer in the chat template, and none of it is a stop token",
        ),
        (CHATML.replace("<eop>", " "), stop_token_ids(), "'<sop>user' ends an answer"),
        (CHATML, [*stop_token_ids(), 57], ""),
        (CHATML.replace("<eop>", "<|endoftext|>"), stop_token_ids(), ""),
    ],
)
def test_a_template_that_ends_turns_by_a_token_that_ends_no_response(
    folder: Path, template: str, stops: list[int], words: str
) -> None:
    """A base model with the template of a chat model: after "<eop>" it goes on until the limit."""
    assert make_tokenizer(256).convert_tokens_to_ids("<eop>") == 57
    (folder / "chat_template.jinja").write_text(template)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    told = found(folder)
    assert len(told) == bool(words)
    assert words in "".join(told)
    assert all("52 ('<|endoftext|>')" in one and "generation_config.json" in one for one in told)


def test_a_template_for_single_turns_says_nothing_of_their_end(folder: Path) -> None:
    single = "{%- if messages | length > 2 %}{{ raise_exception('one turn') }}{% endif %}" + CHATML
    (folder / "chat_template.jinja").write_text(single)
    assert found(folder) == []
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}{% if add_generation_prompt %}={% endif %}")
    assert found(folder) == []


def test_stop_tokens_of_an_empty_list_are_those_of_the_config(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": []}')
    (folder / "config.json").write_text(json.dumps({"eos_token_id": stop_token_ids()}))
    assert found(folder) == []
    (folder / "config.json").write_text('{"eos_token_id": []}')
    with pytest.raises(CheckpointError, match=r"neither generation_config\.json nor config\.json has an eos_token_id"):
        found(folder)
