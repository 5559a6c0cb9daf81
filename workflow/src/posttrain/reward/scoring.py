"""Groups of answers to rewards: what `data.reward` names is asked of the graders, weighted and added up.

Nothing here invents a score. Where a grader fails (it misses its deadline, its process dies, it raises), or none
applies, an answer has no reward; the others of its group keep theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from posttrain.config.data import sources_of
from posttrain.config.own_reward import inspect_own
from posttrain.config.reward_sum import Term, parse_reward, total
from posttrain.config.schema import Config
from posttrain.errors import ConfigError, Problem
from posttrain.reward.answer import Answer, Failure, Grade
from posttrain.reward.graders import BuiltIn, GraderPool, Job
from posttrain.reward.own import OwnFunction
from posttrain.reward.shape import ShapeSettings

# Failures are told by the first ones.
NUM_TOLD = 20


@dataclass(frozen=True)
class Scored:
    """What the graders say of one answer.

    Args:
        reward: Weighted sum; None where a grader failed or none applies.
        scores: Grader -> score, None where it does not apply or failed.
        parts: Further numbers, `grader/name` -> value.
        failure: Why a grader failed, with its name; "" where none did.
    """

    reward: float | None
    scores: Mapping[str, float | None]
    parts: Mapping[str, float]
    failure: str = ""


class Scorer:
    """Grades by `data.reward`, answers of each source by its own.

    Args:
        config: The resolved configuration.
        pool: Grades.

    Raises:
        ConfigError: A reward cannot be read, or names a grader that there is not.
        RuntimeError: A function of the user's is not the one that was planned with.
    """

    def __init__(self, config: Config, pool: GraderPool):
        self._pool = pool
        self.terms = {name: parse_reward(data.reward) for name, data in sources_of(config.data).items()}
        self._graders = {term.grader: _grader(term, config) for terms in self.terms.values() for term in terms}

    async def score(self, groups: Sequence[Sequence[Answer]]) -> list[list[Scored]]:
        """Return what is to be said of each answer.

        Args:
            groups: Answers to one prompt each: a function that grades groups sees them together.
        """
        jobs = [self._jobs(group) for group in groups]
        results = iter(await self._pool.grade_all([job for of_group in jobs for _, job in of_group]))
        return [self._scored(group, of_group, results) for group, of_group in zip(groups, jobs, strict=True)]

    def _jobs(self, group: Sequence[Answer]) -> list[tuple[Term, Job]]:
        """Return what is asked about a group: grader by grader, answer by answer."""
        jobs: list[tuple[Term, Job]] = []
        for term in self.terms[group[0].source]:
            grader = self._graders[term.grader]
            parts = [tuple(group)] if grader.takes_groups else [(answer,) for answer in group]
            jobs += [(term, Job(grader, answers, grader.is_instant)) for answers in parts]
        return jobs

    def _scored(
        self,
        group: Sequence[Answer],
        jobs: Sequence[tuple[Term, Job]],
        results: Iterator[tuple[Grade, ...] | Failure],
    ) -> list[Scored]:
        """Return the grades of a group; `results` goes on with those of `jobs`."""
        terms = self.terms[group[0].source]
        columns: dict[Term, list[Grade | Failure]] = {term: [] for term in terms}
        for term, job in jobs:
            result = next(results)
            columns[term] += [result] * len(job.answers) if isinstance(result, Failure) else result
        return [_joined(terms, [columns[term][place] for term in terms]) for place in range(len(group))]


def _joined(terms: Sequence[Term], results: Sequence[Grade | Failure]) -> Scored:
    scores: dict[str, float | None] = {}
    parts: dict[str, float] = {}
    failures: list[str] = []
    for term, result in zip(terms, results, strict=True):
        scores[term.column] = None if isinstance(result, Failure) else result.score
        if isinstance(result, Failure):
            failures.append(f"{term.column}: {result.kind}: {result.reason}")
        else:
            parts |= {f"{term.column}/{name}": value for name, value in result.parts.items()}
    return Scored(None if failures else total(terms, scores), scores, parts, "; ".join(failures))


def _grader(term: Term, config: Config) -> BuiltIn | OwnFunction:
    if not term.is_own:
        return BuiltIn(term.grader, shape_settings(config))
    own = inspect_own(term.grader)
    if own.digest not in config.reward.own_digests:
        raise RuntimeError(f"{term.grader} has changed since the run was planned; run again to plan with it as it is")
    return OwnFunction(own)


def shape_settings(config: Config) -> ShapeSettings:
    """Return what the graders of form are told.

    Raises:
        ConfigError: `reward.format_pattern` is no regular expression, or may take exponential time.
    """
    reward, longest = config.reward, config.rollout.max_response_tokens
    try:
        return ShapeSettings(
            format_pattern=reward.format_pattern,
            target_tokens=reward.target_tokens,
            max_tokens=longest,
            overlong_buffer_tokens=min(reward.overlong_buffer_tokens, longest),
            repetition_ngram=reward.repetition_ngram,
        )
    except ValueError as error:
        allowed = "a regular expression that needs no exponential time"
        raise ConfigError([Problem("reward.format_pattern", str(error), allowed, "correct it")]) from error


def check_failures(failures: Sequence[str], most: float) -> None:
    """End where graders have failed too often: `reward.max_failure_share`.

    Args:
        failures: Of each response, why it could not be graded; "" where it could.
        most: Largest share.

    Raises:
        RuntimeError: With what they said first.
    """
    failed = [failure for failure in failures if failure]
    if len(failed) > most * len(failures):
        told = "".join(f"\n    {reason}" for reason in dict.fromkeys(failed[:NUM_TOLD]))
        raise RuntimeError(
            f"graders failed for {len(failed)} of {len(failures)} responses, more than "
            f"reward.max_failure_share={most:g} allows:{told}\n  Mend the grader and run again: these responses are "
            "sampled and graded anew. A higher share leaves them out."
        )
