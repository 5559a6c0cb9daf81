from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.rejections import rejected

from posttrain.checkpoint.formats.safetensors_io import read_header
from posttrain.store.placeholders import placeholder
from posttrain.store.plain_json import read_json

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4976698672\n"
PLACEHOLDERS = {
    "lfs": (LFS, "a Git LFS pointer, not the file of 4976698672 bytes that it stands for: run `git lfs pull`"),
    "xet": (b"# xet version 0\nfilesize = 5\nhash = 'a'\n", "a Git Xet pointer, not the file that it stands for"),
    "page": (b"<!DOCTYPE html><html><body>Sign in</body></html>", "an HTML page, not a file of a model"),
    "plain page": (b"\xef\xbb\xbf \n<!-- a -->\n<HTML lang='en'>", "an HTML page"),
    "xhtml": (b'<?xml version="1.0"?>\n<!DOCTYPE html PUBLIC "">', "an HTML page"),
}


@pytest.mark.parametrize("kind", PLACEHOLDERS)
def test_what_lies_there_instead_is_named(kind: str, tmp_path: Path) -> None:
    content, words = PLACEHOLDERS[kind]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    assert placeholder(path).startswith(words)
    with rejected("placeholder", "model.safetensors"):
        read_header(path)
    with pytest.raises(ValueError, match=r"an? (Git|HTML)"):
        read_json(path)


@pytest.mark.parametrize("content", [b"", b"{}", b'{"version": 1}', b"<a>", b"<htmlx>", b"version 2", b"\x00" * 8])
def test_other_files_are_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    assert placeholder(tmp_path / "file") == ""


@pytest.mark.parametrize(
    ("content", "code", "sizes"),
    [
        (b"", "shard-empty", []),
        (b"\x10\x00\x00", "shard-truncated", ["3 bytes", "8"]),
        (b"\x10" + b"\x00" * 7 + b"{", "shard-truncated", ["9 bytes", "24"]),
        (b"PK\x03\x04abcdefgh", "not-safetensors", []),
    ],
)
def test_a_file_that_is_cut_is_named_without_absurd_numbers(
    content: bytes, code: str, sizes: list[str], tmp_path: Path
) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with rejected(code, "a.safetensors", *sizes):
        read_header(tmp_path / "a.safetensors")
