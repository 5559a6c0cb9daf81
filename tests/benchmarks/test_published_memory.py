"""The plan's memory against what others have published of training."""

import pytest
from benchmarks.published_memory import RUNS, TOLERANCE, planned_gib


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_the_plan_has_about_what_was_published(run):
    assert planned_gib(run) == pytest.approx(run.gib, rel=TOLERANCE)
