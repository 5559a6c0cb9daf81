"""Ranks that are busy and get nowhere: what every hang looks like on GPUs, where waiting keeps a processor busy."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.forked_programs import ONE_THREAD, ForkedProgram

from posttrain.cluster import hang, ranks
from posttrain.cluster.hang import HangWatch, Position, describe_stacks
from posttrain.cluster.ranks import RankProcess
from posttrain.cluster.rendezvous import FILE_VARIABLE
from posttrain.report.rank_progress import PROGRESS_VARIABLE

LONG_ENOUGH = 120.0


@contextmanager
def training(folder: Path) -> Iterator[list[RankProcess]]:
    """Run two ranks of the product's own update, of which the second gets stuck."""
    shared = {**os.environ, "WORLD_SIZE": "2", FILE_VARIABLE: str(folder / "meeting"), **ONE_THREAD}
    started = []
    for rank in range(2):
        log, progress = folder / f"trainer{rank}.log", folder / str(rank)
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), PROGRESS_VARIABLE: str(progress)}
        process = ForkedProgram("tests.support.spinning_rank", (), shared | own, log=log)
        started.append(RankProcess(rank, process, log, progress))
    try:
        yield started
    finally:
        for rank in started:
            rank.process.kill()
            rank.process.communicate(timeout=30)


def test_a_rank_that_spins_in_its_first_step_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half an hour before the limit, and although one rank uses its processor all the time."""
    for module in (hang, ranks):
        monkeypatch.setattr(module, "SHORTEST_TIMEOUT_SECONDS", 4.0)
    watch, deadline, found = HangWatch(1800.0), time.monotonic() + LONG_ENOUGH, None
    with training(tmp_path) as both:
        while not found and time.monotonic() < deadline:
            time.sleep(0.25)
            told = {rank.rank: rank.position() for rank in both}
            found = watch.observe({rank: Position(**where) for rank, where in told.items() if where})
            assert all(rank.process.poll() is None for rank in both), (tmp_path / "trainer1.log").read_text()
        stacks = describe_stacks({rank.rank: rank.stack() for rank in both}, {0: "here", 1: "here"})
        assert not both[1].position()["is_idle"]
    assert found, "nobody has seen it"
    assert found.startswith("no rank has moved for ")
    assert "in phase train of step 1; rank 1 after 5 marks, others after up to " in found
    assert stacks.endswith("rank 1 on here is in none")
