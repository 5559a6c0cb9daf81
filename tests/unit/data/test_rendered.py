"""Each mistake of template, tokenizer or labels, made on purpose."""

import json
from pathlib import Path

import pytest

from posttrain.checkpoint.tiny.tokenizer import CHAT_TEMPLATE, make_tokenizer, stop_token_ids
from posttrain.data.chat import ChatTokenizer
from posttrain.data.rendered import check_rendered
from posttrain.types import Prompt

PROMPTS = [Prompt(i, ({"role": "user", "content": f"sort {i + 100}4"},), f"{i + 100}") for i in range(4)]
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


def _old(folder: Path) -> None:
    (problem,) = found(folder, PROMPTS)
    assert "4 of 4 rows, first in row 1" in problem
    assert found(folder, [*SOUND, *PROMPTS[:1]]) == []
