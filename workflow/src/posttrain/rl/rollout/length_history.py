"""How long a prompt's responses are expected to be: as long as those of its last group."""

from __future__ import annotations

import math

from posttrain.rl.data.mixture import PromptMix
from posttrain.types import TrajectoryGroup


class LengthHistory:
    """The longest response of each prompt's last group in this attempt.

    Args:
        mix: Gives the prompt of a position.
    """

    def __init__(self, mix: PromptMix):
        self._mix, self._longest = mix, dict[tuple[str, int], int]()

    def note(self, group: TrajectoryGroup) -> None:
        """Note the lengths of a group that is ready."""
        longest = max(one.num_sampled for one in group.trajectories)
        self._longest[group.prompt.source, group.prompt.prompt_id] = longest

    def expected(self, position: int) -> float:
        """Return the expected tokens of a group's longest response; infinite for a prompt without a past."""
        (prompt,) = self._mix.take(position, 1)
        return self._longest.get((prompt.source, prompt.prompt_id), math.inf)
