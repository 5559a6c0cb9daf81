"""The hooks around SGLang's pause, with a scheduler that keeps the order of SGLang's event loop."""

from collections import deque
from types import SimpleNamespace

import pytest

from posttrain_weights.finished_batches import finish_first, skip_processed


class Scheduler:
    """Launches a batch, then reads the results of the one before; a pause holds it between two rounds."""

    def __init__(self):
        self.result_queue, self.last_batch, self.version = deque(), None, "1"
        self.tokens, self.is_paused = [], False

    def process_batch_result(self, batch, result):
        skip_processed(lambda _, *given: self.tokens.append((*given, self.version)), self, batch, result)

    def pause(self, mode):
        finish_first(lambda scheduler, request: setattr(scheduler, "is_paused", True), self, SimpleNamespace(mode=mode))

    def loop(self, batch):
        if batch:
            self.result_queue.append((batch, f"computed by {self.version}"))
        if self.last_batch:
            self.process_batch_result(*self.result_queue.popleft())
        self.last_batch = batch


def test_what_was_launched_before_a_pause_keeps_the_version_that_computed_it():
    scheduler = Scheduler()
    for batch in ("first", "second"):
        scheduler.loop(batch)
    scheduler.pause("in_place")
    scheduler.pause("in_place")
    assert scheduler.is_paused
    scheduler.version = "2"
    for batch in ("third", None):
        scheduler.loop(batch)
    versions = [("first", "1"), ("second", "1"), ("third", "2")]
    assert scheduler.tokens == [(batch, f"computed by {version}", version) for batch, version in versions]
    assert not scheduler.result_queue


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_mode_that_reads_the_results_itself_and_an_idle_engine_are_left_alone(mode):
    scheduler = Scheduler()
    if mode == "retract":
        scheduler.loop("first")
    before = list(scheduler.result_queue)
    scheduler.pause(mode)
    assert list(scheduler.result_queue) == before


def test_a_batch_that_was_read_has_no_requests():
    """SGLang takes the requests of the newest results for ones that may end with them, and leaves those out."""
    scheduler = Scheduler()
    scheduler.loop("first")
    scheduler.pause("in_place")
    ((batch, result),) = scheduler.result_queue
    assert list(batch.reqs) == []
    assert result == "computed by 1"
