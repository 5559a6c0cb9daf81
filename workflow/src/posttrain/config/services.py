"""Graders that answer over a network: reward services and judges, each under a name of the user's."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.document import ANY, _doc

# The judge says it in words of its own, and this behind them.
VERDICT = r"(?i)\bverdict\b[\s:*]*(-?\w+(?:\.\d+)?)"


@dataclass(frozen=True)
class Address:
    """What is asked over a network, and with how much patience. Nothing of it is part of the run's identity."""

    url: str = _doc("Address, http:// or https://, without a user, a password or a query", "", unnamed=ANY)
    token_variable: str = _doc(
        "Name of the environment variable whose value is shown as `Authorization: Bearer`; empty: none", "", unnamed=ANY
    )
    deadline_seconds: float = _doc(
        "A request must be answered within this, however often asked again",
        60.0,
        exclusive_minimum=0,
        unnamed=ANY,
    )
    num_retries: int = _doc(
        "How often a request is asked again after a cut connection, HTTP 429 or 5xx", 3, minimum=0, unnamed=ANY
    )
    max_requests: int = _doc("Requests that are under way at a time", 8, minimum=1, unnamed=ANY)


@dataclass(frozen=True)
class Service(Address):
    """A reward service: `data.reward` names it as it is named here (docs/rewards.md)."""

    batch_size: int = _doc("Answers in a request, at most", 32, minimum=1, unnamed=ANY)


@dataclass(frozen=True)
class Judge(Address):
    """A model that judges, behind an OpenAI-compatible address that ends in /v1 (docs/rewards.md)."""

    model: str = _doc("Its name there", "")
    prompt_file: str = _doc("File with what it is asked: {prompt}, {response}, {label}, {column}", "", unnamed=ANY)
    verdict_pattern: str = _doc(
        "Regular expression with one group, a number or yes or no; where it matches last in what is said", VERDICT
    )
    best_verdict: float = _doc("Number that is a score of 1; 0 is one of 0", 1.0, exclusive_minimum=0)
    max_tokens: int = _doc("What the judge says is cut here, and then a failure", 1024, minimum=1)
