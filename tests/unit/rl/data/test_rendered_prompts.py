"""Each mistake of template or tokenizer, made on purpose."""

import json
from pathlib import Path

import pytest
from tests.support.rejections import rejected
from tokenizers.processors import TemplateProcessing

from posttrain.checkpoint.tiny.tokenizer import CHAT_TEMPLATE, make_tokenizer, stop_token_ids
from posttrain.errors import Problem
from posttrain.rl.data.chat import ChatTokenizer
from posttrain.rl.data.rendered_prompts import check_rendered
from posttrain.types import Prompt

SOUND = [Prompt(i, ({"role": "user", "content": f"sort {i}"},), f"{i + 100}") for i in range(4)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tokenizer(256).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": stop_token_ids()}))
    return tmp_path


def found(folder: Path, prompts: list[Prompt] = SOUND) -> list[Problem]:
    return check_rendered(ChatTokenizer(folder), folder, prompts)


def test_nothing_is_said_of_a_sound_model(folder: Path) -> None:
    assert found(folder) == []


def test_no_generation_prompt(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE.split("{%- if add_generation_prompt")[0])
    (problem,) = found(folder)
    assert (problem.code, problem.key) == ("no-generation-prompt", f"{folder}: chat template")


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
    assert problem.key == f"{folder}: end token"
    assert (problem.value, problem.allowed) == ("'<|endoftext|>' twice in a row in 4 of 4 prompts", "once")
    assert problem.remedy.startswith("take it out of the template")


def test_tokens_are_doubled_where_a_prompt_doubles_them(folder: Path) -> None:
    """Once in a row each: other tokens may repeat, and so may this one with something between."""
    texts = ("<|endoftext|>" * 2, "aa", "<|endoftext|> <|endoftext|>", "<|endoftext|>" * 3)
    prompts = [Prompt(i, ({"role": "user", "content": text},), "1") for i, text in enumerate(texts)]
    (problem,) = found(folder, prompts)
    assert problem.value == "'<|endoftext|>' twice in a row in 2 of 4 prompts"


LAST = "tokens of the tokenizer, below 64"


@pytest.mark.parametrize(
    ("stops", "value", "allowed", "remedy"),
    [
        ([52, 63], None, None, None),
        ([0, 52], None, None, None),
        ([52, 64], "[64] of [52, 64]", LAST, "correct generation_config.json or config.json"),
        ([52, -1], "[-1] of [-1, 52]", LAST, "correct generation_config.json or config.json"),
        (
            [58],
            "[58], without the tokenizer's own 52 ('<|endoftext|>')",
            "the tokens that end a response",
            "where the chat template ends a turn by it, add it to generation_config.json",
        ),
    ],
)
def test_stop_tokens(folder: Path, stops: list[int], value: str | None, allowed: str, remedy: str) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    told = [problem for problem in found(folder) if problem.key == f"{folder}: eos_token_id"]
    assert [problem.value for problem in told] == ([value] if value else [])
    assert all(problem.allowed == allowed and problem.remedy.endswith(remedy) for problem in told)


def test_a_token_of_the_generation_prompt_is_not_doubled_by_the_end_of_an_answer(folder: Path) -> None:
    end = "<|endoftext|>"
    turns = (
        f"{{% for m in messages %}}{{{{ m.content }}}}{{% if m.role == 'assistant' %}}{end}{{% endif %}}{{% endfor %}}"
    )
    (folder / "chat_template.jinja").write_text(f"{turns}{{% if add_generation_prompt %}}{end}{{% endif %}}")
    assert found(folder) == []


def test_what_a_tokenizer_adds_by_itself_ends_no_answer(folder: Path) -> None:
    made = make_tokenizer(256)
    added = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 52)])
    made.backend_tokenizer.post_processor = added
    made.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(CHATML)
    (problem,) = found(folder)
    assert problem.code == "turn-never-ends"


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
        (CHATML.replace("\n", ""), [0, *stop_token_ids()], "none of it is a stop token: 0 ("),
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
    for problem in told:
        assert words in problem.value
        assert problem.value.endswith(" 52 ('<|endoftext|>'), 59 ('<|user|>'), 61 ('<|observation|>')")
        assert problem.key == f"{folder}: chat template"
        assert problem.allowed == "a template that ends an answer with a stop token"
        assert "generation_config.json" in problem.remedy


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
    with rejected("no-stop-token", "generation_config.json", "config.json", "eos_token_id"):
        found(folder)
