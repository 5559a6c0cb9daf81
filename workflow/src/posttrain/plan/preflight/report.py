"""The result of a check, and the output of a list of checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.errors import Problem, raise_if_any


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Args:
        name: Name of the check.
        detail: The result in a few words, or the reason why a check was skipped.
        problem: The problem; None if the check passed.
        is_skipped: The check does not apply here.
    """

    name: str
    detail: str
    problem: Problem | None = None
    is_skipped: bool = False

    @property
    def status(self) -> str:
        """ok, skipped, or problem."""
        return "problem" if self.problem else "skipped" if self.is_skipped else "ok"

    def as_dict(self) -> dict[str, object]:
        """Return the finding as plain types."""
        return {
            "name": self.name,
            "status": self.status,
            "detail": self.detail,
            "problem": self.problem.as_dict() if self.problem else None,
        }


def ok(name: str, detail: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(name, detail)


def skipped(name: str, reason: str) -> Finding:
    """Return the result of a check that does not apply, with the reason."""
    return Finding(name, reason, is_skipped=True)


def failed(code: str, name: str, key: str, value: str, allowed: str, remedy: str) -> Finding:
    """Return a finding with a problem."""
    return Finding(name, value, Problem(code, key, value, allowed, remedy))


def raise_problems(findings: Sequence[Finding]) -> None:
    """Raise one `ConfigError` with every problem found, if there is any."""
    raise_if_any([finding.problem for finding in findings if finding.problem is not None])


def print_findings(findings: list[Finding]) -> None:
    """Print one line per check to stdout."""
    # Imported here, because every dry run imports this module and needs no printing.
    from rich.console import Console
    from rich.markup import escape

    console = Console(width=110, highlight=False)
    colors = {"ok": "green", "skipped": "yellow", "problem": "bold red"}
    for finding in findings:
        console.print(
            f"[{colors[finding.status]}]{finding.status:8}[/] {escape(f'{finding.name}: {finding.detail}')}",
            soft_wrap=True,
        )
