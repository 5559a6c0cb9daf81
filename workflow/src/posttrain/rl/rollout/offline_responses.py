"""Makes a rollout from offline responses: groups of one trajectory each, from the dataset, without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from posttrain.config.schema import Config
from posttrain.errors import Problem, raise_if_any
from posttrain.rl.data.chat import ChatTokenizer
from posttrain.rl.data.keys import parse_key
from posttrain.rl.data.messages import RowError, answer_of
from posttrain.rl.data.mixture import PromptMix
from posttrain.rl.rollout.response_limit import longest_response
from posttrain.types import Prompt, RolloutResult, Trajectory, TrajectoryGroup


class OfflineResponses:
    """Makes the rollout of a step from the dataset's responses; a function of the step number only.

    Args:
        config: The resolved configuration.
        prompts: The training prompts with their responses; their order is a function of the seed.
        tokenizer: Renders them.

    Raises:
        ConfigError: A row has no usable response, or the model's chat template cannot render one.
    """

    def __init__(self, config: Config, prompts: Sequence[Prompt], tokenizer: ChatTokenizer):
        self._config, self._prompts, self._tokenizer = config, prompts, tokenizer
        self._key = parse_key(config.data.response_key, "data.response_key") if config.data.response_key else None
        self._mix = PromptMix(prompts, config.data)
        raise_if_any(self._problems())
        # Detect what the template cannot render before the model is loaded.
        self._group(prompts[0])

    async def collect(self, step: int) -> RolloutResult:
        """Return the groups of a step, from 0."""
        count = self._config.rollout.rollout_batch_size
        prompts = self._mix.take(step * count, count)
        groups = await asyncio.to_thread(lambda: [self._group(prompt) for prompt in prompts])
        return RolloutResult(groups, num_replayed=0)

    def _problems(self) -> list[Problem]:
        wrong = [prompt.prompt_id for prompt in self._prompts if not self._has_answer(prompt)]
        if not wrong:
            return []
        value = f"{len(wrong)} of {len(self._prompts)} rows, the first number {wrong[0] + 1}, have another label"
        allowed = "a label that is the response: a text, or one message of the assistant"
        remedy = "correct these rows, or name the responses' column with data.response_key"
        return [Problem("label-missing", "data.label_key", value, allowed, remedy)]

    def _has_answer(self, prompt: Prompt) -> bool:
        try:
            self.answer(prompt)
        except (RowError, LookupError):
            return False
        return True

    def answer(self, prompt: Prompt) -> dict[str, object]:
        """Return the response message to train on.

        Raises:
            RowError: The row's response is not a message.
            LookupError: The row has none.
        """
        return answer_of(self._key.find(prompt.columns) if self._key else prompt.answer or prompt.label)

    def _group(self, prompt: Prompt) -> TrajectoryGroup:
        asked, response = self._tokenizer.render_answered(prompt.messages, self.answer(prompt), prompt.tools)
        longest = longest_response(self._config, prompt.prompt_id, len(asked))
        trajectory = Trajectory.of_response(
            asked,
            response[:longest],
            prompt_id=prompt.prompt_id,
            finish_reason="length" if len(response) > longest else "stop",
            reward=0.0,
        )
        return TrajectoryGroup(prompt, (trajectory,))
