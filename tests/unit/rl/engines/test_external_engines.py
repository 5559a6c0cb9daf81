"""Engines that somebody else runs: real ones that end and come back; scripted ones of versions that are not here."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tests.support.engines_of_others import SECRET, engines_of_others
from tests.support.evaluation_inputs import make_inputs

from posttrain.rl.engines import external_engines as shared_module
from posttrain.rl.engines.calls import EngineError
from posttrain.rl.engines.external_engines import MOST_MISSES, ExternalEngines
from posttrain.rl.engines.responses import GenerateRequest
from posttrain.store.resolved_file import read_resolved

REQUESTS = [GenerateRequest([5 + place], place, 4) for place in range(3)]


async def until(condition: Callable[[], object], seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.05)


# Over ten seconds: real engines start three times.
def test_an_engine_that_does_not_answer_is_left_out_and_gets_requests_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All have other weights at first, as one has that comes back; no answer comes from these, and none fails."""
    arguments = make_inputs(tmp_path, "engine.num_threads=1")
    config = read_resolved(Path(str(arguments[1]))).config

    async def story(engines: Any) -> None:
        urls = [engine.url for engine in engines]
        async with ExternalEngines(urls, SECRET, 60, tmp_path / "hf") as client:
            await client.wait_ready(120)
            expected = await client.generate(REQUESTS, 0)
            assert await client.generate(REQUESTS, 1) == expected
            assert {result.weight_version for result in expected} == {client.weights}
            engines[0].stop()
            answers = await asyncio.gather(*(client.generate(REQUESTS, number) for number in range(4)))
            assert all(answer == expected for answer in answers)
            await until(lambda: "gets no more requests" in caplog.text)
            engines[0].start()
            await until(lambda: f"engine 0 ({urls[0]}) gets requests again" in caplog.text)
            before = await client.server_info()
            assert await client.generate(REQUESTS, 0) == expected
            after = await client.server_info()
            assert answered(after[0]) == answered(before[0]) + len(REQUESTS)
            assert answered(after[1]) == answered(before[1])

    with engines_of_others(config, tmp_path, count=2) as engines:
        asyncio.run(story(engines))


def answered(info: dict[str, Any]) -> int:
    return int(info["num_responses"])


class Stranger:
    """An engine that says what it is told to say."""

    def __init__(self, model: Path, **about: Any):
        self.about = {"version": shared_module.VERSION, **about}
        self.model = {"model_path": str(model), "weight_version": "default"}
        self.is_open, self.is_silent, self.is_stuck = False, False, False
        self.asked: list[str] = []

    async def handle(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        if self.is_silent:
            return web.Response(status=503)
        if not self.is_open and request.headers.get("Authorization") != f"Bearer {SECRET}":
            return web.Response(status=401)
        if request.path == "/generate":
            if self.is_stuck:
                await asyncio.sleep(60)
            meta = {"finish_reason": {"type": "length"}, "weight_version": self.model["weight_version"]}
            meta["output_token_logprobs"] = [[-0.5, 3, None]]
            return web.json_response([{"output_ids": [3], "meta_info": meta}] * len(REQUESTS))
        answers = {"/get_server_info": self.about, "/get_model_info": self.model}
        if request.path == "/update_weights_from_disk":
            self.model["weight_version"] = (await request.json())["weight_version"]
        return web.json_response(answers.get(request.path, {"success": True}))


@asynccontextmanager
async def served(engine: Stranger, checkpoint: Path):
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", engine.handle)
    server = TestServer(application)
    await server.start_server()
    async with ExternalEngines([str(server.make_url(""))], SECRET, 30, checkpoint) as client:
        yield client
    await server.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    make_inputs(folder, "engine.num_threads=1")
    return folder


@pytest.mark.parametrize(
    ("about", "config", "said"),
    [
        ({"version": "0.5.24"}, {}, "it is SGLang 0.5.24, and 0.5.23 is what is tested"),
        ({"disaggregation_mode": "decode"}, {}, "it only does decode"),
        ({}, {"num_hidden_layers": 4, "transformers_version": "1"}, "differs in num_hidden_layers$"),
        ({}, {"quantization_config": {"quant_method": "fp8"}}, "differs in quantization_config$"),
        ({}, None, "its model cannot be compared"),
    ],
)
def test_what_cannot_serve_the_checkpoint_is_refused(
    folder: Path, tmp_path: Path, about: dict[str, Any], config: dict[str, Any] | None, said: str
) -> None:
    if config is not None:
        own = json.loads((folder / "hf" / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(own | config))
    engine = Stranger(tmp_path, **about)

    async def story() -> None:
        async with served(engine, folder / "hf") as client:
            with pytest.raises(EngineError, match=said):
                await client.wait_ready(5)

    asyncio.run(story())
    assert "/update_weights_from_disk" not in engine.asked


def test_an_engine_that_obeys_anybody_is_refused(folder: Path) -> None:
    engine = Stranger(folder / "hf")
    engine.is_open = True

    async def story() -> None:
        async with served(engine, folder / "hf") as client:
            with pytest.raises(EngineError, match="answers whoever asks"):
                await client.wait_ready(5)

    asyncio.run(story())
    assert "/update_weights_from_disk" not in engine.asked


def test_two_misses_are_none(folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Weights are loaded once; an engine that is busy for two looks keeps its requests, after a third it has none."""
    monkeypatch.setattr(shared_module, "LOOK_SECONDS", 0.05)
    engine = Stranger(folder / "hf")

    async def story() -> None:
        async with served(engine, folder / "hf") as client:
            await client.wait_ready(5)
            for misses in (MOST_MISSES - 1, MOST_MISSES):
                engine.is_silent, start = True, len(engine.asked)
                await until(lambda n=misses, at=start: len(engine.asked) - at >= n)
                engine.is_silent = False
                await until(lambda at=start: len(engine.asked) - at > MOST_MISSES + 4)
                assert ("no answer 3 times" in caplog.text) == (misses == MOST_MISSES)
            assert "gets requests again" in caplog.text

    asyncio.run(story())
    assert engine.asked.count("/update_weights_from_disk") == 1


def test_an_engine_that_is_back_with_old_weights_answers_with_new_ones(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it was away for a moment only; whoever has its weights in another version than the checkpoint's."""
    monkeypatch.setattr(shared_module, "LOOK_SECONDS", 0.05)
    engine = Stranger(folder / "hf")

    async def story() -> None:
        async with served(engine, folder / "hf") as client:
            await client.wait_ready(5)
            for version in ("default", "7"):
                engine.model["weight_version"] = version
                (answer, *_) = await client.generate(REQUESTS, 0)
                assert answer.weight_version == client.weights

    asyncio.run(story())
    assert engine.asked.count("/update_weights_from_disk") == 3


def test_requests_of_an_engine_that_does_not_answer_are_asked_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before they would have taken too long."""
    monkeypatch.setattr(shared_module, "LOOK_SECONDS", 0.05)
    engine = Stranger(folder / "hf")

    async def story() -> None:
        async with served(engine, folder / "hf") as client:
            await client.wait_ready(5)
            engine.is_stuck = True
            waiting = asyncio.create_task(client.generate(REQUESTS, 0))
            await until(lambda: "/generate" in engine.asked)
            engine.is_silent, engine.is_stuck, start = True, False, len(engine.asked)
            await until(lambda: len(engine.asked) - start > MOST_MISSES)
            engine.is_silent = False
            (answer, *_) = await asyncio.wait_for(waiting, 10)
            assert answer.weight_version == client.weights

    asyncio.run(story())
    assert engine.asked.count("/generate") == 2


def test_without_any_engine_the_end_comes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_module, "LOOK_SECONDS", 0.05)
    engine = Stranger(folder / "hf")

    async def story() -> None:
        async with served(engine, folder / "hf") as client:
            await client.wait_ready(1)
            engine.is_silent, start = True, len(engine.asked)
            await until(lambda: len(engine.asked) - start > MOST_MISSES)
            with pytest.raises(EngineError, match="none of 1 engines was there for 1 s"):
                await client.generate(REQUESTS, 0)

    asyncio.run(story())
