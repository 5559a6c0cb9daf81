"""How long before its time limit a job must start to save: time for one step and one checkpoint.

A checkpoint is written during the next step; nothing overlaps the write of the last one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from posttrain.config.schema import Config
from posttrain.plan.timing.duration import Bandwidths
from posttrain.plan.timing.step_time import step_with_save_seconds
from posttrain.rl.training.checkpoints import write_seconds

# Step times vary, and the longest step may be yet to come.
MEASURED_FACTOR = 1.5


@dataclass
class PreemptionDeadline:
    """The maximum of the site's `signal_seconds`, the planned time, and the measured time of a step and a save.

    Args:
        config: The resolved configuration.
        checkpoints: The run's checkpoint folder, which may have checkpoints of earlier attempts.
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
        """Measure step and save times; `step` is the step in training now."""
        if step == self._step:
            return
        now = time.monotonic()
        if self._step >= 0:
            self._longest_step = max(self._longest_step, now - self._since)
        self._longest_save = max(self._longest_save, write_seconds(self.checkpoints))
        self._step, self._since = step, now

    @property
    def seconds(self) -> float:
        """Time that must remain before the limit, in seconds."""
        measured = MEASURED_FACTOR * (self._longest_step + self._longest_save)
        return max(self.config.site.slurm.signal_seconds, self._planned, measured)
