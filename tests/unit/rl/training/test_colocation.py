"""Who is awake when trainer and engines take turns: every order of phases, up to six of them."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterable, Iterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tests.support.megatron_single import initialize_single_rank, test_config
from tests.support.tiny_checkpoint import TINY

from posttrain.plan.sizing.phases import (
    ENGINE_CACHE,
    ENGINE_WEIGHTS,
    EVERYTHING,
    LIKE_OTHERS,
    OPTIMIZER,
    PHASES,
    TRAINER,
)
from posttrain.rl.engines.client import EngineClient
from posttrain.rl.training.colocation import ENGINE, Colocation, SleepingEngines

NAMES = (*PHASES, *LIKE_OTHERS)
LONGEST = 6


class Watched:
    """A trainer and engines in one, of which each part must be asked for the other thing in turn.

    Args:
        awake: Its parts that are.
        own: All of its parts.
        log: Gets what is done.
    """

    def __init__(self, awake: Iterable[str], own: Iterable[str], log: list[tuple[str, frozenset[str]]]):
        self.awake, self._own, self._log = {*awake}, {*own}, log

    def sleep(self, parts: Iterable[str]) -> None:
        parts = {*parts} & self._own
        assert parts <= self.awake, f"asleep already: {parts - self.awake}"
        self.awake -= parts
        self._log.append(("sleep", frozenset(parts)))

    def wake(self, parts: Iterable[str]) -> None:
        parts = {*parts} & self._own
        assert not parts & self.awake, f"awake already: {parts & self.awake}"
        self.awake |= parts
        self._log.append(("wake", frozenset(parts)))


def made() -> tuple[Colocation, Watched, Watched, list[tuple[str, frozenset[str]]]]:
    log: list[tuple[str, frozenset[str]]] = []
    trainer, engines = Watched((TRAINER, OPTIMIZER), (TRAINER, OPTIMIZER), log), Watched((), ENGINE, log)
    return Colocation(trainer, engines, lambda: log.append(("wait", frozenset()))), trainer, engines, log


def needs(name: str) -> frozenset[str]:
    return PHASES[LIKE_OTHERS.get(name, name)].awake


def has_weights(before: Iterable[str], publishes: bool) -> bool:
    """Tell whether engines have got weights, and not given them back since, after a sequence of phases."""
    found = False
    for name in before:
        found = (found or (publishes and name == "weight_sync")) and ENGINE_WEIGHTS in needs(name)
    return found


@pytest.mark.parametrize("publishes", [True, False])
def test_of_every_sequence_each_legal_phase_runs_and_no_other_can_be_called(publishes: bool) -> None:
    """By itself: what may come next is derived here from the sequence alone, not from what `Colocation` remembers."""
    legal: list[tuple[str, ...]] = [()]
    for _ in range(LONGEST):
        legal = [(*sequence, name) for sequence in legal for name in _run(sequence, publishes)]
    assert len(legal) == (25563 if publishes else 5**LONGEST)
    for sequence in legal:
        _run(sequence, publishes)


def _run(sequence: tuple[str, ...], publishes: bool) -> set[str]:
    """Run a legal sequence, and return what may come next."""
    turns, trainer, engines, log = made()
    for name in sequence:
        turns.next[name]()
        if publishes and name == "weight_sync":
            turns.have_published()
    allowed = {name for name in NAMES if ENGINE_CACHE not in needs(name) or has_weights(sequence, publishes)}
    assert turns.next.keys() == allowed, sequence
    for name in {*NAMES} - allowed:
        with pytest.raises(RuntimeError, match="no weights"):
            turns.enter(name)
    if sequence:
        assert trainer.awake | engines.awake == turns.awake == needs(sequence[-1])
    _check_order(log)
    return allowed


def _check_order(log: list[tuple[str, frozenset[str]]]) -> None:
    """Nobody wakes up before all who have to sleep do, on all ranks; nothing is ever more than a GPU has room for."""
    awake, has_waited = {TRAINER, OPTIMIZER}, True
    for word, parts in log:
        if word == "wait":
            has_waited = True
        elif parts:
            awake = awake - parts if word == "sleep" else awake | parts
            assert word == "sleep" or has_waited, "somebody wakes up while others may still be awake"
            has_waited = word == "wake"
        assert not {ENGINE_CACHE, TRAINER} <= awake
        assert not {ENGINE_WEIGHTS, OPTIMIZER} <= awake


def test_the_same_phase_again_moves_nothing() -> None:
    turns, _, _, log = made()
    for name in NAMES:
        if name not in turns.next:
            continue
        turns.enter(name)
        assert turns.awake == needs(name)
        done = len([parts for word, parts in log if parts])
        turns.enter(name)
        assert len([parts for word, parts in log if parts]) == done, name


@pytest.fixture
def opened() -> Iterator[tuple[SleepingEngines, list[tuple[str, list[str]]]]]:
    """Engines on rank 0, and what they are asked for: path and parts."""
    initialize_single_rank(test_config(TINY))
    asked: list[tuple[str, list[str]]] = []

    async def handle(request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else {}
        if "occupation" in request.path or request.path.startswith("/health"):
            asked.append((request.path, sorted(body.get("tags", ()))))
        return web.json_response({"success": True})

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", handle)
    with asyncio.Runner() as runner:
        server = TestServer(application)
        runner.run(server.start_server())
        client = EngineClient([str(server.make_url(""))], "", 10)
        runner.run(client.__aenter__())
        yield SleepingEngines(client, runner, 10), asked
        runner.run(client.__aexit__(None, None, None))
        runner.run(server.close())


RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"
CACHE = ["cuda_graph", "kv_cache"]


def test_engines_give_back_everything_once_they_are_ready(opened, caplog: pytest.LogCaptureFixture) -> None:
    engines, asked = opened
    with caplog.at_level(logging.INFO):
        engines.start()
    assert asked[0][0].startswith("/health")
    assert asked[-1] == (RELEASE, [*CACHE, "weights"])
    assert "engines are ready, and sleep while the trainer loads" in caplog.text


def test_engines_are_asked_for_their_own_parts_alone(opened) -> None:
    engines, asked = opened
    for parts in ([TRAINER, ENGINE_CACHE], [TRAINER, OPTIMIZER], [ENGINE_WEIGHTS]):
        engines.sleep(parts)
        engines.wake(parts)
    assert asked == [(RELEASE, CACHE), (RESUME, CACHE), (RELEASE, ["weights"]), (RESUME, ["weights"])]


def test_ranks_without_a_client_wait_for_the_others() -> None:
    initialize_single_rank(test_config(TINY))
    with asyncio.Runner() as runner:
        engines = SleepingEngines(None, runner, 10)
        engines.start()
        engines.wake(ENGINE)


def test_weights_are_published_to_engines_that_are_awake() -> None:
    turns, *_ = made()
    with pytest.raises(AssertionError, match="only awake engines"):
        turns.have_published()


def test_the_table_has_every_part_awake_somewhere_and_asleep_somewhere() -> None:
    for part, name in itertools.product(EVERYTHING, ("awake", "asleep")):
        assert any((part in phase.awake) == (name == "awake") for phase in PHASES.values()), (part, name)
