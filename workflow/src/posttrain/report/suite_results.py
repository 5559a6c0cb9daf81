"""The measurements of a run by suite, held-out prompts included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.config.suites import HELD_OUT
from posttrain.report.intervals import rate_change
from posttrain.report.report_data import RunData


@dataclass(frozen=True)
class Measured:
    """One measurement.

    Args:
        when: "before", "after 10 steps", "after".
        result: See `rl.evaluation.heldout.summarize`.
    """

    when: str
    result: Mapping[str, Any]


@dataclass(frozen=True)
class SuiteRow:
    """All measurements of one suite.

    Args:
        name: Name of the suite.
        measured: Measurements in the order of training.
    """

    name: str
    measured: Sequence[Measured]

    @property
    def change(self) -> tuple[float, float, float] | None:
        """The change from the first to the last measurement (see `rate_change`); None if there is only one."""
        if len(self.measured) < 2:
            return None
        return rate_change(self.measured[0].result, self.measured[-1].result)

    @property
    def worse(self) -> list[str]:
        """Measurements whose pass rate was significantly below the one before training."""
        first, *others = self.measured
        return [one.when for one in others if rate_change(first.result, one.result)[2] < 0]


def suite_rows(run: RunData) -> list[SuiteRow]:
    """Return a row for each measured suite, held-out prompts first; empty if only held-out prompts were measured."""
    moments = [("before", _exams(run.before)), *((f"after {n:,} steps", exams) for n, exams in run.between)]
    moments.append(("after", _exams(run.after)))
    names = dict.fromkeys(name for _, exams in moments for name in exams)
    if not run.between and set(names) <= {HELD_OUT}:
        return []
    return [SuiteRow(name, [Measured(when, exams[name]) for when, exams in moments if name in exams]) for name in names]


def _exams(result: Mapping[str, Any] | None) -> Mapping[str, Mapping[str, Any]]:
    return {} if result is None else {HELD_OUT: result, **result.get("suites", {})}
