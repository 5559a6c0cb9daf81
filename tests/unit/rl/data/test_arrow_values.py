"""Parquet files give the rows that they were written from, whatever wrote them."""

from __future__ import annotations

import json
import uuid

import pyarrow
import pyarrow.parquet
import pytest

from posttrain.rl.data.arrow_values import decoder_of
from posttrain.rl.data.reading import Reading
from posttrain.rl.data.rows import read_rows

WEATHER, SUM = (
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": properties, "required": required}},
    }
    for name, properties, required in (
        ("weather", {"town": {"type": "string", "enum": ["a", "b"]}}, ["town"]),
        ("sum", {"a": {"type": "integer"}, "b": {"type": "integer"}}, ["a", "b"]),
    )
)


def _turns(question, name, arguments):
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "reasoning_content": "I ask", "tool_calls": [call]},
        {"role": "tool", "content": "x", "name": name},
    ]


ROWS = [
    {
        "prompt": _turns("q0", "weather", {"town": "a"}),
        "label": "yes",
        "tools": [WEATHER],
        "extra_info": {"index": 0, "hint": "h"},
        "data_source": "s",
    },
    {
        "prompt": _turns("q1", "sum", {"a": 1, "b": 2}),
        "label": "no",
        "tools": [SUM],
        "extra_info": {"index": 1, "more": {"deep": ["x"]}},
        "data_source": "s",
    },
    {
        "prompt": [{"role": "user", "content": "q2"}],
        "label": "yes",
        "tools": [WEATHER, SUM],
        "extra_info": {"index": 2},
        "data_source": "s",
    },
]
# A column of texts and numbers, which Arrow itself has no type for.
MIXED = [{**row, "label": label} for row, label in zip(ROWS, ("yes", 3, 2.5), strict=True)]


def _read(path):
    found = read_rows(str(path), [path], Reading())
    assert found.bad == []
    return found.rows


def _lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("rows", [ROWS, MIXED], ids=["dicts that differ", "texts and numbers, too"])
@pytest.mark.parametrize("way", ["load_dataset", "map"])
def test_what_datasets_writes_reads_as_the_lines_it_came_from(tmp_path, monkeypatch, rows, way):
    """Structs that it pads, and columns that it types `Json` and writes as Arrow's `arrow.json`."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import datasets

    datasets.disable_progress_bars()
    lines = _lines(tmp_path / "a.jsonl", rows)
    if way == "map":
        empty = datasets.Dataset.from_dict({"number": list(range(len(rows)))})
        made = empty.map(lambda row: rows[row["number"]], remove_columns=["number"])
    else:
        made = datasets.load_dataset("json", data_files=str(lines), split="train", cache_dir=str(tmp_path / "cache"))
    made.to_parquet(str(tmp_path / "a.parquet"))
    schema = pyarrow.parquet.read_schema(tmp_path / "a.parquet")
    assert "arrow.json" in str(schema), "what this is about"
    assert _read(tmp_path / "a.parquet") == _read(lines)


def test_structs_are_padded_by_arrow_and_read_without(tmp_path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS[:2]), tmp_path / "a.parquet")
    (first, second), lines = _read(tmp_path / "a.parquet"), _read(_lines(tmp_path / "a.jsonl", ROWS[:2]))
    assert [first, second] == lines
    assert first.tools == [WEATHER]
    assert second.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1, "b": 2}


NESTED = pyarrow.struct([("a", pyarrow.list_(pyarrow.json_())), ("b", pyarrow.int64())])


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        (pyarrow.json_(), '{"a": null}', {"a": None}),
        (pyarrow.json_(), None, None),
        (pyarrow.json_(pyarrow.large_string()), "[1]", [1]),
        (NESTED, {"a": ['"x"', "3", None], "b": None}, {"a": ["x", 3, None]}),
        (NESTED, None, None),
        (pyarrow.list_(NESTED), [None, {"a": None, "b": 1}], [None, {"b": 1}]),
        (pyarrow.list_(NESTED), None, None),
        (pyarrow.large_list(pyarrow.json_()), ["1"], [1]),
        (pyarrow.list_(pyarrow.json_(), 2), ["1", "2"], [1, 2]),
        (pyarrow.map_(pyarrow.string(), pyarrow.json_()), [("a", "1"), ("b", None)], {"a": 1, "b": None}),
        (pyarrow.map_(pyarrow.string(), pyarrow.int64()), [("a", None)], {"a": None}),
        (pyarrow.map_(pyarrow.int64(), NESTED), [(1, {"a": None, "b": 2})], {"1": {"b": 2}}),
        (pyarrow.dictionary(pyarrow.int8(), pyarrow.string()), "x", "x"),
        (pyarrow.dictionary(pyarrow.int8(), NESTED), {"a": None, "b": 1}, {"b": 1}),
        (pyarrow.run_end_encoded(pyarrow.int32(), NESTED), {"a": None, "b": 1}, {"b": 1}),
    ],
)
def test_each_type(kind, given, expected):
    decode = decoder_of(kind)
    assert (decode(given) if decode else given) == expected


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.list_(pyarrow.float64()), pyarrow.uuid(), pyarrow.null()])
def test_most_types_need_no_decoder(kind):
    assert decoder_of(kind) is None


def test_a_name_that_stands_twice_in_json_is_an_error():
    decode = decoder_of(pyarrow.json_())
    assert decode
    with pytest.raises(ValueError, match="has 'a' twice"):
        decode('{"a": 1, "a": 2}')


def test_a_map_with_a_key_twice_and_text_that_is_no_json_are_named_by_row(tmp_path):
    table = pyarrow.table(
        {
            "prompt": ["a", "b", "c"],
            "label": pyarrow.array(['"x"', "x", '"y"'], pyarrow.json_()),
            "map": pyarrow.array(
                [[("k", 1)], [], [("k", 1), ("k", 2)]], pyarrow.map_(pyarrow.string(), pyarrow.int64())
            ),
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    found = read_rows("a", [tmp_path / "a.parquet"], Reading())
    assert [row.label for row in found.rows] == ["x"]
    assert [(row.place, row.reason.split(" (")[0]) for row in found.bad] == [
        ("row 2", "'label' is not JSON"),
        ("row 3", "'map' is not JSON"),
    ]


def test_columns_that_nobody_reads_reject_no_row(tmp_path, caplog):
    """A UUID is text; what JSON cannot say is left out, counted and named. No label is guessed from either."""
    columns = {
        "prompt": ["a", "b"],
        "label": ["1", "2"],
        "key": pyarrow.array([uuid.UUID(int=1).bytes, None], pyarrow.uuid()),
        "hash": pyarrow.array([b"ab", b"cd"], pyarrow.binary(2)),
        "day": pyarrow.array([0, 1], pyarrow.date32()),
    }
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    first, second = _read(path)
    assert first.columns == {"key": str(uuid.UUID(int=1)), "day": "1970-01-01"}
    assert second.columns == {"key": None, "day": "1970-01-02"}
    assert "column 'hash' is left out: holds a bytes, for which JSON has no word (2 rows)" in caplog.text
    for key, reason in (("day", "'day' holds a date, which may have been any text"), ("hash", "'hash' holds a bytes")):
        bad = read_rows("a", [path], Reading(label_key=key)).bad
        assert [row.place for row in bad] == ["row 1", "row 2"]
        assert reason in bad[0].reason
