"""The constants in use are those that fit the published rows, and the README shows what they give."""

import dataclasses
import math

import pytest
from benchmarks.claims import README
from benchmarks.published import GOOD
from benchmarks.published_fit import _errors, _names, fit

from posttrain.plan.timing.fitted import FITTED
from posttrain.plan.timing.rates import TOLERANCE


def test_the_constants_are_fitted():
    assert dataclasses.asdict(fit()) == pytest.approx(dataclasses.asdict(FITTED), rel=0.02)


def test_all_but_two_rows_are_within_the_tolerance_and_most_within_half_of_it():
    """A rollout that waits for tools, and a run with deterministic kernels, are named."""
    off = dict(zip((name for name, _ in _names()), map(math.expm1, _errors(FITTED)), strict=True))
    assert [name for name, error in off.items() if abs(error) > TOLERANCE] == [
        "Megatron-Bridge, GLM-5.2, 1024 x 2048 tokens, 352 H100",
        "GLM-5.1, 131k context, 28 H200 nodes: rollout",
    ]
    assert sum(abs(error) <= GOOD for error in off.values()) > 0.7 * len(off)
    assert all(missing for name, missing in _names() if abs(off[name]) > GOOD)


def test_the_readme_shows_the_errors_of_today():
    rows = [line.split(" | ") for line in README.read_text().splitlines() if line.startswith("| ")]
    shown = {row[0].removeprefix("| "): row[2] for row in rows if len(row) == 5}
    for (name, _), error in zip(_names(), _errors(FITTED), strict=True):
        assert shown[name] == f"{math.expm1(error):+.0%}", f"{name}: python -m benchmarks.published_fit --write"
