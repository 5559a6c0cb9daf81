"""What a calibration gave to each expert, in the report."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from tests.support.synthetic_run import make_run

from posttrain.checkpoint.quantization.coverage import coverage
from posttrain.report.coverage_map import coverage_map, shade_of
from posttrain.report.report import render_report
from posttrain.report.report_data import read_run
from posttrain.report.report_summary import summarize
from posttrain.report.verdict import judge_run
from posttrain.store import Receipt, receipt_of, record_files, write_json, write_receipt

# Two layers with experts; in the second, one is never reached.
COUNTS = [[0, 0, 0, 0], [3, 12, 7, 4_000], [0, 25, 30, 10_000]]


def stretches(drawn: str) -> list[tuple[str, float, str]]:
    """Class, width and title of all rectangles but the legend's."""
    found = re.findall(r'<rect class="(c\d)"[^>]*? width="([\d.]+)"[^>]*><title>([^<]*)', drawn)
    return [(kind, float(width), title) for kind, width, title in found if "experts" in title]


def test_shades_are_powers_of_ten() -> None:
    assert [shade_of(tokens) for tokens in (0, 1, 9, 10, 99, 9_999, 10_000, 10**7)] == [0, 1, 1, 2, 2, 4, 5, 5]


def test_experts_stand_by_their_tokens_and_those_without_any_have_a_colour_of_their_own() -> None:
    drawn = coverage_map(coverage(COUNTS, 1))
    rows = stretches(drawn)
    assert [title for _, _, title in rows] == [
        *("2 of 4 experts: 3 to 7 tokens", "1 of 4 experts: 12 tokens", "1 of 4 experts: 4,000 tokens"),
        *("1 of 4 experts: 0 tokens", "2 of 4 experts: 25 to 30 tokens", "1 of 4 experts: 10,000 tokens"),
    ]
    assert [kind for kind, _, _ in rows].count("c5") == 1
    assert rows[3][0] == "c5"
    assert rows[0][1] == 2 * rows[1][1]
    assert "layer 1" in drawn
    assert "layer 2" in drawn
    assert "layer 0" not in drawn


def test_a_picture_of_all_of_glm5_stays_small() -> None:
    counts = [[0] * 256] * 3 + [[(37 * expert + layer) % 3_000 for expert in range(256)] for layer in range(75)]
    assert len(coverage_map(coverage(counts, 3))) < 200_000


def test_the_report_shows_it_where_there_was_a_calibration(tmp_path: Path) -> None:
    made = make_run(tmp_path, num_steps=2)
    run = read_run(made.inputs)
    assert run.coverage is None
    folder = made.paths.calibration
    folder.mkdir(parents=True)
    told = coverage(COUNTS, 1)
    passes = {"coding": {"conversations": 9, "too_short": 0, "tokens": 1_234, **told}}
    write_json(made.paths.coverage, {"all": told, "passes": passes})
    assert read_run(made.inputs).coverage is None, "without a receipt it is not finished"
    write_receipt(receipt_of(folder), Receipt("calibrate", record_files(folder), {}, {}))
    run = read_run(made.inputs)
    page = render_report(run, summarize(run), judge_run(run))
    assert 'id="calibration"' in page
    assert "coding 1,234 in 9 conversations" in page
    assert '<b class="worse">1 expert</b>' in page
    assert len(stretches(page)) == 6
    without = dataclasses.replace(run, coverage=None)
    assert 'id="calibration"' not in render_report(without, summarize(without), judge_run(without))
