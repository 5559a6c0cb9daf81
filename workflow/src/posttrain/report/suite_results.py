"""What a run was measured on, and when: a row for each suite, and for held-out prompts where there are several."""

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
        name: Of the suite.
        measured: In the order of the weights.
    """

    name: str
    measured: Sequence[Measured]

    @property
    def change(self) -> tuple[float, float, float] | None:
        """From the first to the last; see `rate_change`. None where it was measured once."""
        if len(self.measured) < 2:
            return None
        return rate_change(self.measured[0].result, self.measured[-1].result)

    @property
    def worse(self) -> list[str]:
        """When its pass rate was below the one before training by more than chance."""
        first, *others = self.measured
        return [one.when for one in others if rate_change(first.result, one.result)[2] < 0]


def suite_rows(run: RunData) -> list[SuiteRow]:
    """Return a row for each suite that was measured, the held-out prompts first; none where there are only these."""
    moments = [("before", _exams(run.before)), *((f"after {n:,} steps", exams) for n, exams in run.between)]
    moments.append(("after", _exams(run.after)))
    names = dict.fromkeys(name for _, exams in moments for name in exams)
    if not run.between and set(names) <= {HELD_OUT}:
        return []
    return [SuiteRow(name, [Measured(when, exams[name]) for when, exams in moments if name in exams]) for name in names]


def _exams(result: Mapping[str, Any] | None) -> Mapping[str, Mapping[str, Any]]:
    return {} if result is None else {HELD_OUT: result, **result.get("suites", {})}
