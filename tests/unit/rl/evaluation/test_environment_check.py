"""Environments that pay agents for nothing are refused; each cheat earns reward on one that is weak on purpose."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.rejections import assert_rejection, rejected
from tests.support.workflow_runs import ROOT

from posttrain.checkpoint.tiny.tokenizer import make_tokenizer
from posttrain.config.load import merge
from posttrain.errors import ConfigError
from posttrain.rl.evaluation.environment_check import (
    OTHER_LABEL,
    PERFECT,
    REPLAY,
    AgentCheck,
    check_environment,
    print_environment_check,
)
from posttrain.types import Prompt

# The reward is computed from: the label, all that was said, whether functions were called, and the start.
SOURCE = '''
class Sound:
    """The right answer earns 2 in the end, and 0.5 at once."""

    def __init__(self, seed): ...

    def reset(self, row):
        self.row, self.said, self.called = row, [], 0
        self.labels = {str(number) for number in range(100)}
        return row["messages"], [{"type": "function", "function": {"name": "look"}}]

    def step(self, action):
        self.said.append(action["content"])
        self.called += len(action.get("tool_calls") or [])
        if action.get("tool_calls"):
            return [{"role": "tool", "tool_call_id": "call_0", "content": "nothing"}], False
        return [], True, 0.5 * self.is_right()

    def reward(self, trajectory):
        return 2.0 * self.is_right()

    def is_right(self):
        return self.said[-1] == self.row["label"]

class Known(Sound):
    def perfect(self, row):
        return [row["label"]]

class Generous(Sound):
    def is_right(self):
        return True

class Credulous(Sound):
    def is_right(self):
        return "reward" in self.said[-1] or super().is_right()

class Busy(Sound):
    def is_right(self):
        return self.called > 0 or super().is_right()

class Echo(Sound):
    def is_right(self):
        return self.said[-1] == self.row["messages"][-1]["content"]

class Confused(Known):
    def is_right(self):
        return self.said[-1] in self.labels

class Stingy(Known):
    def step(self, action):
        return super().step(action)[:2]

    def reward(self, trajectory):
        return 0.4

class Unpaid(Known):
    def step(self, action):
        return super().step(action)[:2]

    def reward(self, trajectory):
        return 0.0

class Costly(Known):
    def step(self, action):
        return super().step(action)[:2]

    def reward(self, trajectory):
        return -2.0 if self.is_right() else -9.0

class Failing(Sound):
    def step(self, action):
        raise RuntimeError("no network")

class Unsure(Sound):
    def perfect(self, row):
        return []
'''
# None of the environments has a function that takes arguments.
LAZY = ("says nothing", "claims its reward", "calls every function without arguments", "repeats the prompt")
PLAYED = (*LAZY, OTHER_LABEL)
ROWS = [Prompt(i, ({"role": "user", "content": f"What is {i} + 0?"},), str(i)) for i in range(20)]


@pytest.fixture
def check(tmp_path: Path):
    (tmp_path / "weak.py").write_text(SOURCE)
    make_tokenizer(256).save_pretrained(tmp_path / "hf")

    def check(name: str, more: str = ""):
        settings = f"{more} environment.num_workers=1 environment.max_turns=3 reward.max_failure_share=0"
        words = f"data.environment={name} data.reward=environment {settings}".replace("=weak", f"={tmp_path}/weak")
        config = merge({"model": "tiny", "site": "local", "set": words}, ROOT / "config").config
        found = check_environment(config, tmp_path / "hf", ROWS)
        print_environment_check(found)
        return {one.agent: one for one in found.agents}, found.problems

    return check


def test_a_sound_environment_passes(check, capsys: pytest.CaptureFixture):
    agents, problems = check("weak.py:Sound")
    assert not problems
    assert "an agent that says nothing earned 0, 0, 0, 0, 0, 0, 0, 0\n" in capsys.readouterr().out
    assert agents == {name: AgentCheck(name, (0.0,) * 8, ()) for name in PLAYED}


def test_the_perfect_agent_sets_the_bar_and_is_replayed(check):
    agents, problems = check("weak.py:Known")
    assert not problems
    assert agents[PERFECT].rewards == (2.5,) * 8
    assert agents[REPLAY].rewards == (0.0,) * 8


def test_the_built_in_calculator_passes(check):
    agents, problems = check("calculator")
    assert not problems
    assert (agents[PERFECT].rewards, agents[REPLAY].rewards) == ((1.0,) * 8, (0.0,) * 8)


@pytest.mark.parametrize(
    ("name", "cheats"),
    [
        ("Generous", {*PLAYED}),
        ("Credulous", {"claims its reward"}),
        ("Busy", {"calls every function without arguments"}),
        ("Echo", {"repeats the prompt"}),
        ("Confused", {REPLAY, OTHER_LABEL}),
        ("Stingy", {*PLAYED, REPLAY}),
    ],
)
def test_an_environment_that_pays_a_cheat_is_refused(check, name: str, cheats: set[str]):
    agents, problems = check(f"weak.py:{name}")
    assert {agent for agent, one in agents.items() if one.num_paid and agent != PERFECT} == cheats
    assert {agents[agent].num_paid for agent in cheats} == {8}
    assert len(problems) == len(cheats)
    for agent in cheats:
        assert_rejection(ConfigError(problems), "environment-pays-cheats", agent, "8 of 8", key="data.environment")


def test_an_environment_that_fails_is_refused(check):
    agents, problems = check("weak.py:Failing")
    assert_rejection(ConfigError(problems), "environment-fails", "RuntimeError: no network", key="data.environment")
    assert len(problems) == len(PLAYED)
    assert agents["says nothing"].rewards == (None,) * 8


def test_a_perfect_agent_without_messages_is_refused(check):
    _, problems = check("weak.py:Unsure")
    assert_rejection(ConfigError(problems), "environment-fails", "perfect returned no messages", key="data.environment")


def test_a_perfect_agent_that_earns_nothing_is_the_environments_fault_and_no_cheat_is_paid(check):
    _, problems = check("weak.py:Unpaid")
    assert [problem.code for problem in problems] == ["perfect-agent-unpaid"]


def test_an_environment_that_never_pays_more_than_0_passes_if_the_perfect_agent_loses_least(check):
    _, problems = check("weak.py:Costly")
    assert problems == []


def test_what_an_environment_says_first_has_to_fit(check):
    with rejected("prompts-too-long", key="rollout.max_prompt_tokens"):
        check("weak.py:Sound", "rollout.max_prompt_tokens=5")
