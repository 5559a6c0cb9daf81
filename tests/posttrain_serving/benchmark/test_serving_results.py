import dataclasses
import json

import pytest
from tests.support.rejections import rejected

from posttrain_serving.benchmark.serving import Level
from posttrain_serving.benchmark.serving_results import (
    COLUMNS,
    Record,
    Table,
    format_tables,
    peak_of,
    read_table,
    tables_beside,
)

QUESTION = {"url": "http://x", "concurrency": (1, 8)}


def level(concurrency, speed=100.0, is_bound=False):
    values = {field.name: 1.5 for field in dataclasses.fields(Level)}
    own = {"concurrency": concurrency, "output_tokens_per_second": speed, "is_generator_bound": is_bound}
    return Level(**values | own | {"num_requests": 8, "retries": 0})


def rows(*speeds):
    return [{"concurrency": 2**place, "output_tokens_per_second": speed} for place, speed in enumerate(speeds)]


@pytest.mark.parametrize(
    ("speeds", "peak", "saturated_at", "is_inside"),
    [
        ((50, 90, 100, 80), 4, 4, True),
        ((50, 95, 100, 80), 4, 2, True),  # 95 % of the highest
        ((50, 94.9, 100), 4, 4, False),
        ((10,), 1, 1, False),
    ],
)
def test_peak_and_saturation(speeds, peak, saturated_at, is_inside):
    found = peak_of(list(reversed(rows(*speeds))))
    assert (found.concurrency, found.saturated_at, found.is_inside) == (peak, saturated_at, is_inside)
    assert found.output_tokens_per_second == max(speeds)


def test_the_published_table_has_its_guides_peak_and_saturation():
    """vLLM's guide: 2,132 tokens/s with 128 requests, saturated there."""
    (table,) = tables_beside(["published"])
    assert table.name == "vLLM 0.16 guide for GLM-5-FP8 on HGX B200, 11 March 2026"
    assert [row["concurrency"] for row in table.rows] == [1, 8, 16, 32, 64, 128, 256, 512, 1024]
    found = peak_of(table.rows)
    assert (found.output_tokens_per_second, found.concurrency, found.saturated_at) == (2132, 128, 128)
    assert table.rows[-1] == {
        **{"concurrency": 1024, "output_tokens_per_second": 1944, "ttft_ms": 175241},
        **{"tpot_ms": 143.1, "itl_p99_ms": 584.03},
    }


def test_rows_are_on_disk_as_they_come_and_a_rerun_goes_on(tmp_path):
    path = tmp_path / "deep" / "serving.json"
    record = Record(path, "mine", QUESTION, [1, 8])
    record.add(level(1))
    record.fail(8, "it died")
    written = json.loads(path.read_text())
    assert [row["concurrency"] for row in written["rows"]] == [1]
    assert written["failed"] == {"concurrency": 8, "why": "it died"}
    assert not written["is_complete"]
    again = Record(path, "mine", QUESTION, [1, 8])
    assert again.missing == [8]
    assert json.loads(path.read_text())["failed"] is None
    again.add(level(8))
    written = json.loads(path.read_text())
    assert written["is_complete"]
    assert written["peak"]["concurrency"] == 1
    assert read_table(path.with_suffix(".csv")).rows[1]["concurrency"] == 8


def test_another_question_and_a_complete_table_begin_anew(tmp_path):
    path = tmp_path / "serving.json"
    Record(path, "mine", QUESTION, [1, 8]).add(level(1))
    assert Record(path, "mine", {**QUESTION, "seed": 2}, [1, 8]).missing == [1, 8]
    record = Record(path, "mine", QUESTION, [1])
    record.add(level(1))
    assert Record(path, "mine", QUESTION, [1]).missing == [1]


def test_tables_stand_side_by_side():
    bound = dataclasses.asdict(level(8, 90, is_bound=True))
    tables = [Table("a", [dataclasses.asdict(level(1, 50)), bound]), Table("b", [{**dataclasses.asdict(level(1))}])]
    head, *lines = format_tables(tables).splitlines()
    assert head.split()[0] == "clients"
    assert [line.split()[0] + line.split()[8] for line in lines[:3]] == ["1a", "1b", "8a"]
    assert lines[2].endswith("a *")
    assert "a: peak 90 tok/s at 8, the most that was tried; saturated from 8" in lines
    assert lines[-1].startswith("* the generator")


@pytest.mark.parametrize(
    "content", ["", "a,b\n1,2\n", ",".join(COLUMNS) + "\n1,2,3,4,x\n", ",".join(COLUMNS) + "\n1,0,3,4,5\n"]
)
def test_what_is_no_table_is_refused(tmp_path, content):
    (tmp_path / "x.csv").write_text(content)
    with rejected("table-unreadable", "x.csv", key="beside"):
        read_table(tmp_path / "x.csv")
