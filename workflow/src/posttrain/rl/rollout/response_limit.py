"""The limit of a response, or of everything after an episode's first prompt."""

from __future__ import annotations

from posttrain.config.derived import token_budget
from posttrain.config.schema import Config
from posttrain.errors import ConfigError, Problem


def longest_response(config: Config, prompt_id: int, num_prompt_tokens: int) -> int:
    """Return the maximum response tokens for a prompt, so that both fit into the trainer's context.

    Args:
        config: The resolved configuration.
        prompt_id: Names the prompt in errors.
        num_prompt_tokens: Its length.

    Raises:
        ConfigError: The prompt is longer than `rollout.max_prompt_tokens`, or leaves no room for a response.
    """
    rollout, found = config.rollout, f"prompt {prompt_id} has {num_prompt_tokens} tokens"
    if 0 < rollout.max_prompt_tokens < num_prompt_tokens:
        remedy = "raise it, or leave the prompt out of the data"
        raise ConfigError(
            [Problem("prompts-too-long", "rollout.max_prompt_tokens", str(rollout.max_prompt_tokens), found, remedy)]
        )
    if rollout.overlong_samples != "cut":
        return rollout.max_response_tokens
    left = token_budget(config) - num_prompt_tokens
    if left < 1:
        key, budget = "trainer.max_tokens_per_gpu", str(config.trainer.max_tokens_per_gpu)
        allowed = f"more than a prompt with rollout.overlong_samples=cut; {found}"
        raise ConfigError(
            [Problem("prompts-too-long", key, budget, allowed, "raise the budget, or leave the prompt out of the data")]
        )
    return min(rollout.max_response_tokens, left)
