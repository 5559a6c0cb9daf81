"""Computes rewards of groups of answers: runs the graders of `data.reward` and sums their weighted scores.

No score is invented. If a grader fails (missed deadline, dead process, exception, invalid answer of its address), or no
grader applies, the answer has no reward; the others of its group keep theirs.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from posttrain.config.data import sources_of
from posttrain.config.derived import share_of
from posttrain.config.own_reward import inspect_own, read_prompt
from posttrain.config.reward_sum import Term, parse_reward, total
from posttrain.config.schema import Config
from posttrain.config.services import Address, Judge, Service
from posttrain.rl.reward import code
from posttrain.rl.reward.answer import Answer, Failure, Grade
from posttrain.rl.reward.code import CodeGrader
from posttrain.rl.reward.graders import BuiltIn, GraderPool
from posttrain.rl.reward.job import Grades, Job
from posttrain.rl.reward.judge import JudgeGrader
from posttrain.rl.reward.of_environment import NAME, EnvironmentGrader
from posttrain.rl.reward.own import OwnFunction
from posttrain.rl.reward.service import ServiceGrader
from posttrain.rl.reward.shape import ShapeSettings

# A term, and the answers of one grader call.
Asked = tuple[Term, tuple[Answer, ...]]

# Graders that need no network.
Local = BuiltIn | OwnFunction | EnvironmentGrader
# Failures shown in an error.
NUM_TOLD = 20


@dataclass(frozen=True)
class Scored:
    """The graders' results for one answer.

    Args:
        reward: Weighted sum; None if a grader failed or none applies.
        scores: Grader -> score, None if it does not apply or failed.
        parts: Further values, `grader/name` -> value.
        failure: Name and reason of a failed grader; "" if none failed.
    """

    reward: float | None
    scores: Mapping[str, float | None]
    parts: Mapping[str, float]
    failure: str = ""


class Scorer:
    """Grades answers by `data.reward`, or by the reward of their source.

    Args:
        config: The resolved configuration.
        pool: Runs the local graders.

    Raises:
        ConfigError: A reward cannot be read, or a service's or judge's token is not in the environment.
        RuntimeError: A user's function or a judge's prompt has changed since planning.
    """

    def __init__(self, config: Config, pool: GraderPool):
        self._pool = pool
        self.terms = {name: parse_reward(data.reward) for name, data in sources_of(config.data).items()}
        graders = {term.grader: _grader(term, config) for terms in self.terms.values() for term in terms}
        self._far = {name: one for name, one in graders.items() if not isinstance(one, Local)}
        self._near = {name: one for name, one in graders.items() if isinstance(one, Local)}

    def needs_label(self, term: Term) -> bool:
        """Return whether labels can check a grader: it needs labels, and costs no request per answer."""
        return term.grader in self._near and self._near[term.grader].needs_label

    async def score(self, groups: Sequence[Sequence[Answer]], only: Term | None = None) -> list[list[Scored]]:
        """Return the result of each answer.

        Args:
            groups: Answers by prompt; group graders get each group together.
            only: The only term to compute; None: all terms of the source.
        """
        asked = [self._asked(group, (only,) if only else self.terms[group[0].source]) for group in groups]
        results = iter(await self._grade([one for of_group in asked for one in of_group]))
        return [_scored(group, of_group, results) for group, of_group in zip(groups, asked, strict=True)]

    def _asked(self, group: Sequence[Answer], terms: Sequence[Term]) -> list[Asked]:
        """Return the grader calls for a group, by grader and answer."""
        asked: list[Asked] = []
        for term in terms:
            is_one = term.grader in self._near and self._near[term.grader].takes_groups
            asked += [(term, answers) for answers in ([tuple(group)] if is_one else [(answer,) for answer in group])]
        return asked

    async def _grade(self, asked: Sequence[Asked]) -> list[Grades | Failure]:
        """Return the results in order; local workers and remote requests run concurrently."""
        results: dict[int, Grades | Failure] = {}

        async def ask_near(places: Sequence[int]) -> None:
            graders = [self._near[asked[place][0].grader] for place in places]
            jobs = [
                Job(one, asked[place][1], one.is_instant, one.source)
                for one, place in zip(graders, places, strict=True)
            ]
            results.update(zip(places, await self._pool.grade_all(jobs), strict=True))

        async def ask_far(name: str, places: Sequence[int]) -> None:
            outcomes = await self._far[name].grade_all([asked[place][1][0] for place in places])
            found = [outcome if isinstance(outcome, Failure) else (outcome,) for outcome in outcomes]
            results.update(zip(places, found, strict=True))

        places: dict[str, list[int]] = {}
        for place, (term, _) in enumerate(asked):
            places.setdefault(term.grader if term.grader in self._far else "", []).append(place)
        await asyncio.gather(*(ask_far(name, of) if name else ask_near(of) for name, of in places.items()))
        return [results[place] for place in range(len(asked))]


def _scored(group: Sequence[Answer], asked: Sequence[Asked], results: Iterator[Grades | Failure]) -> list[Scored]:
    """Return the grades of a group; takes the results of `asked` from the iterator `results`."""
    columns: dict[Term, list[Grade | Failure]] = {}
    for term, answers in asked:
        result = next(results)
        columns.setdefault(term, []).extend([result] * len(answers) if isinstance(result, Failure) else result)
    terms = list(columns)
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
    try:
        reward = None if failures else total(terms, scores)
    except OverflowError as error:
        reward, failures = None, [f"data.reward: error: {error}"]
    return Scored(reward, scores, parts, "; ".join(failures))


def _grader(term: Term, config: Config) -> Local | ServiceGrader | JudgeGrader | CodeGrader:
    if term.grader == NAME:
        return EnvironmentGrader()
    if term.grader == code.NAME:
        return CodeGrader.of(config)
    if term.is_own:
        own = inspect_own(term.grader)
        _check_planned(term.grader, own.digest, config)
        return OwnFunction(own)
    address = config.reward.services.get(term.grader) or config.reward.judges.get(term.grader)
    return network_grader(config, term.grader, address) if address else BuiltIn(term.grader, shape_settings(config))


def network_grader(config: Config, name: str, address: Address) -> ServiceGrader | JudgeGrader:
    """Return the client of a remote grader.

    Args:
        config: The resolved configuration.
        name: Name of the grader.
        address: Its settings, a `Service` or a `Judge`.

    Raises:
        ConfigError: Its token is not in the environment, or the judge's prompt cannot be read.
        RuntimeError: The judge's prompt has changed since planning.
    """
    if isinstance(address, Service):
        return ServiceGrader(f"reward.services.{name}", address)
    assert isinstance(address, Judge)
    section = f"reward.judges.{name}"
    prompt = read_prompt(address.prompt_file, f"{section}.prompt_file")
    _check_planned(address.prompt_file, hashlib.sha256(prompt.encode()).hexdigest(), config)
    return JudgeGrader(section, address, prompt)


def _check_planned(file: str, digest: str, config: Config) -> None:
    if digest not in config.reward.own_digests:
        raise RuntimeError(f"{file} has changed since the run was planned; run again to plan with it as it is")


def shape_settings(config: Config) -> ShapeSettings:
    """Return the settings of the format graders."""
    reward, longest = config.reward, config.rollout.max_response_tokens
    return ShapeSettings(
        format_pattern=reward.format_pattern,
        target_tokens=reward.target_tokens,
        max_tokens=longest,
        overlong_buffer_tokens=min(reward.overlong_buffer_tokens, longest),
        repetition_ngram=reward.repetition_ngram,
    )


def check_failures(failures: Sequence[str], most: float) -> None:
    """Raise if graders failed too often: `reward.max_failure_share`.

    Args:
        failures: Reason per response; "" if it was graded.
        most: Maximum share.

    Raises:
        RuntimeError: Too many failures; quotes the first.
    """
    failed = [failure for failure in failures if failure]
    if len(failed) > share_of(most, len(failures)):
        told = "".join(f"\n    {reason}" for reason in dict.fromkeys(failed[:NUM_TOLD]))
        raise RuntimeError(
            f"graders failed for {len(failed)} of {len(failures)} responses, more than "
            f"reward.max_failure_share={most:g} allows:{told}\n  Mend the grader and run again: these responses are "
            "sampled and graded anew. A higher share leaves them out."
        )
