"""Warns during training when a run learns nothing, and why; the report does afterwards (`report.verdict`)."""

from __future__ import annotations

import logging
from collections.abc import Mapping

log = logging.getLogger(__name__)

# One step without signal can be chance; this many in a row are not.
NUM_STEPS = 5
# What a step teaches nothing by -> its metric, which is 1 then, and what to do.
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
        """Return the note beside the progress bar, and log it the first time.

        Args:
            metrics: Of the step; empty on ranks that have none.
        """
        found = []
        for name, (metric, remedy) in EMPTY.items():
            self._in_a_row[name] = self._in_a_row[name] + 1 if metrics.get(metric, 0.0) >= 1 else 0
            if (count := self._in_a_row[name]) >= NUM_STEPS:
                found.append(f", {name} for {count} steps")
            if count == NUM_STEPS:
                log.warning("%s for %d steps: nothing is learned; %s", name.lower(), count, remedy)
        return "".join(found)
