"""Fit the constants of `plan.timing.fitted` on all published rows, and show what each row is off by.

    python -m benchmarks.published_fit            # with --write into benchmarks/README.md

Fitted is the sum over all rows of the logarithm of predicted over published seconds, by a loss that is quadratic up to
15 % and linear beyond (`soft_l1`), so that a row that the model misses does not draw the others along. "Left out" is
what the row is off by when the constants are fitted on all others.

Not in the table: marin's RL steps of a 67B model (the architecture is not published), and steps whose batch is not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path

from benchmarks.claims import report, report_table, start
from benchmarks.published import GOOD, step_time_accuracy
from benchmarks.published_training import ANCHORS, OTHERS, forecast
from scipy.optimize import least_squares

from posttrain.config.schema import Hardware
from posttrain.plan.resolve import resolve
from posttrain.plan.timing.fitted import FITTED, IDEAL, Fitted
from posttrain.plan.timing.rates import TOLERANCE


def main() -> None:
    """Fit, once for all rows and once without each, and print the table."""
    names, before, after = _names(), _errors(IDEAL), _errors(FITTED)
    left_out = [_errors(fit(without=index))[index] for index in range(len(names))]
    rows = [
        (name, *(f"{math.expm1(error):+.0%}" for error in errors), missing)
        for (name, missing), *errors in zip(names, before, after, left_out, strict=True)
    ]
    report_table(("published", "attainable rates", "fitted", "left out", "what the model lacks, over 15 %"), rows)
    _report(after)


def quick() -> None:
    """The errors of the constants in use, without fitting."""
    _report(_errors(FITTED))


def fit(without: int | None = None) -> Fitted:
    """Return the constants that fit all rows, or all but one."""

    def residuals(values: Sequence[float]) -> list[float]:
        errors = _errors(Fitted(*values))
        return [error for index, error in enumerate(errors) if index != without]

    start_at = (FITTED.products, FITTED.kernel_bytes, FITTED.gathers, FITTED.switch_seconds)
    found = least_squares(residuals, start_at, loss="soft_l1", f_scale=GOOD, bounds=(0.0, 100.0), diff_step=1e-3)
    return Fitted(*map(float, found.x))


def _report(errors: Sequence[float]) -> None:
    for share, goal in ((TOLERANCE, 1.0), (GOOD, 0.5)):
        held = sum(abs(math.expm1(error)) <= share for error in errors) / len(errors)
        report(f"share of {len(errors)} published rows within {share:.0%}", held, goal, at_least=True)


@functools.cache
def _machine() -> Hardware:
    return resolve({"model": "glm5", "site": "local"}, Path("config")).config.hardware


def _names() -> list[tuple[str, str]]:
    runs = [(run.name, run.missing) for run in (*ANCHORS, *OTHERS)]
    return runs + [(row.name, row.missing) for row in step_time_accuracy(_machine())]


def _errors(fitted: Fitted) -> list[float]:
    """Return the logarithm of predicted over published seconds of every row."""
    runs = [forecast(run, fitted).error for run in (*ANCHORS, *OTHERS)]
    rows = [row.error for row in step_time_accuracy(_machine(), fitted)]
    return [math.log1p(error) for error in runs + rows]


if __name__ == "__main__":
    start(main, quick)
