"""Receipts: what they say, when they are believed, and that they are written last."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from pathlib import Path

import pytest
from tests.support.rejections import rejected
from tests.support.system_calls import Calls

from posttrain import __version__
from posttrain.errors import CheckpointError
from posttrain.store import (
    FORMAT_VERSIONS,
    FileRecord,
    Receipt,
    check_files,
    read_receipt,
    read_records,
    receipt_of,
    record_file,
    record_files,
    refuse_files,
    require_files,
    write_receipt,
)

# xxh3_128 of "hello\n" and of nothing, by the library of its author.
HELLO, EMPTY = "6bba86c7e069f56d5a10b435f1c8e49c", "99aa06d3014798d86001c324468d497f"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "hf"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "b").write_text("hello\n")
    (folder / "a").touch()
    return folder


@pytest.mark.parametrize(
    ("old", "new", "code", "found"),
    [
        ("finalize_torch_dist", "finalize_torch_d!st", "receipt-of-unknown-step", "'finalize_torch_d!st'"),
        ('"num": 3', '"num": 2', "receipt-changed", "digest"),
        ('"inputs"', '"imputs"', "receipt-invalid", ""),
        ('"inputs": {}', '"inputs": 5', "receipt-invalid", ""),
        ('"files": []', '"files": [{"path": "a"}]', "receipt-invalid", ""),
        ('"files": []', '"files": 5', "receipt-invalid", ""),
        ('"format_version": 2', '"format_version": 1', "receipt-changed", "format 1"),
        ("{", "", "receipt-invalid", ""),
    ],
)
def test_a_receipt_that_was_changed_is_refused(tmp_path, old, new, code, found):
    path = tmp_path / "x.receipt.json"
    write_receipt(path, Receipt("finalize_torch_dist", (), {}, {"num": 3}), started=0.0)
    assert read_receipt(path).settings == {"num": 3}
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with rejected(code, path, found, "delete it and run again"):
        read_receipt(path)


def test_a_receipt_that_is_not_there(tmp_path: Path) -> None:
    with rejected("receipt-missing"):
        read_receipt(tmp_path / "x.receipt.json")


def test_a_receipt_that_may_not_be_read_is_not_absent(tmp_path: Path) -> None:
    (tmp_path / "x.receipt.json").mkdir()
    with pytest.raises(IsADirectoryError):
        read_receipt(tmp_path / "x.receipt.json")


def test_what_a_receipt_says(folder: Path) -> None:
    files = (FileRecord("sub/b", 6, HELLO, "f" * 64), FileRecord("a", 0, EMPTY))
    receipt = Receipt("finalize_torch_dist", files, {"hf": "1" * 64}, {"num": 3})
    content = {
        "step": "finalize_torch_dist",
        "format_version": 2,
        "files": [
            {"path": "a", "size_bytes": 0, "xxh3_128": EMPTY, "sha256": ""},
            {"path": "sub/b", "size_bytes": 6, "xxh3_128": HELLO, "sha256": "f" * 64},
        ],
        "inputs": {"hf": "1" * 64},
        "settings": {"num": 3},
    }
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    assert FORMAT_VERSIONS["finalize_torch_dist"] == 2
    assert receipt.digest == digest
    assert receipt.size_bytes == 6
    write_receipt(receipt_of(folder), receipt)
    assert json.loads(receipt_of(folder).read_text()) == {**content, "digest": digest}
    assert read_receipt(receipt_of(folder)).digest == digest


def test_the_log_beside_a_receipt(folder: Path) -> None:
    receipt = Receipt("finalize_torch_dist", record_files(folder), {}, {})
    before = time.time()
    for started in (before - 10, None):
        write_receipt(receipt_of(folder), receipt, started)
    rows = [json.loads(line) for line in (folder.parent / "hf.history.jsonl").read_text().splitlines()]
    assert [10 <= row.pop("seconds") < 60 if row["seconds"] else row.pop("seconds") for row in rows] == [True, None]
    for row in rows:
        assert before - 0.001 <= row.pop("finished_unix") <= time.time() + 0.001
        assert row == {
            "step": "finalize_torch_dist",
            "host": socket.gethostname(),
            "posttrain": __version__,
            "bytes": 6,
        }
    write_receipt(folder.parent / "very" / "deep" / "done.json", receipt)
    assert (folder.parent / "very" / "deep" / "done.history.jsonl").exists()


def test_times_are_kept_to_the_millisecond(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.store.receipts.time.time", lambda: 1000.12344)
    write_receipt(receipt_of(folder), Receipt("finalize_torch_dist", (), {}, {}), started=990.00001)
    (row,) = map(json.loads, (folder.parent / "hf.history.jsonl").read_text().splitlines())
    assert (row["finished_unix"], row["seconds"]) == (1000.123, 10.123)


def test_the_receipt_is_written_last(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    receipt, calls = Receipt("finalize_torch_dist", record_files(folder), {}, {}), Calls(monkeypatch)
    write_receipt(receipt_of(folder), receipt)
    names = [Path(call[-1]).name.partition(".hf.")[0] for call in calls.of("fsync", "replace")]
    assert [name for name in names if name.startswith("hf.")] == ["hf.history.jsonl", "hf.receipt.json"]
    assert calls.of("fsync", "replace")[-1] == ("fsync", str(folder.parent))


def test_records_of_files(folder: Path) -> None:
    assert record_file(folder, "sub/b", "f" * 64) == FileRecord("sub/b", 6, HELLO, "f" * 64)
    assert record_files(folder) == (FileRecord("a", 0, EMPTY), FileRecord("sub/b", 6, HELLO))
    assert record_files(folder, iter(["sub/b", "a"])) == record_files(folder)
    assert record_files(folder, ["a"]) == (FileRecord("a", 0, EMPTY),)


def test_files_are_compared_with_their_receipt(folder: Path) -> None:
    receipt = Receipt("finalize_torch_dist", record_files(folder), {}, {})
    assert check_files(folder, receipt) == check_files(folder, receipt, content=True) == []
    (folder / "sub" / "b").write_text("hellO\n")
    assert check_files(folder, receipt) == []
    differs = f"{folder}/sub/b: content differs from its receipt (xxh3_128 {HELLO})"
    assert check_files(folder, receipt, content=True) == [differs]
    for content, size in (("hello\n\n", 7), ("hello", 5)):
        (folder / "sub" / "b").write_text(content)
        for read in (False, True):
            assert check_files(folder, receipt, read) == [f"{folder}/sub/b: {size} bytes, expected 6"]
    (folder / "sub" / "b").unlink()
    (folder / "a").unlink()
    (folder / "a").mkdir()
    missing = [f"{folder}/a: missing, expected 0 bytes", f"{folder}/sub/b: missing, expected 6 bytes"]
    assert check_files(folder, receipt) == missing


def test_an_artefact_that_is_not_what_its_receipt_says(folder: Path) -> None:
    receipt = Receipt("finalize_torch_dist", record_files(folder), {}, {})
    path = receipt_of(folder)
    write_receipt(path, receipt)
    assert require_files(folder, path, content=True) == receipt
    (folder / "sub" / "b").write_text("hellO\n")
    assert require_files(folder, path) == receipt
    with rejected("receipt-mismatch", folder, f"\n  {folder}/sub/b: ") as refused:
        require_files(folder, path, content=True)
    assert str(refused.value).endswith(f"remedy: rm {path} and run again")
    os.truncate(folder / "sub" / "b", 5)
    with rejected("receipt-mismatch", "5 bytes, expected 6"):
        require_files(folder, path)


def test_with_parts_their_receipts_go_too(folder: Path) -> None:
    refuse_files(folder, receipt_of(folder), [])
    (folder.parent / "hf.parts").mkdir()
    with pytest.raises(CheckpointError) as refused:
        refuse_files(folder, receipt_of(folder), ["one", "two"])
    assert refused.value.text == (
        f"{folder} is not what its receipt says:\n  one\n  two\n  remedy: rm {folder.parent}/hf.receipt.json "
        f"{folder.parent}/hf.parts/*.receipt.json and run again"
    )


@pytest.mark.parametrize("field", ["step", "files", "inputs", "settings", "digest", "format_version"])
@pytest.mark.parametrize("value", [None, 7, [7], "text", {"a": {}}])
def test_fields_of_other_types_are_refused(tmp_path, field, value):
    path = tmp_path / "a.receipt.json"
    write_receipt(path, Receipt("patch_hf_config", (), {}, {}))
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(CheckpointError) as refused:
        read_receipt(path)
    # Some values can be read as another step's name, or as another digest.
    assert refused.value.code in {"receipt-invalid", "receipt-of-unknown-step", "receipt-changed"}
    assert str(path) in refused.value.text


RECORD = {"path": "sub/b", "size_bytes": 6, "xxh3_128": HELLO}


def test_a_list_of_files(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps([RECORD, RECORD | {"path": "a", "sha256": "f" * 64}]))
    assert read_records(path) == (FileRecord("sub/b", 6, HELLO), FileRecord("a", 6, HELLO, "f" * 64))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ([], "no list of files"),
        ({}, "no list of files"),
        ({"path": "a"}, "no list of files"),
        ("ab", "no list of files"),
        ([RECORD | {"path": 7}], "a int is not the name of a file inside its folder"),
        ([RECORD | {"path": "../a"}], "is not the name of a file inside its folder"),
        ([RECORD | {"xxh3_128": "../a"}], "'../a' is not a digest of 32 hexadecimal digits"),
        ([RECORD | {"sha256": "../a"}], "'../a' is not a digest of 64 hexadecimal digits"),
        ([RECORD, 7], "must be a mapping"),
    ],
)
def test_what_is_no_list_of_files(tmp_path: Path, content: object, why: str) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError) as refused:
        read_records(path)
    assert str(refused.value).startswith(f"{path}: cannot be read (")
    assert why in str(refused.value)


def test_a_list_of_files_that_is_not_there(tmp_path: Path) -> None:
    with rejected("record-unreadable"):
        read_records(tmp_path / "manifest.json")


def test_the_digests_of_a_changed_receipt_are_told_by_their_first_twelve_digits(tmp_path: Path) -> None:
    path = tmp_path / "x.receipt.json"
    write_receipt(path, Receipt("patch_hf_config", (), {}, {"num": 3}), started=0.0)
    path.write_text(path.read_text().replace('"num": 3', '"num": 2'))
    row = json.loads(path.read_text())
    content = {key: value for key, value in row.items() if key != "digest"}
    computed = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    with pytest.raises(CheckpointError) as refused:
        read_receipt(path)
    assert f"digest '{row['digest'][:12]}', computed '{computed[:12]}')" in str(refused.value)
