"""Who hangs, from where ranks are and what their stacks say; a stopped rank of a real training is in tests/slurm."""

from __future__ import annotations

import asyncio
import faulthandler
import multiprocessing
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from posttrain.cluster import ranks
from posttrain.cluster.hang import HangWatch, Position, describe_stacks, waiting_in
from posttrain.cluster.processes import die_with_parent
from posttrain.report import rank_progress
from posttrain.report.rank_progress import (
    BEGIN_SAVE,
    PROGRESS_VARIABLE,
    ROLLOUT,
    SHARE_ROLLOUT,
    read_progress,
    report_progress,
)


def at(step: int, phase: str, seconds: float) -> Position:
    return Position(step, phase, seconds)


def test_ranks_that_move_do_not_hang() -> None:
    watch = HangWatch(100.0)
    assert watch.observe({}) is None
    assert watch.observe({0: at(0, "rollout", 5.0), 1: at(0, "rollout", 5000.0)}) is None, "engines have deadlines"
    assert watch.observe({0: at(0, "train", 99.0), 1: at(0, "old_logprobs", 300.0)}) is None


def test_a_rank_that_stays_behind_is_named() -> None:
    found = HangWatch(100.0).observe(
        {0: at(4, "train", 101.0), 1: at(4, "old_logprobs", 130.0), 2: at(4, "train", 102.0)}
    )
    assert (
        found
        == "rank 1 is still in phase old_logprobs of step 5, while others have been in phase train of step 5 for 101 s"
    )


def test_a_rank_that_does_not_take_the_rollout() -> None:
    found = HangWatch(100.0).observe({0: at(0, SHARE_ROLLOUT, 101.0), 1: at(0, "rollout", 900.0)})
    assert found is not None
    assert found.startswith("rank 1 is still in phase rollout of step 1")


def test_a_phase_that_nobody_leaves() -> None:
    found = HangWatch(100.0).observe({rank: at(2, "save", 101.0 + rank) for rank in range(3)})
    assert found == "no rank has left phase save of step 3 for 101 s"


def test_a_timeout_follows_what_a_phase_has_taken() -> None:
    """Ten times the longest, at least a minute and a half, at most the limit."""
    watch = HangWatch(1000.0)
    for step in range(2):
        watch.observe({0: at(step, "train", 12.0)})
        watch.observe({0: at(step, "weight_sync", 1.0)})
    assert watch.observe({0: at(2, "train", 119.0)}) is None
    assert watch.observe({0: at(2, "train", 121.0)})
    assert watch.observe({0: at(2, "weight_sync", 89.0)}) is None
    assert watch.observe({0: at(2, "weight_sync", 91.0)})


def test_a_checkpoint_may_be_waited_for_up_to_the_limit() -> None:
    """Those before were hidden by rollouts, the last one is not."""
    watch = HangWatch(1000.0)
    for step in range(2):
        watch.observe({0: at(step, "save", 0.1)})
        watch.observe({0: at(step, "old_logprobs", 1.0)})
    assert watch.observe({0: at(2, "save", 999.0)}) is None
    found = watch.observe({0: at(2, "save", 1001.0), 1: at(2, SHARE_ROLLOUT, 1002.0)})
    assert (
        found
        == "rank 1 is still in phase share_rollout of step 3, while others have been in phase save of step 3 for 1001 s"
    )


def test_storage_that_stands_still_twice_while_a_checkpoint_is_begun() -> None:
    watch = HangWatch(1000.0)
    for step in range(3):
        assert watch.observe({0: at(step, "weight_sync", 60.0)}) is None
        assert watch.observe({0: at(step, BEGIN_SAVE, 80.0)}) is None
    assert watch.observe({0: at(4, BEGIN_SAVE, 500.0)}) is None
    assert watch.observe({0: Position(4, BEGIN_SAVE, 95.0, is_idle=True)}), "a rank that stands still"


def test_a_phase_too_short_to_be_seen_is_known_after_a_step() -> None:
    watch = HangWatch(1000.0)
    watch.observe({0: at(0, "train", 1.0)})
    assert watch.observe({0: at(0, "weight_sync", 91.0)}) is None, "the first one may take long"
    watch.observe({0: at(1, "rollout", 1.0)})
    assert watch.observe({0: at(1, "old_logprobs", 89.0)}) is None
    assert watch.observe({0: at(1, "old_logprobs", 91.0)})


def test_nobody_computes_in_a_phase_that_was_never_seen() -> None:
    """A rank that waits for one that compiles is idle, too: only when all are it is a hang."""
    watch, idle, busy = HangWatch(1000.0), Position(0, "train", 95.0, is_idle=True), at(0, "train", 95.0)
    assert watch.observe({0: idle, 1: busy}) is None
    assert (
        watch.observe({0: Position(0, "rollout", 1.0, is_idle=True), 1: Position(0, "rollout", 95.0, is_idle=True)})
        is None
    )
    assert watch.observe({0: idle, 1: idle}) == "no rank has computed anything for 90 s, in phase train of step 1"


@pytest.mark.parametrize(("command", "is_idle"), [("sleep 60", True), ("while true; do true; done & wait", False)])
def test_an_idle_process_is_told_from_one_whose_child_computes(
    monkeypatch: pytest.MonkeyPatch, command: str, is_idle: bool
) -> None:
    monkeypatch.setattr(ranks, "SHORTEST_TIMEOUT_SECONDS", 1.0)
    monkeypatch.setattr(ranks, "CPU_LOOK_SECONDS", 0.1)
    process = subprocess.Popen(["bash", "-c", command], start_new_session=True)
    try:
        time.sleep(0.5)
        use = ranks.CpuUse(process.pid)
        use.sample()
        assert not use.is_idle, "it was not watched for long enough"
        for _ in range(12):
            time.sleep(0.1)
            use.sample()
        assert use.is_idle is is_idle
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def still(seconds: float, usual: float, phase: str = "train", marks: int = 3) -> Position:
    return Position(0, phase, 500.0, marks=marks, still=seconds, usual=usual)


def test_ranks_that_pass_no_marks() -> None:
    """In a step that nobody has made before: a rank that has once made the same way knows how long it may take."""
    watch = HangWatch(1000.0)
    assert watch.observe({0: still(80.0, 1.0), 1: still(80.0, 1.0)}) is None, "a minute and a half in any case"
    assert watch.observe({0: still(110.0, 12.0), 1: still(110.0, 1.0)}) is None, "ten times the longest"
    assert watch.observe({0: still(300.0, -1.0), 1: still(300.0, 1.0)}) is None, "the first may be compiling"
    assert watch.observe({0: still(2.0, 1.0), 1: still(300.0, 1.0)}) is None, "it waits for one that moves"
    assert watch.observe({rank: still(300.0, 1.0, phase="save") for rank in range(2)}) is None
    found = watch.observe({0: still(125.0, 12.0, marks=4), 1: still(121.0, 1.0)})
    assert found == (
        "no rank has moved for 121 s, in phase train of step 1; rank 1 after 3 marks, others after up to 4"
    )


def test_a_rank_knows_how_long_its_ways_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, clock = tmp_path / "rank", iter([0.0, 1.0, 4.0, 6.0, 10.0, 11.0])
    monkeypatch.setattr(rank_progress, "_TRACKER", rank_progress._ProgressTracker())
    monkeypatch.setattr(rank_progress.time, "monotonic", lambda: next(clock))
    monkeypatch.setenv(PROGRESS_VARIABLE, str(path))
    rank_progress.report_mark("forward")
    assert read_progress(path) is None, "it is in no phase yet"
    told = []
    for _ in range(2):
        report_progress(7, "train")
        rank_progress.report_mark("forward")
        rank_progress.report_mark("backward")
        progress = read_progress(path)
        assert progress is not None
        told.append((progress.mark, progress.marks, progress.since, progress.moved, progress.usual))
    # The first way from "backward" on took from 4 to 6.
    assert told == [("backward", 2, 0.0, 4.0, -1.0), ("backward", 2, 6.0, 11.0, 2.0)]


def test_a_rank_that_falls_silent_in_a_rollout() -> None:
    found = HangWatch(1000.0).observe({0: at(0, "rollout", 91.0), 1: at(0, "rollout", 93.0)})
    assert found == "no rank has left phase rollout of step 1 for 91 s"


def test_a_waiting_process_says_that_it_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rank"
    monkeypatch.setenv(PROGRESS_VARIABLE, str(path))
    monkeypatch.setattr(rank_progress, "BEAT_SECONDS", 0.01)

    async def wait() -> list[float]:
        alive, seen = asyncio.create_task(rank_progress.keep_reporting(3, ROLLOUT)), []
        for _ in range(3):
            await asyncio.sleep(0.05)
            progress = read_progress(path)
            assert progress is not None
            assert (progress.step, progress.phase) == (3, ROLLOUT)
            seen.append(progress.since)
        alive.cancel()
        return seen

    first, second, third = asyncio.run(wait())
    assert first < second < third


def test_stacks_name_the_collective_and_who_is_missing() -> None:
    waiting = stack_of_a_wait()
    assert waiting_in(waiting) == "barrier"
    exchange = (
        'File "/p2p_communication.py", line 3 in _communicate\n  File "/p2p_communication.py", line 9 in send_forward'
    )
    assert waiting_in(exchange) == "send_forward"
    assert waiting_in('File "/model.py", line 3 in forward') is None
    said = describe_stacks({0: waiting, 1: None, 2: waiting, 3: "in forward"}, {0: "a", 1: "a", 2: "b", 3: "b"})
    assert said == "ranks 0, 2 in barrier; rank 1 on a does not answer; rank 3 on b is in none"


def test_progress_is_read_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rank"
    assert read_progress(path) is None
    monkeypatch.setenv(PROGRESS_VARIABLE, str(path))
    report_progress(11, "old_logprobs")
    began = time.monotonic()
    report_progress(12, "train")
    progress = read_progress(path)
    assert progress is not None
    assert (progress.step, progress.phase) == (12, "train")
    assert began - 0.001 <= progress.since <= time.monotonic() + 0.001, "it is written in milliseconds"


def stack_of_a_wait() -> str:
    """Return what faulthandler writes of a process that waits in a barrier for one that never comes."""
    with tempfile.NamedTemporaryFile("r") as file:
        process = multiprocessing.get_context("spawn").Process(target=_wait_in_vain, args=(file.name,))
        process.start()
        deadline = time.monotonic() + 60
        while "barrier" not in (text := Path(file.name).read_text()) and time.monotonic() < deadline:
            time.sleep(0.2)
        process.kill()
        process.join()
    return text


def _wait_in_vain(path: str) -> None:
    import torch.distributed as dist

    store, parent = dist.FileStore(f"{path}.store", 2), os.getpid()
    if os.fork() == 0:
        die_with_parent(parent)
        dist.init_process_group("gloo", store=store, rank=1, world_size=2)
        time.sleep(60)
    dist.init_process_group("gloo", store=store, rank=0, world_size=2)
    faulthandler.dump_traceback_later(2.0, file=open(path, "w"), repeat=True)  # noqa: SIM115
    dist.barrier()
