"""Requests to engines that prefill and engines that decode: scripted ones on loopback, which take note."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from posttrain.rl.engines.client import EngineClient
from posttrain.rl.engines.responses import GenerateRequest

REQUESTS = [GenerateRequest([5 + place], place, 4) for place in range(3)]
BOOTSTRAP_PORT = 8998


class Engine:
    """Answers as SGLang would; one that decodes only when all of its rooms have been entered by one that prefills."""

    def __init__(self, rooms: dict[int, asyncio.Event], is_prefill: bool, version: str = "3", fails: bool = False):
        self.rooms, self.is_prefill, self.version, self.fails = rooms, is_prefill, version, fails
        self.asked: list[dict[str, Any]] = []
        self.was_left = False

    async def handle(self, request: web.Request) -> web.Response:
        if request.path == "/get_server_info":
            return web.json_response({"disaggregation_bootstrap_port": BOOTSTRAP_PORT if self.is_prefill else None})
        body = await request.json()
        self.asked.append(body)
        if self.fails:
            return web.Response(status=500, text="no memory")
        try:
            for room in body["bootstrap_room"]:
                self.rooms[room].set() if self.is_prefill else await self.rooms[room].wait()
        except asyncio.CancelledError:
            self.was_left = True
            raise
        meta = {"finish_reason": {"type": "length"}, "weight_version": self.version}
        token = 7 if self.is_prefill else 3
        answer = {"output_ids": [token], "meta_info": {**meta, "output_token_logprobs": [[-0.5, token, None]]}}
        return web.json_response([answer] * len(body["input_ids"]))


@asynccontextmanager
async def client_of(*engines: Engine, num_prefill: int) -> AsyncIterator[EngineClient]:
    servers = []
    for engine in engines:
        application = web.Application(client_max_size=0)
        application.router.add_route("*", "/{path:.*}", engine.handle)
        servers.append(TestServer(application, handler_cancellation=True))
        await servers[-1].start_server()
    urls = [str(server.make_url("")) for server in servers]
    async with EngineClient(urls, "secret", 5.0, num_prefill=num_prefill) as client:
        yield client
    for server in servers:
        await server.close()


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 30))


def test_both_engines_of_a_request_follow_from_its_number_and_meet_in_rooms_of_its_own() -> None:
    async def story() -> None:
        rooms: dict[int, asyncio.Event] = defaultdict(asyncio.Event)
        decoding, prefilling = [Engine(rooms, False) for _ in range(2)], [Engine(rooms, True) for _ in range(3)]
        async with client_of(*decoding, *prefilling, num_prefill=3) as client:
            answers = await asyncio.gather(*(client.generate(REQUESTS, number) for number in range(12)))
        assert {answer.output_ids for group in answers for answer in group} == {(3,)}, "who decodes answers"
        assert [len(engine.asked) for engine in (*decoding, *prefilling)] == [6, 6, 4, 4, 4]
        used = [room for engine in prefilling for body in engine.asked for room in body["bootstrap_room"]]
        assert len({*used}) == len(used) == 36, "nobody else is in a room"
        assert all(0 <= room < 2**63 for room in used)
        for engine in (*decoding, *prefilling):
            for body in engine.asked:
                assert (body["bootstrap_host"], body["bootstrap_port"]) == ("127.0.0.1", BOOTSTRAP_PORT)
                assert len(body["bootstrap_room"]) == len(body["input_ids"])

    run(story())


def test_one_that_fails_lets_the_other_go() -> None:
    async def story() -> None:
        rooms: dict[int, asyncio.Event] = defaultdict(asyncio.Event)
        decoding, prefilling = Engine(rooms, False), Engine(rooms, True, fails=True)
        async with client_of(decoding, prefilling, num_prefill=1) as client:
            with pytest.raises(RuntimeError, match=r"engine 1 .*no memory"):
                await client.generate(REQUESTS, 0)
            while not decoding.was_left:
                await asyncio.sleep(0.01)
            assert len(prefilling.asked) == 1, "a room is entered once"

    run(story())


def test_both_have_the_same_weights_or_nothing_is_answered() -> None:
    async def story() -> None:
        rooms: dict[int, asyncio.Event] = defaultdict(asyncio.Event)
        async with client_of(Engine(rooms, False, "4"), Engine(rooms, True, "3"), num_prefill=1) as client:
            with pytest.raises(RuntimeError, match=r"prefilled with weights {'3'}, .* decoded with {'4'}"):
                await client.generate(REQUESTS, 0)

    run(story())


def test_rooms_of_two_clients_differ() -> None:
    async def story() -> None:
        used = []
        for _ in range(2):
            rooms: dict[int, asyncio.Event] = defaultdict(asyncio.Event)
            prefilling = Engine(rooms, True)
            async with client_of(Engine(rooms, False), prefilling, num_prefill=1) as client:
                await client.generate(REQUESTS, 0)
            used += [room for body in prefilling.asked for room in body["bootstrap_room"]]
        assert len({*used}) == 6

    run(story())
