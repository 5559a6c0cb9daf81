"""Graders over a network: reward services and judges, under names chosen by the user."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.document import ANY, _doc

# The pattern of a verdict, which ends the judge's answer.
VERDICT = r"(?i)\bverdict\b[\s:*]*(-?\w+(?:\.\d+)?)"


@dataclass(frozen=True)
class Address:
    """An address, with time limits and retries. It is not part of the run's identity."""

    url: str = _doc("Address, http:// or https://, without a user, a password or a query", "", unnamed=ANY)
    token_variable: str = _doc(
        "Name of the environment variable whose value is sent as `Authorization: Bearer`; empty: none", "", unnamed=ANY
    )
    deadline_seconds: float = _doc(
        "Time limit of a request, retries included",
        60.0,
        exclusive_minimum=0,
        unnamed=ANY,
    )
    num_retries: int = _doc(
        "Retries of a request after a broken connection, HTTP 429 or 5xx", 3, minimum=0, unnamed=ANY
    )
    max_requests: int = _doc("Concurrent requests", 8, minimum=1, unnamed=ANY)


@dataclass(frozen=True)
class Service(Address):
    """A reward service, used in `data.reward` under its name here (docs/rewards.md)."""

    batch_size: int = _doc("Maximum responses per request", 32, minimum=1, unnamed=ANY)


@dataclass(frozen=True)
class Judge(Address):
    """A judge model at an OpenAI-compatible address that ends in /v1 (docs/rewards.md)."""

    model: str = _doc("Name of the model at that address", "")
    prompt_file: str = _doc(
        "File with the judge's prompt, which may contain {prompt}, {response}, {label} and {column}", "", unnamed=ANY
    )
    verdict_pattern: str = _doc(
        "Regular expression with one group, a number or yes or no; its last match in the judge's answer counts", VERDICT
    )
    best_verdict: float = _doc("Verdict that becomes a score of 1; 0 becomes 0", 1.0, exclusive_minimum=0)
    max_tokens: int = _doc("Token limit of the judge's answer; a truncated answer is a failure", 1024, minimum=1)
