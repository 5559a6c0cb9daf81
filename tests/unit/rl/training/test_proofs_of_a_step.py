"""When engines prove their weights: before the first rollout where they got them from shards, and after each."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from posttrain.rl.megatron_backend import checkpoint
from posttrain.rl.training.phases import PhaseClock
from posttrain.rl.training.run import TrainingRun


def run_of(calls: list[str], finished: int, is_due_at_start: bool) -> SimpleNamespace:
    def note(word: str, result: object = None):
        return lambda *_: (calls.append(word), result)[1]

    publisher = SimpleNamespace(is_due_at_start=is_due_at_start, reverify=note("prove"))
    source = SimpleNamespace(wait_ready=note("ready"), collect=note("collect", "rollout"))
    state = SimpleNamespace(restore=note("restore", finished), remove_leftovers=note("tidy"))
    parts = {"publisher": publisher, "source": source, "state": state, "publish": note("publish")}
    return SimpleNamespace(**parts, evaluation=None, is_rank0=False, turns=None, clock=PhaseClock)


def test_a_rollout_is_given_only_when_engines_have_proven_their_weights_again() -> None:
    calls: list[str] = []
    assert TrainingRun.collect(run_of(calls, 0, True), 3) == "rollout"  # type: ignore[arg-type]
    assert calls == ["collect", "prove"]


@pytest.mark.parametrize(
    ("finished", "is_due", "publishes"), [(0, True, True), (0, False, False), (2, False, True), (2, True, True)]
)
def test_who_gets_weights_before_the_first_rollout(
    monkeypatch: pytest.MonkeyPatch, finished: int, is_due: bool, publishes: bool
) -> None:
    monkeypatch.setattr(checkpoint, "barrier", lambda: None)
    calls: list[str] = []
    assert TrainingRun.resume(run_of(calls, finished, is_due)) == finished  # type: ignore[arg-type]
    assert calls == ["restore", "ready", *(["publish"] if publishes else [])]
