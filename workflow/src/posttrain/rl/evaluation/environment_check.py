"""Plays scripted agents in an environment before training: lazy ones, cheats, and a perfect one where it is known.

An environment that pays an agent for nothing teaches nothing else. The perfect agent is the environment's own: its
method `perfect(row)` returns the agent's messages, or their texts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from posttrain.config.derived import share_of
from posttrain.config.own_environment import KEY
from posttrain.config.reward_sum import PASSING_SCORE
from posttrain.config.schema import Config
from posttrain.errors import Problem
from posttrain.rl.data.chat import ChatTokenizer
from posttrain.rl.engines.sampling_seed import sampling_seed
from posttrain.rl.environments.kinds import environments_of
from posttrain.rl.environments.protocol import EnvironmentFailure, Environments, Message
from posttrain.rl.evaluation.cheats import CHEATS, Script, answering, following
from posttrain.rl.rollout.episode import row_of
from posttrain.rl.rollout.response_limit import longest_response
from posttrain.types import Prompt, label_text

NUM_ROWS = 8
# Episodes at the same time.
NUM_PLAYED = 8
# Agents that are known only with the environment's `perfect`, and one that is known with labels.
PERFECT, REPLAY = "plays perfectly", "plays what is perfect in another row"
OTHER_LABEL = "answers with the label of another row"
NOT_TRIED = {
    REPLAY: "a method `perfect`, and rows with different labels",
    OTHER_LABEL: "rows with different labels",
    **{cheat.does: cheat.needs for cheat in CHEATS},
}
# What an episode has earned and how it failed; None if its agent found no way to play.
Played = tuple[float | None, str] | None


@dataclass(frozen=True)
class AgentCheck:
    """What a scripted agent earned.

    Args:
        agent: What it does, as the end of "an agent that ...".
        rewards: One per row; None where the environment failed or the agent found no way to play.
        failures: The reasons.
        num_paid: Rows that gave it as much as the perfect agent, or `PASSING_SCORE` where none is known.
    """

    agent: str
    rewards: tuple[float | None, ...]
    failures: tuple[str, ...]
    num_paid: int = 0


@dataclass(frozen=True)
class EnvironmentCheck:
    """Findings of the environment check.

    Args:
        agents: What each scripted agent earned.
        not_tried: Cheat that was not tried -> what the environment or its rows lack for it.
        problems: Reasons to refuse the environment.
    """

    agents: Sequence[AgentCheck]
    not_tried: Mapping[str, str]
    problems: Sequence[Problem]

    def as_dict(self) -> dict[str, Any]:
        """Return the findings as plain JSON types."""
        return {
            "agents": [vars(agent) for agent in self.agents],
            "not_tried": dict(self.not_tried),
            "problems": [problem.as_dict() for problem in self.problems],
        }


def check_environment(config: Config, folder: Path, prompts: Sequence[Prompt]) -> EnvironmentCheck:
    """Play the cheats on a few rows, and if the perfect agent is known, it and its replay.

    Args:
        config: The resolved configuration, with an environment.
        folder: The checkpoint, with tokenizer and chat template.
        prompts: The rows.

    Raises:
        ConfigError: What an environment says first is too long.
        CheckpointError: The tokenizer cannot be used, or the chat template cannot render what an environment says.
    """
    chat = ChatTokenizer(folder, config.data.chat_template_kwargs)
    agents, not_tried = asyncio.run(_play_agents(config, chat, prompts))
    return EnvironmentCheck(agents, not_tried, _find_problems(agents, config))


def print_environment_check(found: EnvironmentCheck) -> None:
    """Print what each agent earned, and which were not tried."""
    console = Console(highlight=False, soft_wrap=True)
    for agent in found.agents:
        nothing = "failed" if agent.failures else "not played"
        told = ", ".join(nothing if reward is None else f"{reward:g}" for reward in agent.rewards)
        console.print(f"an agent that {agent.agent} earned {told}", markup=False)
    for name, lacks in found.not_tried.items():
        console.print(f"not tried: an agent that {name}; it needs {lacks}", markup=False)


async def _play_agents(
    config: Config, chat: ChatTokenizer, prompts: Sequence[Prompt]
) -> tuple[list[AgentCheck], dict[str, str]]:
    """Return what each agent earned, and for each cheat that was not tried what the environment lacks."""
    stride = max(1, len(prompts) // NUM_ROWS)
    rows = list(prompts[::stride][:NUM_ROWS])
    casts = {cheat.does: [(row, cheat.script) for row in rows] for cheat in CHEATS}
    others = _other_rows(rows)
    casts[OTHER_LABEL] = [(row, _stating(rows[other])) for row, other in others]
    with environments_of(config) as environments:
        player = _Player(config, chat, environments)
        perfect, failures = await player.find_perfect(rows)
        if perfect:
            casts[PERFECT] = [*zip(rows, perfect, strict=True)]
            casts[REPLAY] = [(row, perfect[other]) for row, other in others]
        played = {name: await player.play_all(cast) for name, cast in casts.items()}
    tried = {name: results for name, results in played.items() if any(one is not None for one in results)}
    best = {row.prompt_id: one[0] for row, one in zip(rows, tried.get(PERFECT, ()), strict=False) if one}
    checks = []
    for name, results in tried.items():
        most = [best.get(row.prompt_id, PASSING_SCORE) for row, _ in casts[name]]
        checks.append(_judged(name, results, most))
    checks += [AgentCheck(PERFECT, (None,) * len(failures), failures)] if failures else []
    return checks, {name: lacks for name, lacks in NOT_TRIED.items() if name not in tried}


def _find_problems(checks: Sequence[AgentCheck], config: Config) -> list[Problem]:
    """Return the reasons to refuse an environment whose agents have earned this."""
    problems, is_unpaid = [], _is_perfect_unpaid(checks)
    for check in checks:
        count = len(check.rewards)
        if len(check.failures) > share_of(config.reward.max_failure_share, count):
            told = "".join(f"\n        {reason}" for reason in dict.fromkeys(check.failures))
            value = f"failed in {len(check.failures)} of {count} episodes of an agent that {check.agent}:{told}"
            allowed = f"at most {config.reward.max_failure_share:.1%} (reward.max_failure_share)"
            problems.append(Problem("environment-fails", KEY, value, allowed, "fix the environment or its service"))
        if check.agent == PERFECT and is_unpaid:
            value = f"pays the agent that {check.agent} no more than the others: {check.rewards}"
            allowed, remedy = "more than an agent without a clue earns", "correct `perfect`, or the reward"
            problems.append(Problem("perfect-agent-unpaid", KEY, value, allowed, remedy))
        if check.agent != PERFECT and not is_unpaid and check.num_paid > share_of(config.reward.max_other_label, count):
            value = f"pays an agent that {check.agent} in {check.num_paid} of {count} rows: {check.rewards}"
            allowed = f"less than the perfect agent earns, or {PASSING_SCORE} where none is known"
            remedy = "let the reward depend on what the agent has achieved (docs/environments.md)"
            problems.append(Problem("environment-pays-cheats", KEY, value, allowed, remedy))
    return problems


class _Player:
    """Plays scripted episodes."""

    def __init__(self, config: Config, chat: ChatTokenizer, environments: Environments):
        self._config, self._chat, self._environments = config, chat, environments
        self._at_a_time = asyncio.Semaphore(NUM_PLAYED)

    async def find_perfect(self, rows: Sequence[Prompt]) -> tuple[list[Script], tuple[str, ...]]:
        """Return the perfect agent of each row, nothing if the environment knows none; and why it could not say."""
        found: list[Script] = []
        for row in rows:
            try:
                environment = await self._environments.open(self._seed_of(row))
                try:
                    actions = await environment.perfect(row_of(row)) if hasattr(environment, "perfect") else None
                finally:
                    await environment.close()
            except EnvironmentFailure as failure:
                return [], (str(failure),)
            if actions is None:
                return [], ()
            found.append(_playing(actions))
        return found, ()

    async def play_all(self, cast: Sequence[tuple[Prompt, Script]]) -> list[Played]:
        """Return what became of an episode per row."""
        return await asyncio.gather(*(self._play(row, script) for row, script in cast))

    async def _play(self, row: Prompt, script: Script) -> Played:
        async with self._at_a_time:
            try:
                environment = await self._environments.open(self._seed_of(row))
                try:
                    reward = await self._episode(environment, row, script)
                    return None if reward is None else (reward, "")
                finally:
                    await environment.close()
            except EnvironmentFailure as failure:
                return None, str(failure)

    async def _episode(self, environment: Any, row: Prompt, script: Script) -> float | None:
        start = await environment.reset(row_of(row))
        longest_response(self._config, row.prompt_id, len(self._chat.render(start.messages, start.tools)))
        agent = script(start, row)
        if agent is None:
            return None
        seen, rewards = list[Message](), list[float]()
        end, num_turns = "turns", 0
        while num_turns < self._config.environment.max_turns:
            action = agent(seen)
            num_turns += 1
            answer = await environment.step(action)
            seen += [action, *answer.messages]
            rewards += [] if answer.reward is None else [answer.reward]
            if answer.done:
                end = "done"
                break
        graded = await environment.reward({"messages": [*start.messages, *seen], "num_turns": num_turns, "end": end})
        return float(graded.reward + sum(rewards))

    def _seed_of(self, row: Prompt) -> int:
        return sampling_seed(self._config.data.seed, "environment check", row.prompt_id, 0)


def _playing(actions: Sequence[Message]) -> Script:
    return lambda start, row: following(actions)


def _stating(other: Prompt) -> Script:
    return lambda start, row: answering(start, label_text(other.label))


def _other_rows(rows: Sequence[Prompt]) -> list[tuple[Prompt, int]]:
    """Return each row with the place of the next one that has another label, of those that have one."""
    found = []
    for place, row in enumerate(rows):
        others = [*range(place + 1, len(rows)), *range(place)]
        different = (i for i in others if label_text(rows[i].label) != label_text(row.label))
        other = next(different, None) if row.label is not None else None
        found += [] if other is None else [(row, other)]
    return found


def _is_perfect_unpaid(checks: Sequence[AgentCheck]) -> bool:
    """Return whether the perfect agent earns nothing anywhere, and nowhere more than all others."""
    (perfect, *_) = [check.rewards for check in checks if check.agent == PERFECT] or [()]
    cheats = {cheat.does for cheat in CHEATS}
    others = [check.rewards for check in checks if check.agent in cheats]
    by_row = [(reward, [row[place] for row in others]) for place, reward in enumerate(perfect) if reward is not None]
    return bool(by_row) and all(
        reward <= 0 and reward <= max(other for other in of_others if other is not None)
        for reward, of_others in by_row
        if any(other is not None for other in of_others)
    )


def _judged(agent: str, results: Sequence[Played], best: Sequence[float | None]) -> AgentCheck:
    rewards = tuple(one[0] if one else None for one in results)
    paid = [
        reward >= most for reward, most in zip(rewards, best, strict=True) if reward is not None and most is not None
    ]
    return AgentCheck(agent, rewards, tuple(one[1] for one in results if one and one[1]), sum(paid))
