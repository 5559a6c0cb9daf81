import pytest
from tests.support.rejections import rejected
from tests.support.resolved_words import CONFIG_DIR

from posttrain.errors import ConfigError
from posttrain.plan.resolve import resolve
from posttrain.store import Paths


def _resolve(**keys):
    words = " ".join(f"model.{key}={value}" for key, value in keys.items())
    return resolve({"model": "tiny", "site": "local", "set": words}, CONFIG_DIR)


def test_a_chat_template_is_part_of_the_run_and_of_the_copy_that_it_is_written_to(tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text("a")
    without, first = _resolve(), _resolve(chat_template=template)
    template.write_text("b")
    second = _resolve(chat_template=template)
    runs = [without, first, second]
    assert len({resolved.run for resolved in runs}) == 3
    assert len({Paths(resolved).hf_patched for resolved in runs}) == 3
    assert len({Paths(resolved).torch_dist for resolved in runs}) == 3
    assert len({Paths(resolved).hf for resolved in runs}) == 1
    assert "own_digests" not in without.experiment["model"]


def test_a_tokenizer_and_its_config_count(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    first = _resolve(tokenizer=tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "README.md").write_text("not taken")
    second = _resolve(tokenizer=tmp_path)
    assert len(first.config.model.own_digests) == 1
    assert len(second.config.model.own_digests) == 2
    assert first.config.model.own_digests[0] == second.config.model.own_digests[0]


@pytest.mark.parametrize("key", ["chat_template", "tokenizer"])
def test_files_that_are_not_there_are_found_by_the_plan(tmp_path, key):
    with pytest.raises(ConfigError) as caught:
        _resolve(**{key: tmp_path / "absent"})
    assert [problem.key for problem in caught.value.problems] == [f"model.{key}"]


def test_a_template_that_is_no_text_is_rejected(tmp_path):
    (tmp_path / "chat.jinja").write_bytes(b"\xff")
    with rejected("file-unreadable", key="model.chat_template"):
        _resolve(chat_template=tmp_path / "chat.jinja")
