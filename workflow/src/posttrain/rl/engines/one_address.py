"""One address for several engines, for a client that knows only one: its connections go to them by turns."""

from __future__ import annotations

import asyncio
import itertools
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from urllib.parse import urlsplit

from posttrain.rl.engines.ports import LOOPBACK

CHUNK_BYTES = 1 << 16


@contextmanager
def one_address(urls: Sequence[str]) -> Iterator[str]:
    """Give an address on loopback behind which engines answer, each the connections that fall to it; one's own alone.

    A client that keeps its connections asks each engine as much as the others. One whose engine has gone is closed.

    Args:
        urls: Of the engines, "http://host:port".
    """
    if len(urls) == 1:
        yield urls[0]
        return
    listening = socket.create_server((LOOPBACK, 0))  # here, where who asks hears of a failure
    told: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()

    async def relay() -> None:
        turns, loop, ended = itertools.cycle(urls), asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(lambda *near: _connect(next(turns), *near), sock=listening)
        told.put(lambda: loop.call_soon_threadsafe(ended.set))
        await ended.wait()  # whatever still runs is cancelled with the loop
        server.close()

    thread = threading.Thread(target=asyncio.run, args=(relay(),), daemon=True)
    thread.start()
    end = told.get()
    try:
        yield f"http://{LOOPBACK}:{listening.getsockname()[1]}"
    finally:
        end()
        thread.join()


async def _connect(url: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    place = urlsplit(url)
    with closing(writer):
        try:
            from_engine, to_engine = await asyncio.open_connection(place.hostname, place.port)
        except OSError:
            return
        with closing(to_engine):
            ways = {asyncio.create_task(_copy(reader, to_engine)), asyncio.create_task(_copy(from_engine, writer))}
            _, other = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in other:
                way.cancel()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Hand on what comes, until one of both sides has closed."""
    try:
        while octets := await reader.read(CHUNK_BYTES):
            writer.write(octets)
            await writer.drain()
    except ConnectionError:
        return
