"""Tables of serving benchmarks as one page: engines side by side in each chart."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.report.report_charts import Chart, Series
from posttrain.report.report_page import render_page
from posttrain_serving.benchmark.serving_results import HEADS, SATURATED_SHARE, Table, peak_of

NUM_COLORS = 7
# Column, title, unit, whether the axis is logarithmic.
CHARTS = (
    ("output_tokens_per_second", "Output tokens per second", "tokens/s", False),
    ("ttft_ms", "Time to first token", "ms", True),
    ("tpot_ms", "Time per output token", "ms", True),
    ("itl_p99_ms", "Inter-token latency, p99", "ms", True),
)


def render_serving(title: str, tables: Sequence[Table]) -> str:
    """Return the page as HTML.

    Args:
        title: Heading.
        tables: Tables with at least one row each; the first is drawn solid, others dashed.
    """
    rows = [(row, table.name) for table in tables for row in table.rows]
    return render_page(
        "serving.html.j2",
        title=title,
        tables=tables,
        charts=[_chart(tables, *words) for words in CHARTS],
        heads=HEADS,
        rows=sorted(rows, key=lambda pair: pair[0]["concurrency"]),
        peaks=[(table.name, peak_of(table.rows)) for table in tables],
        saturated_share=SATURATED_SHARE,
    )


def _chart(tables: Sequence[Table], column: str, title: str, unit: str, is_log: bool) -> Chart:
    series = []
    for place, table in enumerate(tables):
        rows = sorted(table.rows, key=lambda row: row["concurrency"])
        steps, values = [row["concurrency"] for row in rows], [row[column] for row in rows]
        series.append(Series(table.name, steps, values, place % NUM_COLORS + 1, is_dashed=place > 0))
    low = None if is_log else 0.0
    note = "By requests in flight."
    return Chart(title, note, unit, series, low=low, is_log=is_log, x_label="client", is_log_x=True)
