from pathlib import Path

import pytest
from tests.support.rejections import rejected

from posttrain.checkpoint.hub.listed_files import ContentHashes, ListedFile, Manifest, read_manifest, write_manifest

FILES = tuple(ListedFile(f"{n}.safetensors", size) for n, size in enumerate((7, 5, 5, 3, 1, 1)))


def test_shares_hold_every_file_once_and_about_equally_many_bytes():
    manifest = Manifest({}, FILES)
    shares = [manifest.share(part, 2) for part in range(2)]
    assert sorted(file.path for share in shares for file in share) == [file.path for file in FILES]
    assert [sum(file.size_bytes for file in share) for share in shares] == [13, 9]
    assert [len(manifest.share(part, 8)) for part in range(8)] == [1] * 6 + [0] * 2


def test_where_a_list_is_from_does_not_change_its_digest(tmp_path):
    manifest = Manifest({"kind": "folder", "folder": "here"}, FILES)
    assert manifest.digest == Manifest({"kind": "folder", "folder": "there"}, FILES).digest
    assert manifest.digest != Manifest(manifest.source, FILES[1:]).digest
    write_manifest(tmp_path / "hf.manifest.json", manifest)
    assert read_manifest(tmp_path / "hf.manifest.json") == manifest


def test_a_list_that_is_not_there():
    with rejected("manifest-invalid", "nowhere"):
        read_manifest(Path("nowhere"))


@pytest.mark.parametrize(
    ("file", "misfit"),
    [
        (ListedFile("a", 6), ""),
        (ListedFile("a", 6, git_blob="ce013625030ba8dba906f756967f9e9ca394464a"), ""),
        (ListedFile("a", 6, sha256="5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03"), ""),
        (ListedFile("a", 7), "6 bytes, 7 are listed"),
        (ListedFile("a", 6, git_blob="0" * 40), f"Git blob id ce013625030ba8dba906f756967f9e9ca394464a, {'0' * 40} is"),
        (ListedFile("a", 6, xxh3_128="0" * 32), "xxh3_128 "),
    ],
)
def test_hashes_of_content_that_comes_in_pieces(file, misfit):
    hashes = ContentHashes(file)
    hashes.update(b"what came before")
    hashes.restart()
    hashes.update(b"hel")
    hashes.update(b"lo\n")
    assert hashes.misfit().startswith(misfit)
    assert bool(hashes.misfit()) == bool(misfit)
