"""An engine that gives back its memory, and takes it again: over real HTTP."""

import asyncio

import pytest
from tests.unit.rl.engines.embedded.test_server import (
    checksums_of,
    engine,
    engine_and_client,
    plain_session,
    requests,
)

from posttrain.plan.sizing.phases import ENGINE_CACHE, ENGINE_WEIGHTS
from posttrain.rl.engines.buckets import make_buckets
from posttrain.rl.engines.client import EngineClient

SECRET = "of the attempt"


def test_memory_that_was_given_back_comes_with_an_update(checkpoint, tensors, new_tensors):
    """Storages are empty meanwhile, no request is taken, and there is one set of weights, not two, to be filled."""

    async def story():
        async with (
            engine(checkpoint) as (server, worker),
            EngineClient([str(server.make_url("/"))], SECRET, 30) as client,
        ):
            served = worker._model.state_dict()
            await client.generate(requests(), 0)
            await client.release_memory([ENGINE_WEIGHTS, ENGINE_CACHE])
            assert {tensor.untyped_storage().nbytes() for tensor in served.values()} == {0}
            with pytest.raises(RuntimeError, match="given back their weights"):
                await client.generate(requests(), 0)
            async with plain_session() as session:
                answer = await session.post(server.make_url("/generate"), json={"input_ids": [5]})
                assert (answer.status, "the engine sleeps" in await answer.text()) == (400, True)
            with pytest.raises(RuntimeError, match="resume_memory_occupation first"):
                await client.update_weights(7, make_buckets(new_tensors.items(), 1 << 20, True))
            await client.resume_memory([ENGINE_WEIGHTS])
            await client.update_weights(8, make_buckets(new_tensors.items(), 1 << 20, True))
            with pytest.raises(RuntimeError, match="engine_cache asleep"):
                await client.generate(requests(), 0)
            await client.resume_memory([ENGINE_CACHE])
            assert await client.checksums() == [checksums_of(new_tensors)]
            assert {answer.weight_version for answer in await client.generate(requests(), 0)} == {8}

    asyncio.run(story())


def test_an_engine_that_slept_generates_nothing_before_a_whole_update(checkpoint, new_tensors):
    async def story():
        async with engine(checkpoint) as (server, _), EngineClient([str(server.make_url("/"))], SECRET, 30) as client:
            await client.release_memory([ENGINE_WEIGHTS])
            await client.resume_memory([ENGINE_WEIGHTS])
            partial = dict(list(new_tensors.items())[1:])
            with pytest.raises(RuntimeError, match="tensors are missing"):
                await client.update_weights(1, make_buckets(partial.items(), 1 << 20, True))
            async with plain_session() as session:
                answer = await session.post(server.make_url("/generate"), json={"input_ids": [5]})
                assert (answer.status, "no weights yet" in await answer.text()) == (400, True)

    asyncio.run(story())


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("/resume_memory_occupation", {"tags": ["weights"]}, "awake already: weights"),
        ("/release_memory_occupation", {"tags": ["lunch"]}, "not lunch"),
    ],
)
def test_what_cannot_sleep_or_wake_is_refused(checkpoint, path, body, text):
    async def story():
        async with engine(checkpoint) as (server, _), plain_session() as session:
            answer = await session.post(server.make_url(path), json=body)
            assert (answer.status, text in await answer.text()) == (400, True)

    asyncio.run(story())


def test_a_busy_engine_gives_nothing_back_and_one_that_is_asked_waits_until_it_is_idle(checkpoint):
    async def story():
        async with engine_and_client(checkpoint) as (client, worker):
            running = asyncio.create_task(client.generate(requests(32, 60), 0))
            while not worker._running:
                await asyncio.sleep(0.001)
            with pytest.raises(RuntimeError, match="only while no request runs or waits"):
                await client.call_all("POST", "/release_memory_occupation", {"tags": ["kv_cache"]})
            with pytest.raises(RuntimeError, match="requests run or wait, also after 0 s"):
                await client.call_all("POST", "/flush_cache", {})
            await client.release_memory([ENGINE_CACHE])
            assert running.done() or len(await running) == 32

    asyncio.run(story())
