"""Warns during training when a run has no learning signal, and why; `report.verdict` does so afterwards."""

from __future__ import annotations

import logging
from collections.abc import Mapping

log = logging.getLogger(__name__)

# One step without signal can be chance; this many in a row cannot.
NUM_STEPS = 5
# Reason for missing signal -> the metric that is then 1, and the remedy.
EMPTY = {
    "ALL REWARDS EQUAL": (
        "rollout/reward_std_zero_fraction",
        "`posttrain check-data` tells whether the labels can be graded; else take easier or harder prompts",
    ),
    "ALL ANSWERS CUT": (
        "rollout/truncated_fraction",
        "raise rollout.max_response_tokens, or see whether the model ends its answers (`posttrain check-data`)",
    ),
}


class NoSignalMonitor:
    """Counts consecutive steps without signal."""

    def __init__(self) -> None:
        self._in_a_row = dict.fromkeys(EMPTY, 0)

    def note(self, metrics: Mapping[str, float]) -> str:
        """Return the note for the progress bar, and log it the first time.

        Args:
            metrics: The step's; empty on ranks that have none.
        """
        found = []
        for name, (metric, remedy) in EMPTY.items():
            self._in_a_row[name] = self._in_a_row[name] + 1 if metrics.get(metric, 0.0) >= 1 else 0
            if (count := self._in_a_row[name]) >= NUM_STEPS:
                found.append(f", {name} for {count} steps")
            if count == NUM_STEPS:
                log.warning("%s for %d steps: nothing is learned; %s", name.lower(), count, remedy)
        return "".join(found)
