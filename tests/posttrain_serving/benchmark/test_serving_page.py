import itertools
import re

from posttrain_serving.benchmark.serving_page import render_serving
from posttrain_serving.benchmark.serving_results import Table, tables_beside


def test_engines_stand_side_by_side_in_each_picture():
    (published,) = tables_beside(["published"])
    mine = Table("<mine>", [{**row, "ttft_ms": row["ttft_ms"] / 2} for row in published.rows[:4]])
    page = render_serving("GLM-5", [mine, published])
    pictures = re.findall(r'<svg class="chart".*?</svg>', page, re.DOTALL)
    assert len(pictures) == 4
    for picture in pictures:
        assert len(re.findall('<path class="line', picture)) == 2
        # Every doubling is as wide as any other.
        xs = [float(x) for x, _ in re.findall(r"([\d.]+),([\d.]+)", re.findall(r' d="M([^"]*)"', picture)[1])]
        steps = [later - earlier for earlier, later in itertools.pairwise(xs[2:])]
        assert max(steps) - min(steps) < 0.3
        assert ">1024<" in picture
    assert "&lt;mine&gt;" in page
    assert "<mine>" not in page
    assert "more clients were not tried" in page
