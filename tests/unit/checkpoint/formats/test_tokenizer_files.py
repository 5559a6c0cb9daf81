"""Which tokenizer files are read, converted and changed."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.rejections import rejected

from posttrain.checkpoint.formats.config_patch import Change
from posttrain.checkpoint.formats.tokenizer_files import converted_tokenizer, read_config, tokenizer_changes

NAME = "tokenizer_config.json"
BYTE_LEVEL_BPE = b'{"model": {"type": "BPE"}, "pre_tokenizer": {"type": "ByteLevel"}}'


def test_a_file_that_is_no_vocabulary_is_named(tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").write_text("a b c\n")
    with rejected("vocabulary-invalid", tmp_path / "tiktoken.model"):
        converted_tokenizer(tmp_path, {"tokenizer_class": "TikTokenTokenizer"}, 64)


def test_nothing_is_converted_that_is_unknown_there_already_or_missing(tmp_path: Path) -> None:
    known = {"tokenizer_class": "TikTokenTokenizer"}
    assert converted_tokenizer(tmp_path, known, 64) is None
    (tmp_path / "tiktoken.model").write_text("YQ== 0\n")
    assert converted_tokenizer(tmp_path, known, 64)
    assert converted_tokenizer(tmp_path, {"tokenizer_class": "Another"}, 64) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    assert converted_tokenizer(tmp_path, known, 64) is None


@pytest.mark.parametrize(
    ("name", "tokenizer", "is_replaced"),
    [
        ("Qwen2Tokenizer", BYTE_LEVEL_BPE, False),
        ("Qwen2TokenizerFast", BYTE_LEVEL_BPE, False),
        ("Qwen2Tokenizer", BYTE_LEVEL_BPE.replace(b"BPE", b"Unigram"), True),
        ("Qwen2Tokenizer", BYTE_LEVEL_BPE.replace(b"ByteLevel", b"Metaspace"), True),
        ("LlamaTokenizer", BYTE_LEVEL_BPE, True),
        ("PreTrainedTokenizerFast", BYTE_LEVEL_BPE, False),
    ],
)
def test_a_class_is_kept_where_it_takes_the_file_as_it_is(name: str, tokenizer: bytes, is_replaced: bool) -> None:
    change = Change("replace", "/tokenizer_class", name, "PreTrainedTokenizerFast")
    assert tokenizer_changes({"tokenizer_class": name}, tokenizer, False) == [change] * is_replaced


def test_a_configuration_that_replaces_the_checkpoints_comes_first(tmp_path: Path) -> None:
    assert read_config(tmp_path, {}) == {}
    assert read_config(tmp_path, {NAME: b'{"a": 1}'}) == {"a": 1}
    (tmp_path / NAME).write_text('{"a": 2}')
    assert read_config(tmp_path, {}) == {"a": 2}
    assert read_config(tmp_path, {NAME: b'{"a": 1}'}) == {"a": 1}


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '{"a": NaN}', "{", "[1]"])
def test_a_configuration_that_can_be_read_in_two_ways_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_text(text)
    with rejected("json-invalid", "tokenizer_config.json"):
        read_config(tmp_path, {})
