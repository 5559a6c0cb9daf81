"""Which configurations need a sandbox."""

from __future__ import annotations

from posttrain.config.own_reward import trained_rewards
from posttrain.config.reward_sum import parse_reward
from posttrain.config.schema import Config
from posttrain.config.suites import suite_rewards

# Graders that run what a model has written.
RUN_CODE = ("code",)


def needs_sandbox(config: Config) -> bool:
    """Return whether responses are run: by a grader in training or in a suite."""
    rewards = [*trained_rewards(config).values(), *suite_rewards(config).values()]
    return any(term.grader in RUN_CODE for reward in rewards for term in parse_reward(reward))
