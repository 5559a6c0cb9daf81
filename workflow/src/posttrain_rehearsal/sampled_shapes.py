"""Sampled inputs that decide shapes: lengths of samples and loads of experts. A user can set both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from posttrain.config.load import Resolved
from posttrain.config.schema import Config
from posttrain.errors import ConfigError, Problem, raise_if_any
from posttrain.plan.sizing.activations import MicroBatch, fullest_micro_batch
from posttrain.plan.sizing.assumptions import ASSUMPTIONS, Assumptions

# Tokens of a prompt and of its response.
Length = tuple[int, int]


@dataclass(frozen=True)
class SampledShapes:
    """The distributions of a rehearsal.

    Args:
        lengths: Lengths to draw samples from; empty: short samples in the first step, the longest in the second.
        lengths_file: The file of lengths, or "".
        assumptions: The plan's assumptions, with the experts' imbalance.
    """

    lengths: tuple[Length, ...] = ()
    lengths_file: str = ""
    assumptions: Assumptions = ASSUMPTIONS


AS_PLANNED = SampledShapes()


def sampled_shapes_of(resolved: Resolved) -> SampledShapes:
    """Return the distributions of `lengths=FILE` and `expert_imbalance=NUMBER`.

    Raises:
        ConfigError: The file is unreadable or has invalid lengths.
    """
    request = resolved.request
    asked, imbalance = str(request.get("lengths") or ""), request.get("expert_imbalance")
    assumptions = ASSUMPTIONS if imbalance is None else replace(ASSUMPTIONS, expert_imbalance=float(imbalance))
    if not asked:
        return SampledShapes(assumptions=assumptions)
    path = Path(asked).expanduser().absolute()
    try:
        lines = path.read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([_problem(str(path), str(error))]) from None
    rows = {number: line.split() for number, line in enumerate(lines, 1) if line.strip()}
    raise_if_any([*_problems(resolved.config, rows)])
    return SampledShapes(
        tuple((int(prompt), int(response)) for prompt, response in rows.values()), str(path), assumptions
    )


def rehearsed_row(config: Config) -> MicroBatch:
    """Return the fullest row of a rehearsal, made of equally long samples."""
    fullest = fullest_micro_batch(config, ASSUMPTIONS)
    length = fullest.tokens // fullest.num_sequences
    return MicroBatch(fullest.num_sequences * length, fullest.num_sequences, length)


def _problems(config: Config, rows: dict[int, list[str]]) -> Iterator[Problem]:
    longest, response = fullest_micro_batch(config, ASSUMPTIONS).longest, config.rollout.max_response_tokens
    if not rows:
        yield _problem("an empty file", "")
    for number, words in rows.items():
        if len(words) != 2 or not all(word.isascii() and word.isdigit() and int(word) for word in words):
            yield _problem(f"line {number}: {' '.join(words)[:40]}", "")
        elif int(words[1]) > response or sum(map(int, words)) > longest:
            at_most = f"{response} of a response (rollout.max_response_tokens), {longest} with its prompt"
            yield _problem(f"line {number}: {' '.join(words)}", f"at most {at_most}")


def _problem(value: str, more: str) -> Problem:
    allowed = f"a file of two whole numbers a line, tokens of a prompt and of its response{more and f'; {more}'}"
    return Problem(
        "not-lengths", "lengths", value, allowed, "correct it, or leave it out: then rows are as full as they can be"
    )
