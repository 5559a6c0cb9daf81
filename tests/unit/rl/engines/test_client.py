"""The client against engines that misbehave: scripted HTTP servers on loopback."""

import asyncio
from contextlib import asynccontextmanager

import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from posttrain.rl.engines import calls as calls_module
from posttrain.rl.engines.client import EngineClient
from posttrain.rl.engines.responses import GenerateRequest
from posttrain.rl.engines.routes import BINARY

REQUESTS = [GenerateRequest([5], 1, 4)]
BUCKETS = [[("a.weight", torch.zeros(2))], [("b.weight", torch.ones(2))]]


class ScriptedEngine:
    """Answers every call with success, unless the script says otherwise; keeps what it was asked."""

    def __init__(self, name="0", script=None):
        self.name, self.script, self.calls, self.shown = name, script or {}, [], set()

    async def handle(self, request):
        body = await request.json() if request.can_read_body else None
        self.calls.append((request.path, body))
        self.shown.add(request.headers.get("Authorization"))
        scripted = self.script.get(request.path)
        if callable(scripted):
            return await scripted(request)
        if scripted is not None:
            return scripted
        if request.path == "/generate":
            meta = {"finish_reason": {"type": "length"}, "weight_version": self.name}
            meta["output_token_logprobs"] = [[-0.5, 3, None]]
            return web.json_response([{"output_ids": [3], "meta_info": meta}] * len(body["input_ids"]))
        return web.json_response({"success": True, "message": "Success"})

    @property
    def paths(self):
        return [path for path, _ in self.calls]


@asynccontextmanager
async def client_of(*engines, timeout=5.0, ranks=1):
    servers = []
    for engine in engines:
        application = web.Application(client_max_size=0)
        application.router.add_route("*", "/{path:.*}", engine.handle)
        servers.append(TestServer(application))
        await servers[-1].start_server()
    async with EngineClient([str(server.make_url("")) for server in servers], "secret", timeout, ranks) as client:
        yield client
    for server in servers:
        await server.close()


def run(story):
    return asyncio.run(asyncio.wait_for(story, 30))


def test_the_engine_follows_from_the_request_number():
    async def story():
        async with client_of(*(ScriptedEngine(str(n)) for n in range(3))) as client:
            answers = [(await client.generate(REQUESTS, number))[0].weight_version for number in range(7)]
            assert answers == [0, 1, 2, 0, 1, 2, 0]
            assert client.num_engines == 3

    run(story())


def test_every_request_carries_the_secret():
    engine = ScriptedEngine()

    async def story():
        async with client_of(engine) as client:
            await client.wait_ready(5)
            await client.generate(REQUESTS, 0)
            for call in (client.server_info, client.flush_cache, client.pause_generation, client.abort_all):
                await call()
            await client.update_weights(1, BUCKETS)

    run(story())
    assert len(engine.calls) > 8
    assert engine.shown == {"Bearer secret"}


def test_a_refusal_names_engine_path_status_and_text():
    async def story():
        refuse = web.json_response({"error": {"message": "too long"}}, status=400)
        async with client_of(ScriptedEngine(), ScriptedEngine(script={"/generate": refuse})) as client:
            with pytest.raises(RuntimeError, match=r"engine 1 \(http://127.*/generate: HTTP 400: .*too long"):
                await client.generate(REQUESTS, 1)
            assert client.num_retries == 0

    run(story())


def test_no_answer_in_time_is_an_error():
    async def sleep(request):
        await asyncio.sleep(3)

    async def story():
        async with client_of(ScriptedEngine(script={"/generate": sleep}), timeout=0.3) as client:
            with pytest.raises(RuntimeError, match=r"engine 0 .*no answer within 0\.3 s"):
                await client.generate(REQUESTS, 0)

    run(story())


def test_an_answer_that_is_no_result_is_an_error():
    async def story():
        broken = web.Response(text="{", content_type="application/json")
        cut = web.Response(body=b"12", content_type=BINARY)
        for answer, said in [
            (broken, "not JSON"),
            (cut, "not JSON"),
            (web.json_response([]), "0 results for 1 requests"),
        ]:
            async with client_of(ScriptedEngine(script={"/generate": answer})) as client:
                with pytest.raises(RuntimeError, match=f"engine 0 .*{said}"):
                    await client.generate(REQUESTS, 0)

    run(story())


def drop_first(count):
    """Cut the connection of the first calls without an answer, then answer."""
    dropped = []

    async def handle(request):
        if len(dropped) < count:
            dropped.append(request.path)
            request.transport.abort()
            return web.Response()
        meta = {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-1.0, 3, None]]}
        return web.json_response([{"meta_info": meta}])

    return handle


def test_a_cut_connection_is_tried_again_counted_and_logged(monkeypatch, caplog):
    monkeypatch.setattr(calls_module, "RETRY_SECONDS", 0.01)

    async def story():
        async with client_of(ScriptedEngine(script={"/generate": drop_first(2)})) as client:
            assert len(await client.generate(REQUESTS, 0)) == 1
            assert client.num_retries == 2

    with caplog.at_level("WARNING"):
        run(story())
    assert "try 2 of 4" in caplog.text
    assert "try 3 of 4" in caplog.text


def test_retries_have_a_limit(monkeypatch):
    monkeypatch.setattr(calls_module, "RETRY_SECONDS", 0.01)

    async def story():
        async with EngineClient([f"http://127.0.0.1:{unused_port()}"], "secret", 5.0) as client:
            with pytest.raises(RuntimeError, match="no connection after 4 tries"):
                await client.flush_cache()
            assert client.num_retries == 3

    run(story())


def test_a_weight_bucket_is_never_sent_twice():
    engine = ScriptedEngine(script={"/update_weights_from_tensor": drop_first(1)})

    async def story():
        async with client_of(engine) as client:
            with pytest.raises(RuntimeError, match="no connection after 1 tries"):
                await client.update_weights(1, BUCKETS)

    run(story())
    assert engine.paths == ["/begin_weight_update", "/update_weights_from_tensor"]


def test_the_last_bucket_carries_the_version_and_flushes():
    engine = ScriptedEngine()

    async def story():
        async with client_of(engine, ranks=2) as client:
            await client.update_weights(12, BUCKETS)

    run(story())
    begin, first, last, end = engine.calls
    assert (begin[0], end[0]) == ("/begin_weight_update", "/end_weight_update")
    assert (first[1]["weight_version"], first[1]["flush_cache"]) == (None, False)
    assert (last[1]["weight_version"], last[1]["flush_cache"]) == ("12", True)
    one, other = first[1]["serialized_named_tensors"]
    assert one == other


def test_an_engine_that_fails_a_bucket_fails_the_update_and_closes_all_engines():
    refuse = web.json_response({"success": False, "message": "a.weight: bad"}, status=400)
    good, bad = ScriptedEngine(), ScriptedEngine(script={"/update_weights_from_tensor": refuse})

    async def story():
        async with client_of(good, bad) as client:
            with pytest.raises(RuntimeError, match=r"(?s)failed on 1 of 2 engines:.*engine 1 .*a\.weight: bad"):
                await client.update_weights(3, BUCKETS)
            for number in (0, 1):
                with pytest.raises(RuntimeError, match="do not generate: the update to weight version 3"):
                    await client.generate(REQUESTS, number)
            bad.script.clear()
            await client.update_weights(3, BUCKETS)
            assert len(await client.generate(REQUESTS, 0)) == 1

    run(story())
    # The second update first ends what the first left open, then starts from bucket 0.
    again = ["/begin_weight_update", *["/update_weights_from_tensor"] * 2, "/end_weight_update"]
    assert good.paths == [
        "/begin_weight_update",
        "/update_weights_from_tensor",
        "/end_weight_update",
        *again,
        "/generate",
    ]


def test_generation_is_refused_while_an_update_is_open_and_when_it_fails_at_its_end():
    refuse = web.json_response({"success": False, "message": "tensors are missing"}, status=400)
    engine = ScriptedEngine(script={"/end_weight_update": refuse})

    async def story():
        async with client_of(engine) as client:
            await client.begin_update(1)
            with pytest.raises(RuntimeError, match="do not generate"):
                await client.generate(REQUESTS, 0)
            await client.send_bucket(BUCKETS[0], last_of_version=1)
            with pytest.raises(RuntimeError, match="tensors are missing"):
                await client.end_update()
            with pytest.raises(RuntimeError, match="do not generate"):
                await client.generate(REQUESTS, 0)

    run(story())
    assert "/generate" not in engine.paths


def test_an_update_from_disk_that_fails_closes_the_engines(tmp_path):
    refuse = web.json_response({"success": False, "message": "no such folder"}, status=400)
    engine = ScriptedEngine(script={"/update_weights_from_disk": refuse})

    async def story():
        async with client_of(engine) as client:
            with pytest.raises(RuntimeError, match="no such folder"):
                await client.update_weights_from_disk(2, tmp_path)
            with pytest.raises(RuntimeError, match="do not generate"):
                await client.generate(REQUESTS, 0)
            engine.script.clear()
            await client.update_weights_from_disk(2, tmp_path)
            await client.generate(REQUESTS, 0)

    run(story())
    assert engine.calls[0][1] == {
        "model_path": str(tmp_path),
        "load_format": "auto",
        "weight_version": "2",
        "flush_cache": True,
    }


WHOLE = ["/begin_weight_update", *["/update_weights_from_tensor"] * 2, "/end_weight_update"]


def test_an_update_that_failed_is_closed_before_the_next_and_only_then(tmp_path, caplog):
    """An engine takes one update at a time: a second end would be refused, a second begin, too."""
    engine = ScriptedEngine(script={"/update_weights_from_tensor": web.json_response({}, status=500)})
    other = ScriptedEngine(script={"/end_weight_update": web.json_response({}, status=500)})

    async def story():
        async with client_of(engine, other) as client:
            with pytest.raises(RuntimeError, match="engine 0"):
                await client.update_weights(1, BUCKETS)
            engine.script, engine.calls = {}, []
            await client.update_weights_from_disk(2, tmp_path)
            assert engine.paths == ["/end_weight_update", "/update_weights_from_disk"]
            assert "closing the failed weight update: engine 1 " in caplog.text
            other.script = {}
            for version in (3, 4):
                engine.calls = []
                await client.update_weights(version, BUCKETS)
                assert engine.paths == WHOLE
            engine.script, engine.calls = {"/begin_weight_update": web.json_response({}, status=500)}, []
            with pytest.raises(RuntimeError, match="engine 0"):
                await client.update_weights(5, BUCKETS)
            engine.script = {}
            await client.update_weights(6, BUCKETS)
            assert engine.paths == ["/begin_weight_update", "/end_weight_update", *WHOLE]

    run(story())


def test_a_prompt_outside_the_vocabulary_is_not_sent():
    engine = ScriptedEngine()

    async def story():
        async with client_of(engine) as client:
            client._vocab_size = 5
            with pytest.raises(ValueError, match="5"):
                await client.generate(REQUESTS, 0)

    run(story())
    assert engine.calls == []


def test_an_update_without_tensors_is_refused():
    async def story():
        async with client_of(ScriptedEngine()) as client:
            with pytest.raises(RuntimeError, match="has no tensors"):
                await client.update_weights(1, [])

    run(story())


def test_waiting_ends_when_all_are_healthy_at_the_deadline_or_with_a_dead_process():
    async def starting(request):
        health.append(1)
        return web.Response(status=200 if len(health) > 3 else 503)

    health, ill = [], web.Response(status=503)

    def dead():
        raise RuntimeError("engine 0 ended with exit code 1")

    async def story():
        async with client_of(ScriptedEngine(script={"/health": starting})) as client:
            await client.wait_ready(5)
            assert len(health) == 4
        async with client_of(ScriptedEngine(), ScriptedEngine(script={"/health": ill})) as client:
            with pytest.raises(RuntimeError, match=r"engine 1 .* is not ready after 0\.3 s"):
                await client.wait_ready(0.3)
            with pytest.raises(RuntimeError, match="exit code 1"):
                await client.wait_ready(5, dead)

    run(story())


def test_of_engines_that_are_not_ready_only_one_that_says_nothing_is_called_silent(monkeypatch):
    """Not one that is slow and answers, and not one that has just started, however long that takes then."""
    monkeypatch.setattr("posttrain.rl.engines.calls.SILENCE_SECONDS", 0.5)
    monkeypatch.setattr("posttrain.rl.engines.calls.PROBE_TIMEOUT_SECONDS", 0.2)

    def answering(*seconds):
        left = [*seconds]

        async def health(request):
            if left and (wait := left.pop(0)) < 0:
                return web.Response(status=503)
            await asyncio.sleep(wait if left else 0)
            return web.Response(status=200)

        return ScriptedEngine(script={"/health": health})

    async def story():
        told = []
        slow, starting, hung = answering(0.15), answering(-1, 9, 9, 9, 9, 9), answering(9, 9, 9, 9, 9, 9)
        async with client_of(slow, starting, hung) as client:
            await client.wait_ready(20, tell_silent=told.append)
            assert told == [client._engines[2].url], "once"
            await client.wait_ready(20)

    run(story())
