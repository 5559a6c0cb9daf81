"""Which configurations need a sandbox."""

from __future__ import annotations

from posttrain.config.own_environment import imports_sandbox, is_own
from posttrain.config.own_reward import trained_rewards
from posttrain.config.reward_sum import parse_reward
from posttrain.config.schema import Config
from posttrain.config.suites import suite_rewards

# Graders, and environments of ours, that run what a model has written.
RUN_CODE = ("code", "python")


def needs_sandbox(config: Config) -> bool:
    """Return whether responses are run: by the environment, or by a grader in training or in a suite."""
    environment = config.data.environment
    if environment in RUN_CODE or (is_own(environment) and imports_sandbox(environment)):
        return True
    rewards = [*trained_rewards(config).values(), *suite_rewards(config).values()]
    return any(term.grader in RUN_CODE for reward in rewards for term in parse_reward(reward))
