"""When engines prove their weights: before the first rollout where they got them from shards, and after each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from posttrain.rl.megatron_backend import checkpoint
from posttrain.rl.training.phases import PhaseClock
from posttrain.rl.training.run import TrainingRun


def run_of(calls: list[str], finished: int, is_due_at_start: bool, max_staleness: int = 0) -> SimpleNamespace:
    def note(word: str, result: object = None):
        return lambda *_: (calls.append(word), result)[1]

    publisher = SimpleNamespace(is_due_at_start=is_due_at_start, reverify=note("prove"))
    source = SimpleNamespace(wait_ready=note("ready"), begin=note("begin"), collect=note("collect", "rollout"))
    state = SimpleNamespace(restore=note("restore", finished), remove_leftovers=note("tidy"))
    parts = {"publisher": publisher, "source": source, "state": state, "publish": note("publish")}
    rollout = SimpleNamespace(max_staleness=max_staleness)
    engine, hardware = SimpleNamespace(sleep="never", own_nodes=0), SimpleNamespace(device="cpu")
    training = SimpleNamespace(objective="rl")
    config = SimpleNamespace(rollout=rollout, training=training, engine=engine, hardware=hardware)
    return SimpleNamespace(**parts, config=config, evaluation=None, is_rank0=False, turns=None, clock=PhaseClock,
                           _pause_seconds=0.0)  # fmt: skip


@pytest.mark.parametrize(("max_staleness", "proofs"), [(0, ["prove"]), (1, [])])
def test_a_rollout_is_given_only_when_engines_have_proven_their_weights_again(
    max_staleness: int, proofs: list[str]
) -> None:
    """Engines that run ahead prove them when they get the next ones: a rollout has tokens of several versions."""
    calls: list[str] = []
    assert TrainingRun.collect(run_of(calls, 0, True, max_staleness), 3) == "rollout"  # type: ignore[arg-type]
    assert calls == ["collect", *proofs]


@pytest.mark.parametrize(
    ("requests_run", "has_new_engine", "steps"),
    [
        (False, False, ["pause", "send", "go on"]),
        (True, False, ["pause", "prove", "send", "go on"]),
        (True, True, ["pause", "send", "go on"]),
    ],
)
def test_weights_are_proven_before_running_requests_get_new_ones(
    requests_run: bool, has_new_engine: bool, steps: list[str]
) -> None:
    """An engine that was replaced does not hold them, so there is nothing to prove."""
    calls: list[str] = []
    run = run_of(calls, 0, True, 1)

    @contextmanager
    def publishing(version: int) -> Iterator[bool]:
        calls.append("pause")
        yield requests_run
        calls.append("go on")

    run.source.publishing = publishing
    run.publisher.publish = lambda version: calls.append("send")
    TrainingRun.publish(run, 3, has_new_engine)  # type: ignore[arg-type]
    assert calls == steps


@pytest.mark.parametrize(
    ("finished", "is_due", "publishes"), [(0, True, True), (0, False, False), (2, False, True), (2, True, True)]
)
def test_who_gets_weights_before_the_first_rollout(
    monkeypatch: pytest.MonkeyPatch, finished: int, is_due: bool, publishes: bool
) -> None:
    monkeypatch.setattr(checkpoint, "barrier", lambda: None)
    calls: list[str] = []
    assert TrainingRun.resume(run_of(calls, finished, is_due)) == finished  # type: ignore[arg-type]
    assert calls == ["restore", "ready", *(["publish"] if publishes else []), "begin"]
