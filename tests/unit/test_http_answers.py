"""Answers of addresses that send anything: all bounded, none followed, each told with its address."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Awaitable, Callable

import pytest

from posttrain.http_answers import OversizedAnswerError, parse_json, read_bounded, read_error, read_refusal
from posttrain.rl.engines.calls import EngineError
from posttrain.rl.engines.streaming import Endpoint, StreamedRequest, open_session, served_models, stream
from posttrain.rl.engines.teacher_forcing import ForcedTokens

MOST = 4096
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
ENDLESS = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nConnection: close\r\n\r\n"


def whole(content: bytes | object, head: bytes = HEAD) -> bytes:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    return head + b"Content-Length: %d\r\n\r\n" % len(data) + data


def ask(answer: bytes, question: Callable[[str], Awaitable[object]], endless: bytes = b"") -> object:
    """Ask a server that answers everything with these bytes, and then goes on with others as long as it is heard."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            while endless:
                writer.write(endless)
                await writer.drain()
                await asyncio.sleep(0)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def run() -> object:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            try:
                return await asyncio.wait_for(question(url), 60)
            except EngineError as error:
                return str(error).replace(url, "ADDRESS")

    return asyncio.run(run())


async def models(url: str) -> dict[str, int | None]:
    async with open_session(20) as session:
        return await served_models(session, Endpoint(url, "m"))


async def response(url: str) -> object:
    async with open_session(20, read_bufsize=1 << 22) as session:
        return await stream(session, Endpoint(url, "m"), StreamedRequest("1 2", output_tokens=4, seed=0))


async def check(url: str) -> object:
    async with ForcedTokens(url, "", 20) as server:
        return await server.logprobs([((1, 2), (3,))], await server.interface())


def usage(count: str) -> bytes:
    return b'data: {"choices": [], "usage": {"completion_tokens": %s, "prompt_tokens": 1}}\n\n' % count.encode()


REDIRECT = b"HTTP/1.1 307 X\r\nLocation: http://127.0.0.1:9/elsewhere\r\nContent-Length: 0\r\n\r\n"
EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
HOSTILE = {
    "redirect": REDIRECT,
    "no HTTP": b"SSH-2.0-OpenSSH_9.6\r\n",
    "nothing": b"",
    "status of letters": b"HTTP/1.1 abc X\r\n\r\n",
    "long header": b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
    "cut": HEAD + b"Content-Length: 100\r\n\r\n{",
    "two lengths": HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
    "not JSON": whole(b"<html>"),
    "not text": whole(b"\xff\xfe{}"),
    "unknown charset": whole(b"\xff", b"HTTP/1.1 200 OK\r\nContent-Type: application/json; charset=none\r\n"),
    "deep": whole(b"[" * 200_000),
    "compressed": whole(gzip.compress(b'{"data": []}'), HEAD + b"Content-Encoding: gzip\r\n"),
    "unknown coding": whole(b"{}", HEAD + b"Content-Encoding: none\r\n"),
    "list": whole([1]),
    "number": whole(b"1e999"),
    "texts": whole({"data": ["m"], "choices": "m", "meta_info": "m"}),
    "lists": whole({"data": [[]], "choices": [[]], "meta_info": []}),
    "no count": whole({"data": [{"id": "m", "max_model_len": "many"}], "choices": [{"logprobs": 5}]}),
    "endless number": whole({"data": [{"id": "m", "max_model_len": float("inf")}]}),
    "error": whole(b"x" * 200_000, b"HTTP/1.1 500 X\r\n"),
    "not JSON in events": EVENTS + b"data: {nothing}\n\n",
    "counts that are none": EVENTS
    + b'data: {"choices": [], "usage": {"completion_tokens": "4", "prompt_tokens": 1}}\n\n',
    "infinite counts": EVENTS + b'data: {"choices": [], "usage": {"completion_tokens": 1e999, "prompt_tokens": 1}}\n\n',
    "no chunks": EVENTS + b'data: {"choices": [], "usage": {"completion_tokens": 4, "prompt_tokens": 1}}\n\n',
    "deep in events": EVENTS + b'data: {"a":' + b"[" * 60_000 + b"\n\n",
    "choice that is none": EVENTS + b'data: {"choices": [5]}\n\n',
    "long line": EVENTS + b"data: {" + b"x" * 3_000_000 + b"\n\n",
}


@pytest.mark.parametrize("question", [models, response, check])
@pytest.mark.parametrize("answer", HOSTILE.values(), ids=HOSTILE)
def test_every_answer_of_another_form_is_told_with_its_address(
    answer: bytes, question: Callable[[str], Awaitable[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttrain.rl.engines.calls.RETRY_SECONDS", 0.0)
    monkeypatch.setattr("posttrain.rl.engines.streaming.RETRY_SECONDS", 0.0)
    told = ask(answer, question)
    assert isinstance(told, str)
    assert "ADDRESS" in told
    assert len(told) < 2000
    if answer is REDIRECT:
        assert "redirects to 'http://127.0.0.1:9/elsewhere', which is not followed: name the address" in told


@pytest.mark.parametrize("question", [models, response, check])
@pytest.mark.parametrize("endless", [b" " * 4096, b": ping\n" * 500], ids=["spaces", "pings"])
def test_an_endless_answer_is_read_up_to_a_limit(
    endless: bytes, question: Callable[[str], Awaitable[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("posttrain.rl.engines.calls.MAX_ANSWER_BYTES", "posttrain.rl.engines.streaming.STREAM_BYTES"):
        monkeypatch.setattr(name, MOST)
    monkeypatch.setattr(read_bounded, "__defaults__", (MOST,))
    monkeypatch.setattr(ForcedTokens, "_max_answer_bytes", MOST)
    told = ask(ENDLESS % b"application/json", question, endless)
    assert isinstance(told, str)
    assert "ADDRESS" in told
    assert "more than" in told


def test_the_limits_hold_before_more_is_read() -> None:
    read = 0

    async def chunks(size: int = 1000):
        nonlocal read
        while True:
            read += size
            yield b"x" * size

    with pytest.raises(OversizedAnswerError, match="an answer of more than 2500 bytes"):
        asyncio.run(read_bounded(chunks(), 2500))
    assert read == 3000
    for size, most in ((1000, 66_000), (4096, 65_536)):
        read = 0
        assert len(asyncio.run(read_error(chunks(size)))) == 65_536
        assert read == most

    async def few():
        yield b"12"
        yield b"34"

    async def mebibytes(rest: bytes):
        for _ in range(16):
            yield b"x" * 2**20
        yield rest

    assert len(asyncio.run(read_bounded(mebibytes(b"")))) == 2**24
    with pytest.raises(OversizedAnswerError):
        asyncio.run(read_bounded(mebibytes(b"x")))
    assert asyncio.run(read_bounded(few(), 4)) == b"1234"
    assert asyncio.run(read_error(few())) == "1234"
    with pytest.raises(ValueError, match="nested too deep"):
        parse_json("[" * 200_000)


NOT_FOLLOWED = "which is not followed: name the address itself"


@pytest.mark.parametrize(
    ("status", "headers", "said"),
    [
        (299, {"Location": "http://a/"}, "xyz"),
        (300, {"Location": "http://a/"}, f"redirects to 'http://a/', {NOT_FOLLOWED}"),
        (399, {"Location": "/" * 201}, f"redirects to '{'/' * 200}', {NOT_FOLLOWED}"),
        (400, {"Location": "http://a/"}, "xyz"),
        (304, {}, "xyz"),
    ],
)
def test_a_refusal_says_where_it_leads_or_the_beginning_of_its_text(status: int, headers: dict, said: str) -> None:
    async def page(text: bytes):
        yield text

    assert asyncio.run(read_refusal(status, headers, page(b"xyz"))) == f"HTTP {status}: {said}"
    assert len(asyncio.run(read_refusal(500, {}, page(b"x" * 2000)))) == len("HTTP 500: ") + 1000
    assert asyncio.run(read_refusal(500, {}, page(b"\xff"))) == "HTTP 500: \ufffd"


def test_an_answer_of_the_right_form_is_read() -> None:
    assert ask(whole({"data": [{"id": "m", "max_model_len": 9}, {"id": "n"}]}), models) == {"m": 9, "n": None}
