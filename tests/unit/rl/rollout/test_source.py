"""Where each rank gets the samples of a step from, also when engines fail."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tests.support.rejections import rejected

from posttrain.report.rank_progress import PROGRESS_VARIABLE, RankProgress, read_progress, take_unresponsive_engine
from posttrain.rl.engines.calls import EngineError
from posttrain.rl.engines.client import EngineClient
from posttrain.rl.rollout.rollout_store import RolloutStore
from posttrain.rl.rollout.source import SharedSource, StoredSource
from posttrain.types import Prompt, RolloutResult, Trajectory, TrajectoryGroup

GROUPS = [
    TrajectoryGroup(
        Prompt(number, ({"role": "user", "content": "?"},), "7"),
        (Trajectory.of_response((5, 9), (7,), (-0.1,), 7, prompt_id=number, reward=1.0),),
    )
    for number in range(3)
]
ROLLOUT = RolloutResult(GROUPS, num_replayed=2)


class Maker:
    """Makes a rollout, after so many failures."""

    def __init__(self, num_failures: int = 0, seconds: float = 0.0):
        self.num_failures, self.seconds, self.asked = num_failures, seconds, []

    async def collect(self, step: int) -> RolloutResult:
        self.asked.append(step)
        await asyncio.sleep(self.seconds)
        if len(self.asked) <= self.num_failures:
            raise EngineError(f"engine {len(self.asked)} is gone")
        return ROLLOUT


def collect(
    maker: Maker | None, share: Callable[[Any], Any] | None = None, step: int = 7
) -> tuple[RolloutResult | str, list[str]]:
    """Return what a rank gets, or why it gets nothing, and what it was to recover from."""
    recovered: list[str] = []
    with asyncio.Runner() as runner:
        try:
            found = SharedSource(runner, share, 5.0, None, maker).collect(step, recovered.append)
        except EngineError as error:
            return str(error), recovered
    return found, recovered


def test_a_rollout_is_made_once() -> None:
    maker = Maker()
    found, recovered = collect(maker)
    assert found is ROLLOUT
    assert (maker.asked, recovered) == ([7], [])


def test_no_rollout_is_formatted_to_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of GLM-5 has sixteen million tokens. Raising would not do: `reprlib` swallows errors."""
    formatted = []
    monkeypatch.setattr(RolloutResult, "__repr__", lambda rollout: formatted.append("once") or "")
    found, _ = collect(Maker())
    assert (found is ROLLOUT, formatted) == (True, [])


def test_engines_are_brought_back_three_times_in_a_step_and_no_more() -> None:
    assert collect(Maker(3)) == (ROLLOUT, ["engine 1 is gone", "engine 2 is gone", "engine 3 is gone"])
    failure, recovered = collect(Maker(4))
    assert failure == "engine 4 is gone; engines failed 4 times in step 8"
    assert len(recovered) == 3


class Ranks:
    """Ranks in threads: what rank 0 shares reaches the others as JSON."""

    def __init__(self, num_ranks: int):
        self._barrier, self._sent = threading.Barrier(num_ranks, timeout=20), ""

    def share_of(self, rank: int) -> Callable[[Any], Any]:
        def share(content: Any) -> Any:
            if rank == 0:
                self._sent = json.dumps(content)
            self._barrier.wait()
            received = json.loads(self._sent)
            self._barrier.wait()
            return received

        return share


@pytest.mark.parametrize("num_failures", [0, 2, 4])
def test_all_ranks_get_the_same_and_recover_together(num_failures: int) -> None:
    ranks, maker = Ranks(2), Maker(num_failures)
    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(collect, maker if rank == 0 else None, ranks.share_of(rank)) for rank in range(2)]
        (first, told_first), (second, told_second) = (call.result() for call in calls)
    assert first == second
    assert told_first == told_second == [f"engine {number + 1} is gone" for number in range(min(num_failures, 3))]
    assert (first == ROLLOUT) is (num_failures < 4)


@pytest.fixture
def progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(PROGRESS_VARIABLE, str(tmp_path / "progress"))
    monkeypatch.setattr("posttrain.report.rank_progress.BEAT_SECONDS", 0.05)
    return tmp_path / "progress"


def place(progress: Path) -> RankProgress:
    found = read_progress(progress)
    assert found
    return found


def test_a_rank_says_that_it_lives_while_engines_work_and_then_where_it_is(progress: Path) -> None:
    seen: list[RankProgress] = []

    class Watched(Maker):
        async def collect(self, step: int) -> RolloutResult:
            for _ in range(2):
                await asyncio.sleep(0.3)
                seen.append(place(progress))
            return await super().collect(step)

    collect(Watched())
    assert [(here.step, here.phase) for here in seen] == [(7, "rollout")] * 2
    assert seen[0].since < seen[1].since
    assert (place(progress).step, place(progress).phase) == (7, "share_rollout")
    collect(Maker(4), step=9)
    assert (place(progress).step, place(progress).phase) == (9, "rollout"), "there is none to share"


def test_a_rank_without_a_maker_says_nothing_of_a_rollout(progress: Path) -> None:
    content = {"groups": [], "num_replayed": 0}
    assert collect(None, lambda sent: [content, ""]) == (RolloutResult([], 0), [])
    assert read_progress(progress) is None


async def start_engine(health: Callable) -> TestServer:
    application = web.Application()
    application.router.add_get("/health", health)
    server = TestServer(application)
    await server.start_server()
    return server


def wait_ready(health: Callable, step: int | None, seconds: float = 10.0) -> str:
    """Wait for an engine as the trainer does; return its address."""
    with asyncio.Runner() as runner:
        server = runner.run(start_engine(health))
        url = str(server.make_url(""))
        client = EngineClient([url], "", 5.0)
        runner.run(client.__aenter__())
        try:
            SharedSource(runner, None, seconds, client, Maker()).wait_ready(step)
        finally:
            runner.run(client.__aexit__(None, None, None))
            runner.run(server.close())
        return url


def answers(*waits: float) -> Callable:
    """Return an engine's health: it answers after each of these seconds, then at once."""
    left = [*waits]

    async def health(request: web.Request) -> web.Response:
        await asyncio.sleep(left.pop(0) if left else 0)
        return web.Response()

    return health


def test_engines_are_waited_for_before_the_first_step(progress: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    wait_ready(answers(0.3), None)
    assert "the trainer has its weights; engines were ready 0." in caplog.text
    assert read_progress(progress) is None

    async def ill(request: web.Request) -> web.Response:
        return web.Response(status=503)

    with pytest.raises(RuntimeError, match=r"is not ready after 0\.3 s"):
        wait_ready(ill, None, seconds=0.3)


def test_within_a_step_the_rank_says_that_it_lives_and_which_engine_is_silent(
    progress: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttrain.rl.engines.calls.SILENCE_SECONDS", 0.4)
    monkeypatch.setattr("posttrain.rl.engines.calls.PROBE_TIMEOUT_SECONDS", 0.2)
    wait_ready(answers(9, 9, 9, 9), None)
    assert take_unresponsive_engine(progress) == "", "engines that load may take their time"
    url = wait_ready(answers(9, 9, 9, 9), 3)
    assert take_unresponsive_engine(progress) == url.rstrip("/")
    assert (place(progress).step, place(progress).phase) == (3, "rollout")


def test_where_no_engines_are_nobody_is_waited_for() -> None:
    with asyncio.Runner() as runner:
        SharedSource(runner, None, 0.0, None, Maker()).wait_ready(3)


def test_stored_rollouts_are_read_by_every_rank_and_nothing_is_made(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    store.write(4, 0, GROUPS)
    source = StoredSource(store, 3)
    source.wait_ready(4)
    assert source.collect(4, pytest.fail) == RolloutResult(GROUPS, num_replayed=3)
    with rejected("rollout-incomplete", "0 of 3 groups"):
        source.collect(5, pytest.fail)
