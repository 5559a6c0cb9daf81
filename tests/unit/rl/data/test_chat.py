import json

import pytest
from tests.support.rejections import rejected

from posttrain.checkpoint.tiny.tokenizer import STOP_TOKENS, make_tokenizer
from posttrain.errors import ConfigError
from posttrain.rl.data.chat import ChatTokenizer

MESSAGES = ({"role": "system", "content": "sort the digits."}, {"role": "user", "content": "3141"})
RENDERED = "[gMASK]<sop><|system|>\nsort the digits.<|user|>\n3141<|assistant|>\n"


@pytest.fixture
def folder(tmp_path):
    make_tokenizer(256).save_pretrained(tmp_path)
    return tmp_path


def test_a_conversation_is_rendered_by_the_models_own_template(folder):
    chat = ChatTokenizer(folder)
    ids = chat.render(MESSAGES)
    assert len(ids) == 28
    assert chat.tokenizer.decode(list(ids), skip_special_tokens=False) == RENDERED
    assert ids == tuple(chat.tokenizer.encode(RENDERED, add_special_tokens=False))


def test_a_conversation_with_an_answer(folder):
    chat = ChatTokenizer(folder)
    longer = chat.render([*MESSAGES, {"role": "assistant", "content": "1134"}, {"role": "user", "content": "21"}])
    assert chat.tokenizer.decode(list(longer)) == RENDERED + "1134<|user|>\n21<|assistant|>\n"


def test_decode_leaves_out_the_end_token(folder):
    chat = ChatTokenizer(folder)
    end = chat.tokenizer.eos_token_id
    assert chat.decode([*chat.tokenizer.encode("1134"), end]) == "1134"
    assert chat.decode(chat.tokenizer.encode("a, b\n1")) == "a, b\n1"


def test_a_template_of_another_form_is_obeyed(folder):
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}=")
    chat = ChatTokenizer(folder)
    assert chat.decode(chat.render(MESSAGES)) == "sort the digits.3141="


def test_tools_reach_the_template(folder):
    (folder / "chat_template.jinja").write_text(
        "{% for t in tools or [] %}{{ t.name }} {% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}="
    )
    chat = ChatTokenizer(folder)
    assert chat.decode(chat.render(MESSAGES[1:], [{"name": "add"}])) == "add 3141="
    assert chat.decode(chat.render(MESSAGES[1:])) == "3141="


def test_no_template_is_refused(folder):
    (folder / "chat_template.jinja").unlink()
    with rejected("no-chat-template"):
        ChatTokenizer(folder)


def test_no_tokenizer_is_refused(tmp_path):
    with rejected("tokenizer-invalid"):
        ChatTokenizer(tmp_path)


def test_code_of_a_checkpoint_is_not_run(folder):
    proof = folder / "ran"
    (folder / "tokenization_mine.py").write_text(f"open({str(proof)!r}, 'w').write('x')\nclass Mine: pass\n")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": [None, "tokenization_mine.Mine"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with rejected("tokenizer-invalid"):
        ChatTokenizer(folder)
    assert not proof.exists()


def test_variables_of_the_template(folder):
    (folder / "chat_template.jinja").write_text(
        "{{ messages[0].content }}{% if not thinking %} 1{% endif %}{{ effort }}"
        "{% if add_generation_prompt %}={% endif %}"
    )
    chat = ChatTokenizer(folder, ["thinking=false", "effort=high"])
    assert chat.decode(chat.render([{"role": "user", "content": "a"}])) == "a 1high="
    assert chat.decode(chat.render([{"role": "user", "content": "a"}], generation_prompt=False)) == "a 1high"


@pytest.mark.parametrize("word", ["thinking", "=1", "a b=1", "tokenize=false"])
def test_what_is_no_variable_of_the_template_is_refused(folder, word):
    with rejected("not-key-value", key="data.chat_template_kwargs"):
        ChatTokenizer(folder, [word])


# ---- answers that are given ----

QWEN_LIKE = """{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% if '</think>' not in m.content %}<think>

</think>

{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}({{ c.function.name }}){% endfor %}
{%- else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
ANSWER = {"role": "assistant", "content": "1134"}


def qwen_like(folder, template=QWEN_LIKE):
    tokenizer = make_tokenizer(256)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(template)
    stops = [tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.eos_token_id]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    return ChatTokenizer(folder)


def glm(folder):
    stops = [make_tokenizer(256).convert_tokens_to_ids(token) for token in STOP_TOKENS]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    return ChatTokenizer(folder)


def shown(chat, tokens):
    return chat.tokenizer.decode(list(tokens), skip_special_tokens=False)


def test_an_answer_of_glm_ends_with_the_turn_that_follows(folder):
    chat = glm(folder)
    prompt, answer = chat.render_answered(MESSAGES, ANSWER)
    assert prompt == chat.render(MESSAGES)
    assert shown(chat, answer) == "1134<|user|>"
    assert shown(chat, chat.render_answered(MESSAGES, ANSWER | {"tool_calls": [{}]})[1]) == "1134<|observation|>"
    conversation = chat.render([*MESSAGES, ANSWER, {"role": "user", "content": "21"}])
    assert conversation[: len(prompt) + len(answer)] == prompt + answer, "what the model sees in a longer conversation"


def test_an_answer_of_qwen_ends_with_its_end_of_turn_and_nothing_behind_it(folder):
    chat = qwen_like(folder)
    prompt, answer = chat.render_answered(MESSAGES, ANSWER)
    assert shown(chat, prompt).endswith("3141<|im_end|>\n<|im_start|>assistant\n")
    assert shown(chat, answer) == "<think>\n\n</think>\n\n1134<|im_end|>"
    reasoned = {"role": "assistant", "content": "<think>\nso\n</think>\n\n1134"}
    assert shown(chat, chat.render_answered(MESSAGES, reasoned)[1]) == "<think>\nso\n</think>\n\n1134<|im_end|>"
    calling = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]}
    assert shown(chat, chat.render_answered(MESSAGES, calling)[1]).endswith("(add)<|im_end|>")


def test_an_answer_without_any_end_of_turn_ends_the_text(folder):
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    chat = glm(folder)
    assert shown(chat, chat.render_answered(MESSAGES, ANSWER)[1]) == "1134<|endoftext|>"


def test_a_template_that_asks_otherwise_than_it_answers_is_refused(folder):
    chat = qwen_like(folder, QWEN_LIKE.replace("assistant\n{% endif %}", "assistant\n<think>\nwell{% endif %}"))
    with pytest.raises(ConfigError) as caught:
        chat.render_answered(MESSAGES, ANSWER)
    (problem,) = caught.value.problems
    assert problem.key == f"{folder}: chat template"
    assert problem.value == "'well' where it asks for an answer, '\\n</think>\\n\\n1134<|im_end|>\\n' with the answer"
    assert "<think>" in problem.remedy
    opened = {"role": "assistant", "content": "<think>\nwell</think>1134"}
    assert shown(chat, chat.render_answered(MESSAGES, opened)[1]) == "</think>1134<|im_end|>"


def test_a_template_that_leaves_out_some_of_the_answer_is_refused(folder):
    stripping = QWEN_LIKE.replace("{{ m.content }}{% for c", "{{ m.content.split('</think>')[-1] }}{% for c")
    with rejected("answer-not-whole"):
        qwen_like(folder, stripping).render_answered(MESSAGES, {"role": "assistant", "content": "<think>a</think>b"})


def test_a_model_that_names_no_stop_token_is_refused(folder):
    with rejected("no-stop-token", "eos_token_id"):
        ChatTokenizer(folder).render_answered(MESSAGES, ANSWER)
