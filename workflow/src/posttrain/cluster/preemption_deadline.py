"""How long before its time limit a job must be told to save: long enough to finish a step and write a checkpoint.

During a step the checkpoint of the one before may be written. That of the last has no step to hide in.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from posttrain.config.schema import Config
from posttrain.plan.timing.duration import Bandwidths
from posttrain.plan.timing.step_time import step_with_save_seconds
from posttrain.rl.training.checkpoints import write_seconds

# Steps are not all alike, and the longest may be yet to come.
MEASURED_FACTOR = 1.5


@dataclass
class PreemptionDeadline:
    """The longest of what the site asks for, what the plan expects, and what a step and a save have taken so far.

    Args:
        config: The resolved configuration.
        checkpoints: The run's; earlier attempts have written some, too.
    """

    config: Config
    checkpoints: Path
    _step: int = -1
    _since: float = 0.0
    _longest_step: float = 0.0
    _longest_save: float = 0.0
    _planned: float = field(init=False)

    def __post_init__(self) -> None:
        self._planned = step_with_save_seconds(self.config, Bandwidths().shared_storage)

    def observe(self, step: int) -> None:
        """Take note of the step that is being trained now."""
        if step == self._step:
            return
        now = time.monotonic()
        if self._step >= 0:
            self._longest_step = max(self._longest_step, now - self._since)
        self._longest_save = max(self._longest_save, write_seconds(self.checkpoints))
        self._step, self._since = step, now

    @property
    def seconds(self) -> float:
        """Time that has to be left, seconds."""
        measured = MEASURED_FACTOR * (self._longest_step + self._longest_save)
        return max(self.config.site.slurm.signal_seconds, self._planned, measured)
