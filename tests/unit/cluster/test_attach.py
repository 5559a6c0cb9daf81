"""Which jobs in the queue are a training."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from posttrain.cluster import attach
from posttrain.cluster.queue import QueuedJob
from posttrain.config.load import Resolved
from posttrain.store import Paths


@pytest.mark.parametrize(
    ("rule", "trains"), [("rule_train", True), ("rule_train_grpo", True), ("rule_evaluate", False)]
)
def test_a_job_that_version_0_2_queued_is_waited_for_too(
    resolved: Callable[..., Resolved], monkeypatch: pytest.MonkeyPatch, rule: str, trains: bool
) -> None:
    job = QueuedJob("17", "PENDING", "0:00", "1", "None", rule)
    monkeypatch.setattr(attach, "queued_jobs", lambda *_: [job])
    assert attach._who_trains(Paths(resolved("tiny"))) == ("job 17 (PENDING)" if trains else "")
