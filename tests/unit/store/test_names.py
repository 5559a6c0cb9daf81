"""Names of files: what may be one, and that nothing is written or deleted behind a link."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path

import pytest
from tests.support.rejections import rejected

from posttrain.store import FileRecord, RelativeName, record_file
from posttrain.store.names import check_digest

HOSTILE = {
    "/etc/passwd": "an absolute path",
    "..": "an absolute path",
    "a/../../b": "an absolute path",
    "a/./b": "an absolute path",
    "a//b": "an absolute path",
    "a/": "an absolute path",
    "": "an absolute path",
    ".": "an absolute path",
    "a\\..\\b": "a backslash",
    "a\x00b": "characters that cannot be printed",
    "a\nb": "characters that cannot be printed",
    "a\x1b[2Jb": "characters that cannot be printed",
    "a\u202egpj.exe": "characters that cannot be printed",
    "a\ud800": "characters that cannot be printed",
    "a" * 201: "longer than 200 bytes",
    "ü" * 101: "longer than 200 bytes",
    "/".join(["a" * 100] * 11): "1024 in all",
}


@pytest.mark.parametrize(
    "text", ["model-00001-of-00282.safetensors", ".metadata", "..a", "a..", "a/.b/c d", "ü", "a" * 200, "ü" * 100]
)
def test_names_that_stay_in_their_folder(text: str, tmp_path: Path) -> None:
    name = RelativeName(text)
    assert name == text
    assert (tmp_path / name).resolve().is_relative_to(tmp_path)
    assert json.loads(json.dumps([name])) == [text]
    for again in (copy.deepcopy(name), pickle.loads(pickle.dumps(name)), RelativeName(name)):
        assert (again, type(again)) == (text, RelativeName)


def test_the_longest_name() -> None:
    longest = "/".join([*(["a" * 200] * 5), "b" * 19])
    assert len(longest) == 1024
    assert RelativeName(longest) == longest
    with rejected("name-leaves-folder", "1024 in all"):
        RelativeName(longest + "b")


@pytest.mark.parametrize("text", HOSTILE)
def test_names_that_do_not(text: str) -> None:
    with rejected("name-leaves-folder") as refused:
        RelativeName(text, "x.json")
    message = str(refused.value)
    assert message.startswith(f"x.json: {text[:120]!a} is not ")
    assert HOSTILE[text] in message
    assert message.isprintable()
    assert len(message) < 600


@pytest.mark.parametrize("text", [None, 7, ["a"], {"a": 1}])
def test_what_is_no_text(text: object) -> None:
    with rejected("name-leaves-folder", f"a {type(text).__name__} "):
        RelativeName(text)


def test_a_record_holds_nothing_else(tmp_path: Path) -> None:
    assert type(FileRecord("a/b", 1, "0" * 32).path) is RelativeName
    with rejected("name-leaves-folder", "'../a'"):
        FileRecord("../a", 1, "0" * 32)
    (tmp_path / "a\nb").touch()
    with rejected("name-leaves-folder", rf"{tmp_path}: 'a\nb'"):
        record_file(tmp_path, "a\nb")


def test_nothing_is_written_behind_a_link(tmp_path: Path) -> None:
    folder, victim = tmp_path / "folder", tmp_path / "victim"
    for made in (folder / "a" / "real", victim):
        made.mkdir(parents=True)
    assert RelativeName("a/real/file").below(folder) == folder / "a/real/file"
    assert RelativeName("a/new/file").below(folder) == folder / "a/new/file"
    (folder / "a" / "b").symlink_to(victim)
    for name in ("a/b/file", "a/b/c/d/file"):
        with rejected("link-in-the-way", f"{folder}/a/b"):
            RelativeName(name).below(folder)
    assert RelativeName("a/b").below(folder) == folder / "a/b", "a link itself can be replaced"
    (tmp_path / "alias").symlink_to(folder)
    assert RelativeName("a/real/file").below(tmp_path / "alias") == tmp_path / "alias/a/real/file", "ours to name"


@pytest.mark.parametrize("text", ["0123456789abcdef" * 2, ""])
def test_digests(text: str) -> None:
    check_digest(text, 32)


@pytest.mark.parametrize(
    "text", ["0" * 31, "0" * 33, "A" * 32, "../" + "0" * 29, "0" * 32 + "\n", None, 0, [], "g" * 32]
)
def test_what_is_no_digest(text: object) -> None:
    with rejected("digest-invalid", "32 hexadecimal digits") as refused:
        check_digest(text, 32)
    assert str(refused.value).isprintable()
