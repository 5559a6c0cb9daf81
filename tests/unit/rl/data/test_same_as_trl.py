"""One row gives the prompt and response tokens that TRL gives for it, and that verl's call of the template gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from trl.data_utils import apply_chat_template

from posttrain.checkpoint.tiny.tokenizer import make_tokenizer
from posttrain.rl.data.chat import ChatTokenizer
from posttrain.rl.data.reading import Reading
from posttrain.rl.data.rows import read_rows

# As Qwen3's and GLM's, reduced: tools, reasoning, calls, results, and an end of turn that ends a response.
TEMPLATE = """{%- if tools %}<|system|>
{% for t in tools %}{{ t | tojson }}
{% endfor %}{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}<|assistant|>
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}({{ c.function.name }}: ARGUMENTS){% endfor %}<|endoftext|>
{%- else -%}<|{{ 'observation' if m.role == 'tool' else m.role }}|>
{{ m.content }}{% if m.name %} {{ m.name }}{% endif %}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>
{% endif %}"""
SHOWN = {
    "either": "{{ a if a is string else a | tojson }}",
    "object": "{% for k, v in a.items() %}{{ k }} {{ v }}{% endfor %}",
}
USER, SYSTEM = {"role": "user", "content": "what is 1+1?"}, {"role": "system", "content": "add."}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "x"}}}
CALLED = [
    {"role": "assistant", "content": "", "reasoning_content": "i ask", "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "content": "2"},
]
ANSWER = {"role": "assistant", "content": "it is 2", "reasoning_content": "one more"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}
ROWS = {
    "messages": {"prompt": [SYSTEM, USER], "label": "2"},
    "earlier turns": {"prompt": [USER, ANSWER, USER], "label": "2"},
    "tools": {"prompt": [SYSTEM, USER, *CALLED], "tools": [TOOL], "label": "2"},
    "prompt and completion": {"prompt": [USER, *CALLED], "completion": [ANSWER], "tools": [TOOL]},
    "a call to learn": {"prompt": [USER], "completion": [{**CALLED[0], "content": "so"}], "tools": [TOOL]},
}


@pytest.fixture(params=SHOWN)
def chat(request: pytest.FixtureRequest, tmp_path: Path) -> ChatTokenizer:
    make_tokenizer(256).save_pretrained(tmp_path)
    stops = {"eos_token_id": make_tokenizer(256).eos_token_id}
    (tmp_path / "generation_config.json").write_text(json.dumps(stops))
    arguments = "{% set a = c.function.arguments %}" + SHOWN[request.param]
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE.replace("ARGUMENTS", arguments))
    return ChatTokenizer(tmp_path)


@pytest.mark.parametrize("name", ROWS)
def test_prompt_and_response_have_the_same_tokens(chat: ChatTokenizer, tmp_path: Path, name: str) -> None:
    given = ROWS[name]
    (tmp_path / "a.jsonl").write_text(json.dumps(given) + "\n")
    (row,) = read_rows("a", [tmp_path / "a.jsonl"], Reading()).rows
    columns = {key: value for key, value in given.items() if key in ("prompt", "completion")}
    texts = apply_chat_template(columns, chat.tokenizer, given.get("tools"))

    def tokens(text: str) -> tuple[int, ...]:
        return tuple(chat.tokenizer(text, add_special_tokens=False)["input_ids"])

    assert chat.render(row.messages, row.tools) == tokens(texts["prompt"])
    raw = chat.tokenizer.apply_chat_template(
        given["prompt"], tools=given.get("tools"), add_generation_prompt=True, tokenize=False
    )
    assert chat.render(row.messages, row.tools) == tokens(raw)
    if "completion" in given:
        answer = row.answer if row.answer else row.label[0]
        prompt, response = chat.render_answered(row.messages, answer, row.tools)
        assert prompt + response == tokens(texts["prompt"] + texts["completion"])
