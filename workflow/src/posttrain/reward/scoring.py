"""Groups of answers to rewards: what `data.reward` names is asked of the graders, weighted and added up.

Nothing here invents a score. Where a grader fails (it misses its deadline, its process dies, it raises), or none
applies, an answer has no reward; the others of its group keep theirs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from posttrain.config.schema import Config
from posttrain.reward.answer import Answer, Failure, Grade
from posttrain.reward.formula import Term, parse_reward, total
from posttrain.reward.grade import GRADERS, ShapeSettings, built_in
from posttrain.reward.graders import GraderPool, Job
from posttrain.reward.own import OwnFunction, inspect_own


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
    """Grades by `data.reward`.

    Args:
        config: The resolved configuration.
        pool: Grades.

    Raises:
        ConfigError: The reward cannot be read, or names a grader that there is not.
    """

    def __init__(self, config: Config, pool: GraderPool):
        self._pool = pool
        self.terms = parse_reward(config.data.reward)
        self._graders = {term: grader_of(term, config) for term in self.terms}

    async def score(self, groups: Sequence[Sequence[Answer]]) -> list[list[Scored]]:
        """Return what is to be said of each answer.

        Args:
            groups: Answers to one prompt each: a function that grades groups sees them together.
        """
        asked = [(term, group) for group in groups for term in self.terms]
        answers = [await_each for term, group in asked for await_each in self._jobs(term, group)]
        results = iter(await self._pool.grade_all(answers))
        graded = {(id(group), term): list(self._collected(term, group, results)) for term, group in asked}
        return [
            [self._scored({term: graded[id(group), term][place] for term in self.terms}) for place in range(len(group))]
            for group in groups
        ]

    def _jobs(self, term: Term, group: Sequence[Answer]) -> list[Job]:
        grader = self._graders[term]
        if isinstance(grader, OwnFunction) and grader.takes_groups:
            return [Job(grader, tuple(group))]
        is_instant = not isinstance(grader, OwnFunction) and GRADERS[term.grader].is_instant
        return [Job(grader, (answer,), is_instant) for answer in group]

    def _collected(
        self, term: Term, group: Sequence[Answer], results: Iterator[tuple[Grade, ...] | Failure]
    ) -> Iterator[Grade | Failure]:
        for job in self._jobs(term, group):
            result = next(results)
            yield from [result] * len(job.answers) if isinstance(result, Failure) else result

    def _scored(self, found: Mapping[Term, Grade | Failure]) -> Scored:
        grades = {term.column: result for term, result in found.items() if isinstance(result, Grade)}
        failed = {term.column: result for term, result in found.items() if isinstance(result, Failure)}
        scores = {term.column: grades[term.column].score if term.column in grades else None for term in self.terms}
        parts = {f"{name}/{part}": value for name, grade in grades.items() for part, value in grade.parts.items()}
        failure = "; ".join(f"{name}: {result.kind}: {result.reason}" for name, result in failed.items())
        return Scored(None if failed else total(self.terms, scores), scores, parts, failure)
