import json

import pytest

from posttrain.checkpoint.tiny.tokenizer import make_tokenizer
from posttrain.data.chat import ChatTokenizer
from posttrain.errors import CheckpointError, ConfigError

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
    with pytest.raises(CheckpointError, match="no chat template"):
        ChatTokenizer(folder)


def test_no_tokenizer_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="the tokenizer cannot be loaded"):
        ChatTokenizer(tmp_path)


def test_code_of_a_checkpoint_is_not_run(folder):
    proof = folder / "ran"
    (folder / "tokenization_mine.py").write_text(f"open({str(proof)!r}, 'w').write('x')\nclass Mine: pass\n")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": [None, "tokenization_mine.Mine"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="cannot be loaded"):
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
    with pytest.raises(ConfigError, match=r"data\.chat_template_kwargs"):
        ChatTokenizer(folder, [word])
