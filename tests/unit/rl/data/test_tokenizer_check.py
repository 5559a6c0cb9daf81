"""Tokenizers and chat templates of others: whatever they do ends as a problem, in bounded time and memory.

What is tried here is harmless without a limit, too: the limits are lowered.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import time
from pathlib import Path

import pytest
from tests.support.rejections import rejected
from tests.support.small_checkpoint import tokenizer, write_object

from posttrain.checkpoint.formats.tokenizer_files import read_config
from posttrain.checkpoint.tiny.tokenizer import make_tokenizer
from posttrain.errors import Problem
from posttrain.rl.data import tokenizer_check
from posttrain.rl.data.chat import stop_token_ids
from posttrain.rl.data.sandboxed_child import confined
from posttrain.rl.data.tokenizer_check import check_tokenizer

MIB = 1 << 20


def check(folder: Path, template: str = "") -> list[Problem]:
    made = make_tokenizer(256)
    made.chat_template = template or None
    made.save_pretrained(folder)
    return check_tokenizer(folder, 256)


@pytest.mark.parametrize(
    "template",
    [
        "",
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}",
        "{{ raise_exception('a system message must come first') }}",
        "{{ messages[1].content.lower() }}",
        "{{ 1 / 0 }}",
    ],
)
def test_templates_that_render_or_want_another_conversation_have_no_problem(tmp_path: Path, template: str) -> None:
    assert check(tmp_path, template) == []


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}", "not done after 2 s"),
        ("{% set x = 'a' * 400000000 %}{{ x }}", "it takes more than 0.2 GiB"),
        ("{{ 'a' * 2000000 }}", "2,000,000 characters for one message"),
        ("{{ messages.__class__.__mro__ }}", "SecurityError"),
        ("{{ raise_exception.__globals__['os'] }}", "SecurityError"),
        ("{% for m in messages %}", "TemplateSyntaxError"),
    ],
)
def test_a_hostile_template_is_rejected_before_anything_is_rendered_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, told: str
) -> None:
    monkeypatch.setattr(tokenizer_check, "SECONDS", 2.0 if "range" in template else 60.0)
    monkeypatch.setattr(tokenizer_check, "NUM_BYTES", 200 * MIB)
    (problem,) = check(tmp_path, template)
    assert told in problem.value
    assert "model.chat_template" in problem.remedy


def nested(depth: int) -> str:
    return '{"normalizer": ' + '{"type": "Sequence", "normalizers": [' * depth + "]}" * depth + "}"


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "null", "{}", "[" * 100_000, nested(50_000), "\ufeff{}", "\x00"),
        json.dumps({**tokenizer(), "model": 5}),
        json.dumps({**tokenizer(), "model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}),
        json.dumps({**tokenizer(), "model": {"type": "BPE", "vocab": {"a": 10**30}, "merges": [["a"]]}}),
        json.dumps({**tokenizer(), "added_tokens": [{"id": 2**40, "content": 7}]}),
        json.dumps({**tokenizer(), "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "x"}}),
        json.dumps({**tokenizer(), "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}),
        # These load, and fail at the first text.
        json.dumps({**tokenizer(), "normalizer": {"type": "Precompiled", "precompiled_charsmap": "CAAAAP////8AAAAA"}}),
        json.dumps({**tokenizer(), "model": {"type": "Unigram", "vocab": [["a", -1.0]], "unk_id": None}}),
        json.dumps({**tokenizer(), "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}}),
    ],
    ids=range(17),
)
def test_a_broken_tokenizer_is_a_problem(tmp_path: Path, text: str) -> None:
    write_object(tmp_path / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    (tmp_path / "tokenizer.json").write_text(text)
    (problem,) = check_tokenizer(tmp_path, 64)
    assert "tokenizer.json" in problem.value
    assert "the process that read it" not in problem.value, "the library's own reason, a panic too"
    assert "model.tokenizer" in problem.remedy


def test_a_class_that_makes_something_else_of_the_file_is_a_problem(tmp_path: Path) -> None:
    make_tokenizer(256).save_pretrained(tmp_path)
    write_object(tmp_path / "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer"})
    (problem,) = check_tokenizer(tmp_path, 256)
    assert problem.key == "tokenizer_config.json: tokenizer_class"
    assert "LlamaTokenizer, which encodes" in problem.value


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"a": 1, "a": 2}', "not JSON (has 'a' twice)"),
        ('{"a": NaN}', "not JSON (holds NaN, which is no finite number)"),
        ("[]", "holds a list, expected an object"),
    ],
)
def test_what_readers_of_tokenizer_config_json_take_for_different_things(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(text)
    with rejected("json-invalid", told):
        read_config(tmp_path, {})


@pytest.mark.parametrize("ids", ["x", {"a": 1}, [["a"]], [1, "x"], 1.5, True])
def test_what_ends_an_answer_is_a_token_id(tmp_path: Path, ids: object) -> None:
    write_object(tmp_path / "generation_config.json", {"eos_token_id": ids})
    with rejected("stop-token-invalid", "eos_token_id"):
        stop_token_ids(tmp_path)


def test_what_a_confined_function_returns_raises_and_dies_of() -> None:
    # Other tests of this process may have started some.
    before = set(multiprocessing.active_children())
    assert confined(lambda: [os.getpid()], 10, MIB * 100) != [os.getpid()]
    assert confined(lambda: list(resource.getrlimit(resource.RLIMIT_CORE)), 10, MIB * 100) == [0, 0]
    with pytest.raises(ChildProcessError, match=f"ended with -{signal.SIGKILL:d}"):
        confined(lambda: os.kill(os.getpid(), signal.SIGKILL), 10, MIB * 100)
    with pytest.raises(MemoryError, match=r"more than 0\.098 GiB"):
        confined(lambda: len(bytes(300 * MIB)), 10, MIB * 100)
    with pytest.raises(TimeoutError, match=r"not done after 0\.2 s"):
        confined(lambda: time.sleep(30), 0.2, MIB * 100)
    assert set(multiprocessing.active_children()) <= before
    with pytest.raises(ChildProcessError, match="over 16 MiB"):
        confined(lambda: "x" * (17 * MIB), 10, MIB * 100)
