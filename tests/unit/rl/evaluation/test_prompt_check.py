"""Prompts that the chat template rejects or shows only in part, and labels that stand in their prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.rejections import rejected

from posttrain.checkpoint.tiny.tokenizer import make_tokenizer, stop_token_ids
from posttrain.errors import ConfigError
from posttrain.plan.resolve import resolve
from posttrain.rl.data.reading import Reading
from posttrain.rl.data.rows import read_rows
from posttrain.rl.evaluation.data_check import DataCheck, check_data
from posttrain.types import Prompt

CONFIG = Path(__file__).parents[4] / "config"
# As GLM's: reasoning and arguments of calls, item by item.
TEMPLATE = """{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>
<think>{{ m.reasoning_content or '' }}</think>{{ m.content or '' }}{% for c in m.tool_calls or [] %}
{{ c.function.name }}{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}{% endfor %}
{%- else %}{{ '<|observation|>' if m.role == 'tool' else '<|user|>' }}
{{ m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>
<think>{% endif %}"""
HELDOUT = [Prompt(0, ({"role": "user", "content": "hold"},), "1")]


@pytest.fixture
def check(tmp_path: Path):
    make_tokenizer(256).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": stop_token_ids()}))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)

    def check(rows: list[dict], *words: str, **recipe: str) -> DataCheck:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        read = read_rows("rows", [path], Reading(duplicates="keep"))
        assert read.bad == []
        prompts = [
            Prompt(i, row.messages, row.label, "", row.columns, row.tools, row.is_text, row.answer)
            for i, row in enumerate(read.rows)
        ]
        named = f"data.kind=files data.train_file={path} data.reward=exact_match"
        config = resolve({"model": "tiny", "site": "local", "set": " ".join([named, *words]), **recipe}, CONFIG).config
        return check_data(config, tmp_path, prompts, HELDOUT)

    return check


def _calling(arguments: object) -> list[dict]:
    call = {"type": "function", "function": {"name": "w", "arguments": arguments}}
    return [
        {"role": "user", "content": "rain in a?"},
        {"role": "assistant", "content": "", "reasoning_content": "i ask", "tool_calls": [call]},
        {"role": "tool", "content": "no"},
    ]


@pytest.mark.parametrize("arguments", [{"town": "a"}, '{"town": "a"}'])
def test_arguments_as_text_and_reasoning_of_earlier_turns_reach_the_prompt(check, arguments: object) -> None:
    found = check([{"prompt": _calling(arguments), "label": f"{i}"} for i in range(12)])
    assert found.problems == found.warnings == []
    assert "<think>i ask</think>w town=a<|observation|>\nno<|assistant|>\n<think>" in found.examples[0]["text"]


def test_rows_that_the_template_does_not_take_are_named_with_message_and_reason(check) -> None:
    wrong = _calling({})
    del wrong[1]["tool_calls"][0]["function"]["arguments"]
    rows = [{"prompt": "a", "label": "1"}, *({"prompt": wrong, "label": "1"} for _ in range(7))]
    with pytest.raises(ConfigError) as raised:
        check(rows)
    (problem,) = raised.value.problems
    assert problem.key == "train.jsonl"
    lines = problem.value.splitlines()
    assert lines[0] == "7 of 8 rows that the chat template does not take:"
    assert "row 2: " in lines[1]
    assert "with message 2 (assistant): 'dict object' has no attribute 'arguments'" in lines[1]
    assert lines[-1].strip() == "and 2 more"


def test_what_the_template_leaves_out_is_a_warning_with_its_count(check) -> None:
    row = {"role": "user", "content": "a", "mood": "calm", "name": "bob"}
    found = check([{"prompt": [row], "label": f"{i}", "tools": [{"name": "t"}]} for i in range(12)])
    (warning,) = found.warnings
    assert warning.key == "prompts"
    assert "'mood' of the user (12 prompts with it): not shown in 12 of 12 places" in warning.value
    assert "'tools' (12 prompts with it)" in warning.value
    assert "'name'" not in warning.value


@pytest.mark.parametrize("label", ["{i}", "{i} apples"])
def test_prompts_that_contain_their_label_are_refused_unless_a_key_allows_it(check, label: str) -> None:
    labels = [label.format(i=i % 10) for i in range(40)]
    rows = [{"prompt": f"how many? the answer is {text}.", "label": text} for text in labels]
    (problem,) = check(rows).problems
    assert problem.key == "data.label_key"
    assert "in 40 of 40 rows" in problem.value
    allowed = check(rows, "reward.max_label_in_prompt=1")
    assert allowed.problems == []
    assert [warning.key for warning in allowed.warnings] == ["data.label_key"]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_fine_tuning_learns_the_reasoning(check, name: str, tmp_path: Path) -> None:
    """Transformers takes each name for the first."""
    answer = {"role": "assistant", "content": "2", name: "one more"}
    rows = [{"messages": [{"role": "user", "content": f"{i}+1?"}, answer]} for i in range(3)]
    found = check(rows, recipe="sft")
    assert found.problems == found.warnings == []
    from posttrain.rl.data.chat import ChatTokenizer

    chat = ChatTokenizer(tmp_path)
    _, response = chat.render_answered([{"role": "user", "content": "1+1?"}], answer)
    assert chat.tokenizer.decode(list(response)) == "one more</think>2<|user|>"


def test_responses_that_cannot_be_learned_are_named_by_row(check) -> None:
    good = {"role": "assistant", "content": "2", "reasoning_content": "so"}
    calls = [{"function": {"name": "w"}}]
    rows = [
        {"messages": [{"role": "user", "content": "a"}, answer]} for answer in (good, {**good, "tool_calls": calls})
    ]
    with rejected("rows-not-rendered", "1 of 2 rows", "row 2: ", "message 2", key="responses of train.jsonl"):
        check(rows, recipe="sft")


def test_what_a_response_loses_is_a_warning(check) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "2", "thoughts": "b"}]}
    ] * 3
    (warning,) = check(rows, recipe="sft").warnings
    assert "'thoughts' of the response to learn (3 prompts with it): not shown in 3 of 3 places" in warning.value


AGENT = ("data.reward=environment", "data.environment=calculator")
QUESTIONS = [{"prompt": f"{i}+1", "label": f"{i + 1}"} for i in range(8)]


def test_a_template_that_drops_thinking_is_told_of_where_there_are_turns(check, tmp_path: Path) -> None:
    code = "template-drops-thinking"
    assert code not in [problem.code for problem in check(QUESTIONS, *AGENT).warnings]
    (tmp_path / "chat_template.jinja").write_text(
        TEMPLATE.replace("m.reasoning_content or ''", "(m.reasoning_content or '') if loop.last else ''")
    )
    (told,) = [problem for problem in check(QUESTIONS, *AGENT).warnings if problem.code == code]
    assert (told.key, told.value) == ("environment.history", "keep")
    assert code not in [problem.code for problem in check(QUESTIONS).warnings]


def test_a_template_whose_turns_do_not_end_is_refused_where_there_are_turns(check, tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    check(QUESTIONS)
    with rejected("template-without-turns"):
        check(QUESTIONS, *AGENT)
