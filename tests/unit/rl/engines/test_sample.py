"""Single requests, pauses and engines that die: the client against scripted engines."""

import asyncio
import json

import pytest
from aiohttp import web
from aiohttp.test_utils import unused_port
from tests.unit.rl.engines.test_client import BUCKETS, ScriptedEngine, client_of, run

from posttrain.rl.engines import calls as calls_module
from posttrain.rl.engines.client import EngineClient
from posttrain.rl.engines.responses import GenerateRequest
from posttrain.types import VersionSpan

REQUEST = GenerateRequest([5], 1, 4)


def answer(tokens, reason="length", spans=None, version="7"):
    meta = {"finish_reason": {"type": reason}, "weight_version": version}
    meta["output_token_logprobs"] = [[-0.5, token, None] for token in tokens]
    if spans is not None:
        meta["weight_versions"] = [dict(zip(("version", "start", "end"), span, strict=True)) for span in spans]

    async def handle(request):
        return web.json_response([{"output_ids": tokens, "meta_info": meta}])

    return handle


class GatedEngine(ScriptedEngine):
    """Answers /generate once `opened` is set; an abort opens it, too."""

    def __init__(self, name="0"):
        super().__init__(name)
        self.opened, self.num_waiting, self.reason = asyncio.Event(), 0, "length"
        self.script = {"/generate": self.generate, "/abort_request": self.abort}

    async def generate(self, request):
        self.num_waiting += 1
        await self.opened.wait()
        self.num_waiting -= 1
        return await answer([3], self.reason, version=self.name)(request)

    async def abort(self, request):
        self.reason = "abort"
        self.opened.set()
        return web.Response()


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


def test_versions_are_spans_of_tokens_and_a_lone_version_is_one_span():
    async def versions_of(told):
        async with client_of(ScriptedEngine(script={"/generate": told})) as client:
            return (await client.sample(REQUEST)).versions

    assert run(versions_of(answer([3, 4, 5]))) == (VersionSpan(7, 3),)
    told = answer([3, 4, 5], spans=[("6", 0, 1), ("7", 1, 3)])
    assert run(versions_of(told)) == (VersionSpan(6, 1), VersionSpan(7, 2))
    assert run(versions_of(answer([], "abort", [("7", 0, 0)]))) == ()


@pytest.mark.parametrize(
    "spans",
    [
        [("6", 0, 1)],
        [("6", 0, 1), ("7", 2, 3)],
        [("6", 0, 2), ("7", 1, 3)],
        [("6", 0, 4)],
        [("6", 0, 0), ("7", 0, 3)],
        [("6", 1, 3)],
        [],
    ],
)
def test_versions_that_do_not_cover_the_tokens_are_refused(spans):
    async def story():
        async with client_of(ScriptedEngine(script={"/generate": answer([3, 4, 5], spans=spans)})) as client:
            with pytest.raises(RuntimeError, match=r"engine 0 .*weight versions of other tokens than its 3"):
                await client.sample(REQUEST)

    run(story())


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (answer([], "stop"), "0 of 4 tokens"),
        (answer([3] * 5, "abort"), "5 of 4 tokens"),
        (answer([3], "error"), "finish reason 'error'"),
        (answer([3, 4], spans=[("none", 0, 1), ("7", 1, 2)]), "has not got its weights yet"),
        (web.json_response([{"meta_info": {"finish_reason": {"type": "abort"}}}]), "unreadable result"),
    ],
)
def test_an_answer_that_is_no_response_is_refused(told, said):
    async def story():
        async with client_of(ScriptedEngine(script={"/generate": told})) as client:
            with pytest.raises(RuntimeError, match=said):
                await client.sample(REQUEST)

    run(story())


def test_only_a_sample_may_be_aborted():
    async def story():
        async with client_of(ScriptedEngine(script={"/generate": answer([3], "abort")})) as client:
            assert (await client.sample(REQUEST)).finish_reason == "abort"
            with pytest.raises(RuntimeError, match="finish reason 'abort'"):
                await client.generate([REQUEST], 0)

    run(story())


def test_a_request_goes_to_the_engine_with_the_fewest_in_flight():
    async def story():
        slow, fast = GatedEngine("0"), ScriptedEngine("1")
        async with client_of(slow, fast) as client:
            first = asyncio.create_task(client.sample(REQUEST))
            await until(lambda: slow.num_waiting)
            assert client.num_in_flight == 1
            assert [(await client.sample(REQUEST)).weight_version for _ in range(3)] == [1, 1, 1]
            slow.opened.set()
            assert (await first).weight_version == 0
            assert client.num_in_flight == 0

    run(story())


def test_a_turn_goes_to_the_engine_with_its_prefix_although_it_is_busier_and_to_another_once_it_has_failed(monkeypatch):
    monkeypatch.setattr(calls_module, "RETRY_SECONDS", 0.01)

    async def close_connection(request):
        request.transport.close()
        return web.Response()

    async def story():
        idle, busy = ScriptedEngine("0"), GatedEngine("1")
        async with client_of(idle, busy) as client:
            turns = [asyncio.create_task(client.sample(REQUEST, engine=1)) for _ in range(3)]
            await until(lambda: busy.num_waiting == 3)
            assert "/generate" not in idle.paths
            busy.opened.set()
            assert [(await turn).weight_version for turn in turns] == [1, 1, 1]
            busy.script["/generate"] = close_connection
            with pytest.raises(RuntimeError, match="engine 1 "):
                await client.sample(REQUEST, engine=1)
            assert (await client.sample(REQUEST, engine=1)).weight_version == 0

    run(story())


@pytest.mark.parametrize(("mode", "sent"), [("keep", "in_place"), ("recompute", "retract")])
def test_a_pause_holds_running_requests_and_new_ones_wait_in_the_client(mode, sent):
    async def story():
        engine = GatedEngine()
        async with client_of(engine) as client:
            running = asyncio.create_task(client.sample(REQUEST))
            await until(lambda: engine.num_waiting)
            await client.pause(mode)
            waiting = asyncio.create_task(client.sample(REQUEST))
            await client.update_weights(8, BUCKETS)
            await asyncio.sleep(0.05)
            assert engine.paths.count("/generate") == 1
            await client.resume()
            engine.opened.set()
            await asyncio.gather(running, waiting)
            assert client.num_in_flight == 0
        bodies = [body for path, body in engine.calls if path == "/generate"]
        assert ("/pause_generation", {"mode": sent}) in engine.calls
        assert engine.paths.count("/continue_generation") == 1
        flushes = [body["flush_cache"] for path, body in engine.calls if path == "/update_weights_from_tensor"]
        assert flushes == [False, mode == "recompute"]
        assert [body.get("extra_key") for body in bodies] == [None, "version 8" if mode == "keep" else None]

    run(story())


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_the_other_ways_of_an_update_leave_the_cache_of_running_requests_too(mode, tmp_path):
    async def story():
        engine = ScriptedEngine()
        async with client_of(engine) as client:
            await client.pause(mode)
            await client.update_weights_from_disk(8, tmp_path)
            await client.begin_update(9)
            await client.end_received(9)
            await client.resume()
        (from_disk,) = (body for path, body in engine.calls if path == "/update_weights_from_disk")
        assert from_disk["flush_cache"] is (mode == "recompute")
        assert ("/flush_cache" in engine.paths) is (mode == "recompute")
        (named,) = (body for path, body in engine.calls if path == "/update_weight_version")
        assert named == {"new_version": "9", "abort_all_requests": False}

    run(story())


def test_finish_waits_for_what_runs():
    async def story():
        engine = GatedEngine()
        async with client_of(engine) as client:
            running = asyncio.create_task(client.sample(REQUEST))
            await until(lambda: engine.num_waiting)
            pausing = asyncio.create_task(client.pause("finish"))
            await asyncio.sleep(0.05)
            assert not pausing.done()
            engine.opened.set()
            await pausing
            assert running.done()
            waiting = asyncio.create_task(client.sample(REQUEST))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            await client.resume()
            await waiting
        assert "/abort_request" not in engine.paths
        assert "/pause_generation" not in engine.paths

    run(story())


def test_abort_ends_what_runs_and_what_was_on_its_way():
    """An engine that has not seen a request yet cannot abort it: the client asks again until all are answered."""

    class SlowToSee(GatedEngine):
        async def abort(self, request):
            return await super().abort(request) if self.paths.count("/abort_request") > 2 else web.Response()

    async def story():
        engine = SlowToSee()
        async with client_of(engine) as client:
            running = asyncio.create_task(client.sample(REQUEST))
            await until(lambda: engine.num_waiting)
            await client.pause("abort")
            assert running.done()
            assert (await running).finish_reason == "abort"
            await client.resume()

    run(story())


def test_an_unknown_mode_is_refused():
    async def story():
        async with client_of(ScriptedEngine()) as client:
            with pytest.raises(ValueError, match="keep, recompute, finish, abort"):
                await client.pause("in_place")
            await client.sample(REQUEST)

    run(story())


def test_requests_do_not_go_on_with_half_an_update():
    engine = ScriptedEngine(script={"/end_weight_update": web.json_response({}, status=500)})

    async def story():
        async with client_of(engine) as client:
            await client.pause("keep")
            with pytest.raises(RuntimeError, match="engine 0"):
                await client.update_weights(8, BUCKETS)
            with pytest.raises(RuntimeError, match="update to weight version 8 is open or failed"):
                await client.resume()
            assert "/continue_generation" not in engine.paths
            engine.script.clear()
            await client.update_weights(8, BUCKETS)
            await client.resume()
            await client.sample(REQUEST)

    run(story())


def test_an_engine_that_dies_is_named_and_gets_no_more_requests_until_an_update(monkeypatch):
    monkeypatch.setattr(calls_module, "RETRY_SECONDS", 0.01)
    alive = ScriptedEngine("7")

    async def story():
        async with client_of(alive) as other:
            urls = [f"http://127.0.0.1:{unused_port()}", other._engines[0].url]
            async with EngineClient(urls, "secret", 5.0) as client:
                for _ in range(2):
                    with pytest.raises(RuntimeError, match=r"engine 0 .*no connection"):
                        await client.sample(REQUEST)
                    assert client.num_in_flight == 0
                    assert [(await client.sample(REQUEST)).weight_version for _ in range(3)] == [7, 7, 7]
                    client._serves("8")
            async with EngineClient(urls[:1], "secret", 5.0) as client:
                for said in (r"engine 0 .*no connection", "no engine is left: engine 0"):
                    with pytest.raises(RuntimeError, match=said):
                        await client.sample(REQUEST)

    run(story())


def test_an_engine_that_came_back_without_the_published_weights_is_found_out():
    """A process that was started again serves its checkpoint, whose version has no number."""

    async def story():
        engines = [ScriptedEngine(script={"/generate": answer([3], version="default")}), ScriptedEngine("7")]
        async with client_of(*engines) as client:
            await client.update_weights(7, BUCKETS)
            with pytest.raises(RuntimeError, match=r"engine 0 .*not published"):
                await client.sample(REQUEST)
            assert (await client.sample(REQUEST)).weight_version == 7

    run(story())


@pytest.mark.parametrize("version", ["default", None])
def test_initial_weights_are_version_0(version):
    """Engines do not number the weights that they start with; a response may go on after the first update."""
    spans = [(version, 0, 2), ("1", 2, 3)]

    async def story():
        async with client_of(ScriptedEngine(script={"/generate": answer([3, 4, 5], spans=spans)})) as client:
            assert (await client.sample(REQUEST)).versions == (VersionSpan(0, 2), VersionSpan(1, 1))

    run(story())


def test_a_prefill_engine_that_dies_is_replaced_by_another(monkeypatch):
    monkeypatch.setattr(calls_module, "RETRY_SECONDS", 0.01)

    async def info(request):
        return web.json_response({"disaggregation_bootstrap_port": 9})

    decode, prefill = ScriptedEngine("7"), ScriptedEngine("7", {"/get_server_info": info})

    async def story():
        async with client_of(decode, prefill) as other:
            one, two = (engine.url for engine in other._engines)
            urls = [one, f"http://127.0.0.1:{unused_port()}", two]
            async with EngineClient(urls, "secret", 5.0, num_prefill=2) as client:
                with pytest.raises(RuntimeError, match=r"engine 1 .*no connection"):
                    await client.sample(REQUEST)
                assert (await client.sample(REQUEST)).weight_version == 7
        assert json.dumps(prefill.calls[-1][1]["input_ids"]) == "[[5]]"

    run(story())


def test_an_evaluation_is_not_held_back_by_a_pause_of_training():
    """Trainer and engines take turns: the pause after a rollout lasts until the next one."""

    async def story():
        engine = ScriptedEngine(script={"/generate": answer([3])})
        async with client_of(engine) as client:
            await client.pause("finish")
            held = asyncio.create_task(client.sample(REQUEST))
            assert (await client.sample(REQUEST, waits=False)).output_ids == (3,)
            assert not held.done()
            await client.resume()
            assert (await held).output_ids == (3,)

    run(story())
