"""What a file is, and how much of it is held at a time."""

from __future__ import annotations

import gzip
import json
import zipfile

import pyarrow
import pyarrow.parquet
import pytest

from posttrain.data import raw_rows
from posttrain.data.raw_rows import files_of, first_rows, read_raw
from posttrain.errors import ConfigError

ROWS = [{"prompt": f'a, {i}\n"b" é', "label": str(i)} for i in range(5)]
TABLE = "prompt,label\n" + "".join(f'"a, {i}\n""b"" é",{i}\n' for i in range(5))


def _problem(path):
    with pytest.raises(ConfigError) as raised:
        list(read_raw(path))
    (problem,) = raised.value.problems
    return problem


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", TABLE),
        ("a.tsv", TABLE.replace("prompt,label", "prompt\tlabel").replace('",', '"\t')),
        ("with_mark.csv", "\ufeff" + TABLE),
        ("windows.csv", TABLE.replace("label\n", "label\r\n")),
        ("blank_lines.csv", TABLE + "\n\n"),
        ("a.csv.gz", TABLE),
    ],
)
def test_a_table_has_the_same_rows(tmp_path, name, content):
    (tmp_path / name).write_bytes(gzip.compress(content.encode()) if name.endswith("gz") else content.encode())
    assert [row.content for row in read_raw(tmp_path / name)] == ROWS


def test_the_first_bytes_say_what_a_file_is(tmp_path):
    lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    (tmp_path / "lines").write_bytes(gzip.compress(lines))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "table.jsonl")
    for name in ("lines", "table.jsonl"):
        assert first_rows([tmp_path / name], 3) == ROWS[:3], name


@pytest.mark.parametrize(
    ("content", "value", "remedy"),
    [
        ("zip", "a zip archive, as Excel's workbooks are", "save its table as CSV"),
        ("arrow", "an Arrow file", "to_parquet"),
        ("stream", "an Arrow stream", "to_parquet"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a Git LFS pointer", "git lfs pull"),
        (b"\x28\xb5\x2f\xfd\x00", "compressed by zstd", "decompress it"),
        (b"BZh91AY", "compressed by bzip2", "decompress it"),
        (b"\x80\x05\x95", "a pickle", "write it as JSON lines"),
    ],
)
def test_other_formats_are_rejected_by_name(tmp_path, content, value, remedy):
    path = tmp_path / "a.jsonl"
    table = pyarrow.Table.from_pylist(ROWS)
    if content == "zip":
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("a", "b")
    elif content in ("arrow", "stream"):
        opened = pyarrow.ipc.new_file if content == "arrow" else pyarrow.ipc.new_stream
        with opened(str(path), table.schema) as writer:
            writer.write_table(table)
    else:
        path.write_bytes(content)
    problem = _problem(path)
    assert value in problem.value
    assert remedy in problem.remedy


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("a;b\n1;2\n", "separate the cells by ',', not by ';'"),
        ("a,a\n1,2\n", "the names ['a', 'a'], of which 'a'"),
        ("a,,b\n", "of which ''"),
        ('a,b\n1,"2\n', "unexpected end of data"),
        ("a,b\n\xff,1\n".encode("latin-1"), "invalid start byte"),
    ],
)
def test_a_table_that_cannot_be_read(tmp_path, content, words):
    (tmp_path / "a.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert words in str(_problem(tmp_path / "a.csv"))


def test_a_row_of_another_width_is_named(tmp_path):
    (tmp_path / "a.csv").write_text("a,b\n1,2\n3\n4,5,6\n")
    assert [(row.place, row.reason) for row in read_raw(tmp_path / "a.csv") if row.content is None] == [
        ("row 2", "has 1 cells, the header 2"),
        ("row 3", "has 3 cells, the header 2"),
    ]


def test_a_name_that_stands_twice_in_an_object(tmp_path):
    """Python's reader takes the last, others the first."""
    (tmp_path / "a.jsonl").write_text('{"label": "1", "label": "2"}\n{"a": [{"b": 1, "c": 2, "b": 3}]}\n{"a": {}}\n')
    (tmp_path / "a.json").write_text('[{"label": "1", "label": "2"}, {"a": [{"b": 1, "c": 2, "b": 3}]}, {"a": {}}]')
    for name, places in (("a.jsonl", "line"), ("a.json", "row")):
        assert [(row.place, row.reason) for row in read_raw(tmp_path / name)] == [
            (f"{places} 1", "not JSON (has 'label' twice)"),
            (f"{places} 2", "not JSON (has 'b' twice)"),
            (f"{places} 3", ""),
        ]


@pytest.mark.parametrize(
    ("text", "reasons"),
    [
        ("[]", []),
        (" [ ] ", []),
        ('[{"a": 1} , {"a": 2}]\n', ["", ""]),
        ('[{"a": 1} {"a": 2}]', ["", "not JSON (Expecting ',' delimiter"]),
        ('[{"a": 1},]', ["", "not JSON (Expecting value"]),
        ('[{"a": 1}', ["", "not JSON (Expecting ',' delimiter"]),
        ('[{"a": 1}] x', ["", "not JSON (Extra data"]),
    ],
)
def test_an_array_is_read_element_by_element(tmp_path, text, reasons):
    (tmp_path / "a.json").write_text(text)
    found = [row.reason for row in read_raw(tmp_path / "a.json")]
    assert len(found) == len(reasons)
    assert all(reason.startswith(start) for reason, start in zip(found, reasons, strict=True))


def test_a_folder_has_its_tables_only_where_it_has_nothing_else(tmp_path):
    (tmp_path / "b.csv").write_text("a\n1\n")
    (tmp_path / "notes.txt").write_text("a")
    assert files_of(str(tmp_path)) == [tmp_path / "b.csv"]
    (tmp_path / "a.jsonl").write_text("{}")
    assert files_of(str(tmp_path)) == [tmp_path / "a.jsonl"]


# ---- limits ----


@pytest.fixture
def limits(monkeypatch):
    """Small ones, so that what exceeds them is small, too."""
    monkeypatch.setattr(raw_rows, "MAX_ROW_BYTES", 2000)
    monkeypatch.setattr(raw_rows, "MAX_DECODED_BYTES", 10_000)
    monkeypatch.setattr(raw_rows, "MAX_EXPANSION", 4)
    monkeypatch.setattr(raw_rows, "BATCH_BYTES", 10_000)


def test_one_long_line_of_a_compressed_file_is_never_held(tmp_path, limits, monkeypatch):
    asked = []
    read = gzip.GzipFile.readline
    monkeypatch.setattr(gzip.GzipFile, "readline", lambda self, size=-1: asked.append(size) or read(self, size))
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"a": 1}\n{"a": "' + b"x" * 100_000 + b'"}\n'))
    problem = _problem(path)
    assert problem.key == f"{path}, line 2"
    assert problem.value == "more than 2,000 bytes in one row"
    assert asked == [2001, 2001]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_a_long_line_without_compression(tmp_path, limits, name):
    (tmp_path / name).write_text("a,b\n" * name.endswith("csv") + "x" * 3000 + ",b\n")
    assert _problem(tmp_path / name).value == "more than 2,000 bytes in one row"


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.gz", "a.csv.gz"])
def test_many_rows_of_a_small_file(tmp_path, limits, name):
    rows = [{"a": "x" * 500, "n": i} for i in range(60)]
    texts = {
        "a.jsonl.gz": "".join(json.dumps(row) + "\n" for row in rows),
        "a.json.gz": json.dumps(rows),
        "a.csv.gz": "a,n\n" + "".join(f"{row['a']},{row['n']}\n" for row in rows),
    }
    (tmp_path / name).write_bytes(gzip.compress(texts[name].encode()))
    problem = _problem(tmp_path / name)
    assert "bytes that decode to more than 10,000" in problem.value
    assert "without compression" in problem.remedy
    plain = tmp_path / name.removesuffix(".gz")
    plain.write_text(texts[name])
    assert len(list(read_raw(plain))) == 60, "a file may take as much as it is large"


def test_a_compressed_file_may_grow_as_texts_do(tmp_path, limits):
    content = "".join(json.dumps({"a": i * i * 7919}) + "\n" for i in range(1000, 1700)).encode()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(content))
    assert len(content) > raw_rows.MAX_DECODED_BYTES
    assert raw_rows.MAX_EXPANSION * (tmp_path / "a.jsonl.gz").stat().st_size > len(content)
    assert len(list(read_raw(tmp_path / "a.jsonl.gz"))) == 700


def test_a_value_that_many_rows_of_a_parquet_file_share(tmp_path, limits, monkeypatch):
    """It lies in the file once; so few rows are read at a time, and what they add up to is counted."""
    seen = []
    batch = raw_rows._batch_rows
    monkeypatch.setattr(raw_rows, "_batch_rows", lambda *given: seen.append(batch(*given)) or seen[-1])
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"a": ["x" * 1500] * 1000, "b": ["y"] * 1000}), path)
    problem = _problem(path)
    assert "bytes that decode to more than" in problem.value
    assert 1 <= seen[0] <= 6
    assert len(list(read_raw(path, left_out={"a"}))) == 1000
    assert seen[1] > 10 * seen[0]
    pyarrow.parquet.write_table(pyarrow.table({"a": ["x" * 5000] * 2}), path)
    assert _problem(path).value == "more than 2,000 bytes in one row"


def test_a_parquet_file_with_a_column_twice(tmp_path):
    table = pyarrow.table([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["label", "label"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert "has the column 'label' twice" in _problem(tmp_path / "a.parquet").remedy
