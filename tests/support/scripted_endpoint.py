"""An OpenAI-compatible endpoint that sends its tokens at times of a script and remembers when it did.

It is a process of its own over bare sockets, so that neither a web framework nor the client's interpreter moves its
times. The model's name chooses the script. `GET /sent` tells when each request came for the first time and when each
chunk left, on the clock that all processes of this machine share.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FIRST_MS, GAP_MS, LONG_GAP_MS, LONG_EVERY = 50.0, 10.0, 60.0, 25
CONTEXT = 4096


@dataclass(frozen=True)
class Script:
    """How a model answers.

    Args:
        tokens_per_chunk: Tokens that leave together.
        gap_ms: Between two chunks; each `LONG_EVERY`th is longer by what a long gap is.
        has_empty: A chunk with a role and no text comes first, and one without text after each with some.
        refuses_first: Status of the answer to a request when it comes for the first time; 0: none. 1 hangs up.
        dies_at: The process ends with this request's third chunk, counted from 1.
        error: Status of every answer; 200 tells an error within the stream, 1 sends there what is no chunk.
        ends_early: The answer has half of the tokens.
    """

    tokens_per_chunk: int = 1
    gap_ms: float = GAP_MS
    has_empty: bool = False
    refuses_first: int = 0
    dies_at: int = 0
    error: int = 0
    ends_early: bool = False


SCRIPTS = {
    "single": Script(),
    "batched": Script(tokens_per_chunk=4, gap_ms=40.0),
    "empty": Script(has_empty=True),
    "busy": Script(refuses_first=503),
    "hangs-up": Script(refuses_first=1),
    "crowd": Script(gap_ms=250.0),
    "flood": Script(gap_ms=0.0),
    "dies": Script(dies_at=20),
    "refuses": Script(error=500),
    "talks-nonsense": Script(error=1),
    "fails-inside": Script(error=200),
    "ends-early": Script(ends_early=True),
}


class _Endpoint:
    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self._first_came: dict[str, float] = {}
        self._count = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                came = time.monotonic()
                length = next(
                    (int(line[15:]) for line in head.split(b"\r\n") if line[:15].lower() == b"content-length:"), 0
                )
                body = json.loads(await reader.readexactly(length) or b"{}")
                if not await self._answer(head.split(b" ")[1].decode(), body, came, writer):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()

    async def _answer(self, path: str, body: dict[str, Any], came: float, writer: asyncio.StreamWriter) -> bool:
        """Answer a request; tell whether the connection stays open."""
        script = SCRIPTS.get(str(body.get("model")))
        if path == "/sent":
            return _whole(writer, 200, self.sent)
        if path == "/forget":
            self.sent.clear()
            self._first_came.clear()
            return _whole(writer, 200, {})
        if not path.endswith("/completions"):
            models = [{"id": name, "object": "model", "max_model_len": CONTEXT} for name in SCRIPTS]
            return _whole(writer, 200, {"object": "list", "data": models})
        if script is None:
            return _whole(writer, 404, {"error": {"message": f"no model {body.get('model')}", "code": 404}})
        key = json.dumps([body["model"], body.get("prompt"), body.get("messages"), body.get("seed")])
        if script.refuses_first and key not in self._first_came:
            self._first_came[key] = came
            if script.refuses_first == 1:
                return False
            return _whole(writer, script.refuses_first, {"error": {"message": "busy"}})
        if script.error > 200:
            return _whole(writer, script.error, {"error": {"message": "out of order"}})
        self._count += 1
        record = {"came": self._first_came.get(key, came), "chunks": []}
        await self._stream(script, body, came, record, writer, "chat" in path)
        return True

    async def _stream(
        self,
        script: Script,
        body: dict[str, Any],
        came: float,
        record: dict[str, Any],
        writer: asyncio.StreamWriter,
        is_chat: bool,
    ) -> None:
        wanted = body.get("max_completion_tokens") or body["max_tokens"]
        total = wanted // 2 if script.ends_early else wanted
        self.sent.append(record)
        number = self._count
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        # Requests that come together do not beat together.
        due = came + (FIRST_MS + (number % 97) * script.gap_ms / 97 * (script.gap_ms > 100)) / 1e3
        if script.has_empty:
            _event(writer, _chunk(is_chat, "", role=True))
        for place in range(0, total, script.tokens_per_chunk):
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if script.dies_at == number and place >= 2 * script.tokens_per_chunk:
                os._exit(1)
            if script.error == 200:
                _event(writer, {"error": {"message": "out of order", "code": 500}})
                break
            if script.error == 1:
                _event(writer, {"choices": 5})
                break
            count = min(script.tokens_per_chunk, total - place)
            _event(writer, _chunk(is_chat, " tok" * count))
            record["chunks"].append([time.monotonic(), count])
            if script.has_empty:
                _event(writer, _chunk(is_chat, ""))
            nth = place // script.tokens_per_chunk + 1
            due += (script.gap_ms + (nth % LONG_EVERY == 0 and script.gap_ms > 0) * (LONG_GAP_MS - GAP_MS)) / 1e3
        prompt = body.get("prompt") or body.get("messages")
        usage = {"prompt_tokens": len(prompt), "completion_tokens": total, "total_tokens": len(prompt) + total}
        _event(writer, {**_chunk(is_chat, ""), "choices": [], "usage": usage})
        _frame(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")


def _chunk(is_chat: bool, text: str, role: bool = False) -> dict[str, Any]:
    delta = {"role": "assistant", "content": text} if role else {"content": text}
    choice: dict[str, Any] = {"index": 0, "finish_reason": None}
    choice |= {"delta": delta} if is_chat else {"text": text}
    kind = "chat.completion.chunk" if is_chat else "text_completion"
    return {"id": "cmpl-0", "object": kind, "created": 0, "model": "scripted", "choices": [choice]}


def _event(writer: asyncio.StreamWriter, content: dict[str, Any]) -> None:
    _frame(writer, b"data: " + json.dumps(content).encode() + b"\n\n")


def _frame(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


def _whole(writer: asyncio.StreamWriter, status: int, content: Any) -> bool:
    data = json.dumps(content).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    return True


async def _run(port: int) -> None:
    server = await asyncio.start_server(_Endpoint().serve, "127.0.0.1", port, limit=1 << 24, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextmanager
def on_time() -> Iterator[None]:
    """Have this process, and what it starts, run before others where the system lets it: a busy machine waits."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        yield
        return
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


@contextmanager
def scripted_endpoint(port: int = 0) -> Iterator[str]:
    """Run the endpoint in a process of its own, on a free port if none is given; its address."""
    command = [sys.executable, "-m", "tests.support.scripted_endpoint", str(port)]
    with on_time():
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def sent(address: str) -> list[dict[str, Any]]:
    """Return when each request came and its chunks left, as [seconds, tokens], in the order of coming."""
    with urllib.request.urlopen(f"{address}/sent") as answer:
        return json.load(answer)


@dataclass(frozen=True)
class Sent:
    """What left the endpoint since it last forgot: milliseconds of each request or gap, counted by itself."""

    ttft: list[float]
    tpot: list[float]
    gaps: list[float]


def sent_times(address: str, leave_out: int) -> Sent:
    """Return the times of all requests but the first ones."""
    ttft, tpot, gaps = list[float](), list[float](), list[float]()
    for record in sent(address)[leave_out:]:
        times, counts = zip(*record["chunks"], strict=True)
        ttft.append((times[0] - record["came"]) * 1e3)
        tpot.append((times[-1] - times[0]) * 1e3 / (sum(counts) - 1))
        gaps += [(later - earlier) * 1e3 for earlier, later in itertools.pairwise(times)]
    return Sent(ttft, tpot, gaps)


def forget(address: str) -> None:
    """Begin a new record."""
    urllib.request.urlopen(f"{address}/forget").close()


if __name__ == "__main__":
    asyncio.run(_run(int(sys.argv[1])))
