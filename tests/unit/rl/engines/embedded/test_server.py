"""The engine's endpoints over real HTTP, asked by the client of this project and by plain requests."""

import asyncio
import shutil
from contextlib import asynccontextmanager

import aiohttp
import pytest
import torch
from aiohttp.test_utils import TestServer
from tests.unit.rl.engines.conftest import write_checkpoint

from posttrain.checkpoint.quantization.fp8 import quantize_named
from posttrain.rl.engines.buckets import make_buckets
from posttrain.rl.engines.checksums import tensor_checksum
from posttrain.rl.engines.client import EngineClient
from posttrain.rl.engines.embedded import server as server_module
from posttrain.rl.engines.embedded.model import load_model
from posttrain.rl.engines.embedded.server import make_application
from posttrain.rl.engines.embedded.worker import Worker
from posttrain.rl.engines.responses import NO_WEIGHTS, GenerateRequest
from posttrain.rl.engines.secret import authorization
from posttrain.rl.engines.streaming import GENERATE, Endpoint, StreamedRequest, stream
from posttrain.rl.engines.tensor_payload import serialize_bucket

MTP = "model.layers.3."
SECRET = "of the attempt"


@asynccontextmanager
async def engine(folder, version="default", has_weights=True):
    loaded = load_model(folder, torch.float32, has_weights)
    loaded.weights.version = version
    worker = Worker(
        loaded.model,
        lambda: loaded.weights.version,
        merge_requests=False,
        max_batch_rows=64,
        has_weights=lambda: loaded.weights.is_whole,
    )
    worker.start()
    async with TestServer(make_application(loaded, worker, SECRET)) as server:
        yield server, worker
    worker.stop(10)


def plain_session(shown=SECRET):
    return aiohttp.ClientSession(headers=authorization(shown))


@asynccontextmanager
async def engine_and_client(folder, **start):
    async with (
        engine(folder, **start) as (server, worker),
        EngineClient([str(server.make_url("/"))], SECRET, 30) as client,
    ):
        yield client, worker


def requests(count=6, max_new_tokens=10):
    return [GenerateRequest([5 + i % 3] * (3 + i), 100 + i, max_new_tokens) for i in range(count)]


def checksums_of(tensors):
    return {n: tensor_checksum(t.float()) for n, t in tensors.items() if not n.startswith(MTP)}


def test_generate_says_tokens_logprobs_reason_and_version(checkpoint):
    async def story():
        async with engine_and_client(checkpoint) as (client, worker):
            first, again = await client.generate(requests(), 0), await client.generate(requests(), 1)
            assert first == again
            assert len(first) == 6
            assert {result.finish_reason for result in first} <= {"stop", "length"}
            assert all(result.weight_version is None for result in first)
            assert all(len(result.output_ids) == len(result.logprobs) <= 10 for result in first)
            assert all(torch.tensor(x, dtype=torch.float32).item() == x for x in first[0].logprobs)
            assert worker.counters.num_batches == 2

    asyncio.run(story())


def test_an_update_changes_weights_and_version_together(checkpoint, tensors, new_tensors):
    async def story():
        async with engine_and_client(checkpoint) as (client, _):
            before = await client.generate(requests(), 0)
            assert await client.checksums() == [checksums_of(tensors)]
            await client.update_weights(7, make_buckets(new_tensors.items(), 1 << 16))
            after = await client.generate(requests(), 0)
            assert {result.weight_version for result in after} == {7}
            assert await client.weight_versions() == ["7"]
            assert await client.checksums() == [checksums_of(new_tensors)]
            await client.update_weights(8, make_buckets(tensors.items(), 1 << 16))
            back = await client.generate(requests(), 0)
            assert [r.logprobs for r in back] == [r.logprobs for r in before] != [r.logprobs for r in after]

    asyncio.run(story())


def test_quantised_updates_and_a_folder_of_the_same_weights_serve_the_same(checkpoint, fp8_checkpoint, tensors):
    quantised = [pair for name, tensor in tensors.items() for pair in quantize_named(name, tensor)]

    async def story():
        async with engine_and_client(checkpoint) as (client, _):
            await client.update_weights(1, make_buckets(quantised, 1 << 16))
            by_tensor, sums = await client.generate(requests(), 0), await client.checksums()
            await client.update_weights_from_disk(2, fp8_checkpoint)
            by_disk = await client.generate(requests(), 0)
            assert await client.checksums() == sums
            assert sums != [checksums_of(tensors)]
            assert [r.logprobs for r in by_tensor] == [r.logprobs for r in by_disk]
            assert {r.weight_version for r in by_disk} == {2}

    asyncio.run(story())


def test_half_an_update_never_serves_and_the_next_whole_one_does(checkpoint, tensors, new_tensors):
    async def story():
        async with engine(checkpoint) as (server, _):
            url = str(server.make_url("/"))
            async with EngineClient([url], SECRET, 30) as client, EngineClient([url], SECRET, 30) as bystander:
                before = await bystander.generate(requests(), 0)
                with pytest.raises(RuntimeError, match="5 of 82 tensors are missing"):
                    await client.update_weights(7, make_buckets(list(new_tensors.items())[5:], 1 << 16))
                with pytest.raises(RuntimeError, match="update to weight version 7 is open or failed"):
                    await client.generate(requests(), 0)
                await client.begin_update(8)
                await client.send_bucket(list(new_tensors.items())[:3])
                # The engine itself still serves the old weights, as a whole.
                assert await bystander.generate(requests(), 0) == before
                assert await bystander.checksums() == [checksums_of(tensors)]
                await client.update_weights(9, make_buckets(new_tensors.items(), 1 << 16))
                assert {r.weight_version for r in await client.generate(requests(), 0)} == {9}
                assert await bystander.checksums() == [checksums_of(new_tensors)]

    asyncio.run(story())


def test_a_folder_that_does_not_fit_leaves_the_old_weights(checkpoint, tensors, tmp_path):
    folder = write_checkpoint(tmp_path / "hf", "glm_moe_dsa", {**tensors, "lm_head.weight": torch.zeros(2, 2)})

    async def story():
        async with engine_and_client(checkpoint) as (client, _):
            with pytest.raises(RuntimeError, match=r"lm_head\.weight: shape \(2, 2\)"):
                await client.update_weights_from_disk(3, folder)
            assert await client.checksums() == [checksums_of(tensors)]
            assert await client.weight_versions() == ["default"]

    asyncio.run(story())


async def answer_of(session, method, url, **body):
    async with session.request(method, url, **body) as response:
        return response.status, await response.text()


BUCKET = {"serialized_named_tensors": [serialize_bucket([("nobody.weight", torch.zeros(2))])]}


@pytest.mark.parametrize(
    ("method", "path", "body", "said"),
    [
        (
            "POST",
            "/generate",
            {"json": {"input_ids": [[64]]}},
            "token 64 at position 0 is not in the vocabulary",
        ),
        ("POST", "/generate", {"json": {"input_ids": [[]]}}, "empty; a prompt has at least one token"),
        ("POST", "/generate", {"json": {"input_ids": [[5] * 200]}}, "exceed the model's 256 positions"),
        ("POST", "/generate", {"data": b"{"}, "the body is not JSON"),
        ("POST", "/generate", {"json": [1]}, "must be a JSON object"),
        ("POST", "/generate_text", {"json": {}}, "POST /generate_text is not an endpoint"),
        ("GET", "/generate", {}, "GET /generate is not an endpoint"),
        ("POST", "/update_weights_from_tensor", {"json": BUCKET}, "no weight update is open"),
        ("POST", "/end_weight_update", {"json": {}}, "no weight update is open"),
        ("POST", "/update_weights_from_disk", {"json": {"model_path": "/nowhere"}}, "/nowhere"),
        ("POST", "/update_weights_from_disk", {"json": {}}, "model_path: the folder"),
        ("POST", "/weights_checker", {"json": {"action": "reset_tensors"}}, "knows 'checksum'"),
        ("POST", "/pause_generation", {"json": {"mode": "other"}}, "knows 'abort', 'in_place', 'retract'"),
    ],
)
def test_bad_requests_get_400_and_a_reason(checkpoint, method, path, body, said):
    async def story():
        async with engine(checkpoint) as (server, _), plain_session() as session:
            status, text = await answer_of(session, method, server.make_url(path), **body)
            assert status == 400
            assert said in text

    asyncio.run(story())


def routes_of(server):
    return [(route.method, route.resource.canonical) for route in server.app.router.routes()]


@pytest.mark.parametrize(
    "shown", ["", "Bearer", "Bearer  of the attempt", "Bearer of the attemps", "of the attempt", "é"]
)
def test_no_route_answers_who_does_not_show_the_secret(checkpoint, tensors, shown):
    """Neither those that are there nor those that are not; the weights stay as they are."""

    async def story():
        async with engine(checkpoint) as (server, worker), aiohttp.ClientSession() as session:
            asked = [*routes_of(server), ("OPTIONS", "/generate"), ("POST", "/../generate"), ("GET", "/nothing")]
            assert len(asked) > 15
            headers = {"Authorization": shown} if shown else {}
            for method, path in asked:
                method = "GET" if method == "*" else method
                status, text = await answer_of(session, method, server.make_url(path), headers=headers)
                assert (status, "secret" in text or method == "HEAD") == (401, True), (method, path)
            assert worker.counters.num_batches == 0
        async with engine_and_client(checkpoint) as (client, _):
            assert await client.checksums() == [checksums_of(tensors)]

    asyncio.run(story())


async def assert_refused(reader):
    answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    assert answer.startswith(b"HTTP/1.1 401")
    assert b"Connection: close" in answer


def test_what_a_stranger_sends_is_not_read(checkpoint):
    """It says that a gigabyte comes, and gets its answer before the first byte; or sends what is no text."""

    async def story():
        async with engine(checkpoint) as (server, _):
            reader, writer = await asyncio.open_connection(server.host, server.port)
            writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n")
            await assert_refused(reader)
            writer.close()
            reader, writer = await asyncio.open_connection(server.host, server.port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nAuthorization: \xff\r\n\r\n")
            await assert_refused(reader)
            writer.close()

    asyncio.run(story())


def test_who_knows_the_secret_may_send_all_weights_at_once_and_no_more(checkpoint, tensors, monkeypatch):
    monkeypatch.setattr(server_module, "SMALL_BODY_BYTES", 1000)
    whole = {"serialized_named_tensors": [serialize_bucket([(n, t.float()) for n, t in tensors.items()])]}

    async def story():
        async with engine(checkpoint) as (server, _), plain_session() as session:
            post = lambda path, body: answer_of(session, "POST", server.make_url(path), json=body)  # noqa: E731
            assert (await post("/begin_weight_update", {}))[0] == 200
            assert (await post("/update_weights_from_tensor", whole))[0] == 200
            longer = {"serialized_named_tensors": whole["serialized_named_tensors"] * 4}
            assert (await post("/update_weights_from_tensor", longer))[0] == 413
            assert (await post("/end_weight_update", {}))[0] == 200

    asyncio.run(story())


def test_an_engine_of_another_run_is_not_waited_for(checkpoint):
    async def story():
        async with (
            engine(checkpoint) as (server, _),
            EngineClient([str(server.make_url("/"))], "another", 30) as client,
        ):
            with pytest.raises(RuntimeError, match=r"engine 0 .* was started with another secret"):
                await client.wait_ready(20)
            with pytest.raises(RuntimeError, match="/generate: HTTP 401"):
                await client.generate(requests(), 0)

    asyncio.run(story())


def test_a_bad_bucket_is_told_at_once_and_drops_the_update(checkpoint, tensors):
    async def story():
        async with engine(checkpoint) as (server, _), plain_session() as session:
            post = lambda path, body: answer_of(session, "POST", server.make_url(path), json=body)  # noqa: E731
            assert (await post("/begin_weight_update", {}))[0] == 200
            assert (
                "nobody.weight: the model has no such tensor" in (await post("/update_weights_from_tensor", BUCKET))[1]
            )
            broken = {"serialized_named_tensors": ["AAAA"]}
            assert "not a payload" in (await post("/update_weights_from_tensor", broken))[1]
            whole = {
                "serialized_named_tensors": [serialize_bucket(list(tensors.items()))],
                "weight_version": "4",
            }
            assert (await post("/update_weights_from_tensor", whole))[0] == 200
            assert "failed before" in (await post("/end_weight_update", {}))[1]
            assert "no weight update is open" in (await post("/end_weight_update", {}))[1]

    asyncio.run(story())


def test_an_update_whose_sender_was_killed_is_dropped(checkpoint, tensors):
    """Its tensors do not count for the next one, which is served only when it is whole itself."""

    async def story():
        async with engine(checkpoint) as (server, _), plain_session() as session:
            post = lambda path, body: answer_of(session, "POST", server.make_url(path), json=body)  # noqa: E731
            first, *others = tensors.items()
            for bucket in ([first], others):
                assert (await post("/begin_weight_update", {}))[0] == 200
                body = {"serialized_named_tensors": [serialize_bucket(bucket)], "weight_version": "4"}
                assert (await post("/update_weights_from_tensor", body))[0] == 200
            assert first[0] in (await post("/end_weight_update", {}))[1]

    asyncio.run(story())


@pytest.mark.parametrize("path", ["/release_memory_occupation", "/update_weights_from_disk"])
def test_an_open_update_holds_nothing_up(checkpoint, path):
    """A new trainer first puts the engines to sleep, or lets them load: the killed one's update is dropped then."""

    async def story():
        async with engine(checkpoint) as (server, _), plain_session() as session:
            post = lambda path, body: answer_of(session, "POST", server.make_url(path), json=body)  # noqa: E731
            assert (await post("/begin_weight_update", {}))[0] == 200
            assert (await post(path, {"model_path": str(checkpoint)}))[0] == 200
            assert "no weight update is open" in (await post("/end_weight_update", {}))[1]

    asyncio.run(story())


def test_health_information_and_flush(checkpoint):
    async def story():
        async with engine(checkpoint) as (server, worker), plain_session() as session:
            get = lambda path: answer_of(session, "GET", server.make_url(path))  # noqa: E731
            assert (await get("/health"))[0] == (await get("/health_generate"))[0] == 200
            assert '"max_position_embeddings": 256' in (await get("/model_info"))[1]
            assert '"num_batches": 1' in (await get("/get_server_info"))[1]
            assert (await answer_of(session, "POST", server.make_url("/flush_cache"), json={}))[0] == 200
            worker.stop(10)
            assert (await get("/health"))[0] == 503

    asyncio.run(story())


def test_a_stream_grows_token_by_token(checkpoint):
    async def story():
        async with engine(checkpoint) as (server, _), aiohttp.ClientSession() as session:
            endpoint = Endpoint(str(server.make_url("")), "", GENERATE, SECRET)
            line = await stream(session, endpoint, StreamedRequest([5, 6], output_tokens=7, seed=3))
            assert (len(line.chunks), line.output_tokens) == (7, 7)

    asyncio.run(story())


def test_abort_and_pause_through_the_client(checkpoint):
    async def story():
        async with engine_and_client(checkpoint) as (client, worker):
            await client.pause_generation("in_place")
            task = asyncio.create_task(client.generate(requests(max_new_tokens=3), 0))
            await asyncio.sleep(0.2)
            assert not task.done()
            assert worker.counters.num_batches == 0
            await client.continue_generation()
            assert len(await task) == 6
            await client.pause_generation("in_place")
            task = asyncio.create_task(client.generate(requests(max_new_tokens=3), 0))
            await asyncio.sleep(0.2)
            await client.abort_all()
            with pytest.raises(RuntimeError, match="finish reason 'abort'"):
                await task

    asyncio.run(story())


@pytest.mark.parametrize("is_fp8", [False, True])
def test_an_engine_without_weights_waits_for_an_update_and_is_then_like_any_other(request, tmp_path, tensors, is_fp8):
    """Of its folder only the JSON files are there; it does not generate before all tensors have come."""
    whole = request.getfixturevalue("fp8_checkpoint" if is_fp8 else "checkpoint")
    shutil.copytree(whole, tmp_path / "hf", ignore=shutil.ignore_patterns("*.safetensors"))
    sent = [pair for item in tensors.items() for pair in (quantize_named(*item) if is_fp8 else [item])]

    async def story():
        async with engine_and_client(whole) as (client, _):
            await client.update_weights(3, make_buckets(sent, 20_000))
            expected = await client.generate(requests(), 0), await client.checksums()
        async with engine_and_client(tmp_path / "hf", version=NO_WEIGHTS, has_weights=False) as (client, _):
            assert await client.weight_versions() == [NO_WEIGHTS]
            with pytest.raises(RuntimeError, match="an engine that has not got its weights yet"):
                await client.generate(requests(), 0)
            with pytest.raises(RuntimeError, match="tensors are missing"):
                await client.update_weights(3, make_buckets(sent[1:], 20_000))
            await client.update_weights(3, make_buckets(sent, 20_000))
            assert (await client.generate(requests(), 0), await client.checksums()) == expected

    asyncio.run(story())
