"""The coordinator with ten thousand open requests: what it costs in CPU time and memory."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from pathlib import Path

import psutil
import pytest
from tests.support.scripted_engines import CONFIG, DIGIT, SETTINGS

from posttrain.plan.resolve import resolve
from posttrain.rl.data.chat import ChatTokenizer
from posttrain.rl.engines.responses import GenerateRequest, GenerateResult
from posttrain.rl.reward.graders import GraderPool
from posttrain.rl.rollout.generator import TrajectoryGenerator
from posttrain.rl.rollout.queue_store import QueueStore
from posttrain.types import Prompt, TrajectoryGroup, VersionSpan

NUM_STEPS, NUM_OPEN, GROUP_SIZE, MAX_STALENESS = 5, 10_000, 8, 4
NUM_GROUPS = NUM_OPEN // GROUP_SIZE // NUM_STEPS
MOST = {
    "rollout.rollout_batch_size": NUM_GROUPS,
    "rollout.num_samples_per_prompt": GROUP_SIZE,
    "rollout.max_staleness": MAX_STALENESS,
    "training.global_batch_size": NUM_GROUPS * GROUP_SIZE,
    "training.num_steps": NUM_STEPS,
    "engine.max_running_requests": NUM_OPEN,
}


class OpenRequests:
    """Client of engines that answer nothing until `NUM_OPEN` requests are open, and then one after the other."""

    def __init__(self) -> None:
        self.open: list[asyncio.Future[None]] = []
        self.are_all_open, self.can_sample = asyncio.Event(), True

    async def sample(self, request: GenerateRequest, engine: int | None = None) -> GenerateResult:
        self.open.append(asyncio.get_running_loop().create_future())
        if len(self.open) == NUM_OPEN:
            self.are_all_open.set()
        await self.open[-1]
        return GenerateResult((DIGIT,) * 6, (-0.5,) * 6, "length", 0, versions=(VersionSpan(0, 6),), engine=0)

    async def answer_all(self) -> None:
        random.Random(0).shuffle(self.open)
        for number, future in enumerate(self.open):
            future.set_result(None)
            if number % 10 == 0:
                await asyncio.sleep(0)

    async def resume(self) -> None:
        """Nothing is paused."""


async def train(generator: TrajectoryGenerator, client: OpenRequests) -> tuple[float, int]:
    """Train on everything; returns CPU seconds, and the bytes that the process needs more with all requests open."""
    bytes_before, began = resident(), time.process_time()
    await generator.begin(0)
    await client.are_all_open.wait()
    more = resident() - bytes_before
    answering = asyncio.create_task(client.answer_all())
    for step in range(NUM_STEPS):
        assert len((await generator.collect(step)).groups) == NUM_GROUPS
        await generator.resume(step + 1)
    await answering
    return time.process_time() - began, more


def num_kept() -> int:
    """Return how many groups and responses are in memory."""
    gc.collect()
    return sum(isinstance(one, (TrajectoryGroup, GenerateRequest, GenerateResult)) for one in gc.get_objects())


def resident() -> int:
    return psutil.Process().memory_info().rss


@pytest.mark.timeout(300)
def test_ten_thousand_trajectories_in_flight(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    """Less than 1 ms of CPU time each, with grading and files; some kilobytes each, and none after their training."""
    words = " ".join(f"{key}={value}" for key, value in (SETTINGS | MOST).items())
    config = resolve({"model": "tiny", "site": "local", "set": words}, CONFIG).config
    prompts = [Prompt(number, ({"role": "user", "content": f"{number:04d}"},), "7") for number in range(512)]
    kept_before = num_kept()  # other files of tests make some
    client, store = OpenRequests(), QueueStore(tmp_path / "rollouts")
    with GraderPool.of(config) as graders:
        generator = TrajectoryGenerator(config, prompts, tokenizer, client, store, graders)
        seconds, more = asyncio.run(train(generator, client))
    print(f"{seconds / NUM_OPEN * 1e3:.2f} ms, {more / NUM_OPEN / 1e3:.1f} kB each")
    assert seconds / NUM_OPEN < 1e-3
    assert more / NUM_OPEN < 20e3
    assert num_kept() <= kept_before
