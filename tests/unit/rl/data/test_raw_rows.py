"""What a file is, and how much of it is held at a time."""

from __future__ import annotations

import gzip
import json
import zipfile
from dataclasses import replace

import pyarrow
import pyarrow.parquet
import pytest
from tests.support.workflow_runs import ROOT

from posttrain.config.data import Data
from posttrain.errors import ConfigError
from posttrain.rl.data import raw_rows
from posttrain.rl.data.raw_rows import files_of, first_rows, local_files, read_raw

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
        ("a.tsv.gz", TABLE.replace("prompt,label", "prompt\tlabel").replace('",', '"\t')),
        ("a.tsv.of.commas.csv", TABLE),
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


def test_a_json_file_holds_an_array_or_lines(tmp_path):
    (tmp_path / "lines.json").write_text("".join(f"{json.dumps(row)}\n\n" for row in ROWS))
    (tmp_path / "array.json").write_text(" \n" + json.dumps(ROWS))
    for name in ("lines.json", "array.json"):
        assert [row.content for row in read_raw(tmp_path / name)] == ROWS
    assert [row.place for row in read_raw(tmp_path / "lines.json")][:2] == ["line 1", "line 3"]


@pytest.mark.parametrize(
    ("name", "content", "place", "reason"),
    [
        ("a.jsonl", b'{}\n[{"a": 1}]', "line 2", "a list, expected an object"),
        ("a.jsonl", b'[{"a": 1}]', "line 1", "a list, expected an object"),
        ("a.jsonl", b'{}\n\n{"a": "\xff"}', "line 3", "not UTF-8 (invalid start byte at byte 7)"),
        ("a.jsonl", b"{}\n{", "line 2", "not JSON (Expecting property name"),
        ("a.json", b'[{}, "a"]', "row 2", "a str, expected an object"),
        ("a.json", b'[{},\n {"a": }]', "line 2", "not JSON (Expecting value"),
        ("a.json", b'[{"a": "\xff"}]', "line 1", "not UTF-8 (invalid start byte"),
    ],
)
def test_a_wrong_row_is_named(tmp_path, name, content, place, reason):
    (tmp_path / name).write_bytes(content)
    (wrong,) = [row for row in read_raw(tmp_path / name) if row.reason]
    assert (wrong.place, wrong.content) == (place, None)
    assert wrong.reason.startswith(reason)


def test_the_first_rows_that_can_be_read(tmp_path):
    for name in "ab":
        (tmp_path / name).write_text(f'{{"{name}": 1}}\n3\n{{"{name}": 2}}\n')
    paths = [tmp_path / "a", tmp_path / "b"]
    assert first_rows(paths, 3) == [{"a": 1}, {"a": 2}, {"b": 1}]
    assert first_rows(paths, 9) == [{"a": 1}, {"a": 2}, {"b": 1}, {"b": 2}]


def test_a_file_that_is_not_there(tmp_path):
    problem = _problem(tmp_path / "a.jsonl")
    assert (problem.key, problem.value) == ("data", str(tmp_path / "a.jsonl"))
    assert problem.code == "data-unreadable"
    assert "[Errno 2]" in problem.remedy
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b"{}" * 100)[:20])
    assert "ended before" in _problem(tmp_path / "cut.jsonl.gz").remedy
    (tmp_path / "plain.jsonl.gz").write_bytes(b"{}")
    assert "Not a gzipped file" in _problem(tmp_path / "plain.jsonl.gz").remedy


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
    assert (problem.code, problem.key) == ("data-unreadable", "data")
    assert problem.value.startswith(f"{path}, {value}")
    assert remedy in problem.remedy


@pytest.mark.parametrize(
    ("content", "value", "remedy"),
    [
        ("a;b\n1;2\n", "'a;b'", "separate the cells by ',', not by ';'"),
        ("a\tb\n1\t2\n", "'a\\tb'", "separate the cells by ',', not by '\\t'"),
        ("b,a,a\n0,1,2\n", "the names ['b', 'a', 'a'], of which 'a'", "correct the header"),
        ("a, ,b\n", "the names ['a', ' ', 'b'], of which ' '", "correct the header"),
    ],
)
def test_a_header_that_is_none(tmp_path, content, value, remedy):
    (tmp_path / "a.csv").write_text(content)
    problem = _problem(tmp_path / "a.csv")
    assert (problem.key, problem.value, problem.remedy) == (f"{tmp_path / 'a.csv'}, line 1", value, remedy)
    assert problem.code == "header-not-columns"


def test_a_table_of_one_column_and_of_long_texts(tmp_path):
    (tmp_path / "a.csv").write_text("a\n1\n")
    assert first_rows([tmp_path / "a.csv"], 2) == [{"a": "1"}]
    (tmp_path / "a.csv").write_text(f"a;b,c\n{'x' * 200_000},1\n")
    assert first_rows([tmp_path / "a.csv"], 2) == [{"a;b": "x" * 200_000, "c": "1"}]


@pytest.mark.parametrize(
    ("content", "words"),
    [
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


def test_a_setting_names_a_file_or_a_pattern(tmp_path):
    (tmp_path / "deep/er").mkdir(parents=True)
    paths = [tmp_path / "a[1].jsonl", tmp_path / "b.jsonl", tmp_path / "deep/er/c.jsonl"]
    for path in paths:
        path.write_text("{}")
    assert files_of(str(paths[0])) == paths[:1], "a file that is there is no pattern"
    assert files_of(str(tmp_path / "none.jsonl")) == [tmp_path / "none.jsonl"]
    assert files_of(str(tmp_path / "[x-z].jsonl")) == []
    assert files_of(str(tmp_path / "**/*.jsonl")) == paths


def test_files_on_this_machine_are_those_of_local_sources(tmp_path):
    heldout = str(tmp_path / "b.jsonl")
    local = Data(kind="files", train_file=str(tmp_path / "a.jsonl"), heldout_file=heldout)
    assert local_files(local) == [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    assert local_files(replace(local, train_file=heldout)) == [tmp_path / "b.jsonl"]
    assert local_files(replace(local, kind="hub")) == []


# ---- limits ----


def test_the_limits_are_those_that_the_documents_name():
    mebibytes = raw_rows.MAX_ROW_BYTES, raw_rows.MAX_DECODED_BYTES, raw_rows.BATCH_BYTES
    assert [size / 2**20 for size in mebibytes] == [32, 256, 512]
    named = "a row has at most 32 MiB, all rows of a compressed file 256 MiB or 100 times its size, of parquet as few"
    assert named in (ROOT / "docs/threat-model.md").read_text()
    assert raw_rows.MAX_EXPANSION == 100


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
    assert (problem.code, problem.allowed) == ("row-too-large", "at most 2,000 bytes")
    assert asked == [2001, 2001]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_a_long_line_without_compression(tmp_path, limits, name):
    (tmp_path / name).write_text("a,b\n" * name.endswith("csv") + "x" * 3000 + ",b\n")
    assert _problem(tmp_path / name).code == "row-too-large"


def test_as_much_as_the_limits_allow(tmp_path, limits):
    """Five lines of 2,000 bytes each."""
    lines = [json.dumps({"a": "x" * 1990}).encode() + b"\n"] * 5
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(lines)))
    assert [len(line) for line in lines] == [2000] * 5
    assert len(list(read_raw(path))) == 5
    path.write_bytes(gzip.compress(b"".join(lines) + b"\n"))
    assert _problem(path).code == "file-too-large"
    path.write_bytes(gzip.compress(b" " + lines[0]))
    assert _problem(path).key == f"{path}, line 1"


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
    assert (problem.code, problem.key) == ("file-too-large", str(tmp_path / name))
    assert "10,000" in problem.value
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
    assert problem.code == "file-too-large"
    assert 1 <= seen[0] <= 6
    assert len(list(read_raw(path, left_out={"a"}))) == 1000
    assert seen[1] > 10 * seen[0]
    pyarrow.parquet.write_table(pyarrow.table({"a": ["x" * 5000] * 2}), path)
    assert _problem(path).code == "row-too-large"


def test_a_row_of_a_parquet_file_has_a_limit_and_a_number(tmp_path, limits):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"a": pyarrow.array([b"x" * 2000] * 3, pyarrow.binary(2000))}), path)
    assert [row.place for row in read_raw(path)] == ["row 1", "row 2", "row 3"]
    pyarrow.parquet.write_table(pyarrow.table({"a": ["x", "x", "x" * 3000]}), path, row_group_size=1)
    problem = _problem(path)
    assert (problem.key, problem.value) == (f"{path}, rows 3 to 3", "more than 2,000 bytes in one row")


def test_json_in_a_parquet_file_is_decoded_or_named(tmp_path):
    table = pyarrow.table({"a": pyarrow.array(['{"b": 1}', "{", None], pyarrow.json_()), "c": [1, 2, 3]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    first, second, third = read_raw(tmp_path / "a.parquet")
    assert (first.place, first.content, first.reason) == ("row 1", {"a": {"b": 1}, "c": 1}, "")
    assert (second.place, second.content) == ("row 2", None)
    assert second.reason.startswith("'a' is not JSON (Expecting property name")
    assert third.content == {"a": None, "c": 3}


def test_of_small_rows_256_are_read_at_a_time(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"a": [{"b": 1}] * 9, "c": [1] * 9}), path)
    with pyarrow.parquet.ParquetFile(path) as file:
        assert [raw_rows._batch_rows(file, 0, wanted) for wanted in (["a", "c"], ["a"], [])] == [256] * 3


def test_a_parquet_file_with_a_column_twice(tmp_path):
    table = pyarrow.table([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["label", "label"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert "has the column 'label' twice" in _problem(tmp_path / "a.parquet").remedy
