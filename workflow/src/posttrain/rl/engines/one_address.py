"""A round-robin TCP proxy: one address for several engines, for clients that support only one."""

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
    """Yield a loopback address that distributes connections over the engines; a single engine's own address.

    A client that keeps its connections open loads all engines equally. Connections to a dead engine are closed.

    Args:
        urls: Engine URLs, "http://host:port".
    """
    if len(urls) == 1:
        yield urls[0]
        return
    listening = socket.create_server((LOOPBACK, 0))  # bind here, so that the caller sees a failure
    told: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()

    async def relay() -> None:
        turns, loop, ended = itertools.cycle(urls), asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(lambda *near: _connect(next(turns), *near), sock=listening)
        told.put(lambda: loop.call_soon_threadsafe(ended.set))
        await ended.wait()  # the loop cancels what still runs
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
    """Copy data until either side closes."""
    try:
        while octets := await reader.read(CHUNK_BYTES):
            writer.write(octets)
            await writer.drain()
    except ConnectionError:
        return
