"""The trainer's side of an environment worker: starts the process, sends calls, and ends it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from posttrain.cluster.processes import GRACE_SECONDS, ORPHAN_SECONDS
from posttrain.rl.environments.frames import MAX_ANSWER_BYTES, frame_of, read_frame
from posttrain.rl.environments.protocol import EnvironmentFailure
from posttrain.store import parse_json

# Starting a worker takes a second, and much longer on a busy machine.
START_SECONDS = 180.0
# A worker that lives cancels a call at once; a busy machine may take longer.
CANCEL_SECONDS = 5.0
# From the end of the socket to that of the process.
_END_SECONDS = 2.0
_MODULE = "posttrain.rl.environments.worker"


class WorkerProcess:
    """A process of `posttrain.rl.environments.worker`, made in the event loop that uses it.

    Args:
        source: See `rl.environments.worker.main`.
        memory_bytes: Limit on memory mapped beyond that at its start.
    """

    def __init__(self, source: Mapping[str, str], memory_bytes: int):
        self.instances: set[int] = set()
        # What environments left behind in it; "" if it may take another one.
        self.left = ""
        self._ended = ""
        self._ids = itertools.count()
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._writer: asyncio.StreamWriter | None = None
        # One call after the other: when one has blocked the process, all are late.
        self._cancelling = asyncio.Lock()
        self._channel, theirs = socket.socketpair()
        words = [str(memory_bytes), json.dumps(dict(source)), str(os.getpid())]
        # -P: files in the working folder must not shadow modules. Few arenas: each reserves memory that counts.
        command = [sys.executable, "-P", "-m", _MODULE, *words]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "MALLOC_ARENA_MAX": "2"}
        with theirs:
            # An environment's prints go to the log, because standard output belongs to the command.
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=2, env=environment)
        self._ready = asyncio.create_task(self._connect())

    @property
    def is_there(self) -> bool:
        """Whether the process has not ended yet."""
        return self._process.poll() is None

    @property
    def takes_more(self) -> bool:
        """Whether it may take another environment."""
        return not self._ended and not self.left

    async def start(self) -> None:
        """Wait until the process is ready.

        Raises:
            EnvironmentFailure: It is not, or the environment cannot be imported.
        """
        failure = await asyncio.shield(self._ready)
        if failure:
            raise EnvironmentFailure(*failure)

    async def call(self, instance: int, method: str, argument: Any, seconds: float) -> Any:
        """Call a method of an environment.

        Args:
            instance: Number of the environment.
            method: "open", "reset", "step", "reward" or "close".
            argument: JSON types.
            seconds: Deadline.

        Returns:
            What the worker answered, JSON types.

        Raises:
            EnvironmentFailure: It failed, or did not answer in time.
        """
        future = self.send(instance, method, argument)
        done, _ = await asyncio.wait([future], timeout=seconds)
        if not done:
            async with self._cancelling:
                await self._cancel(future, instance, f"{method} did not end within {seconds:g} s")
        reply = future.result()
        if "failure" in reply:
            raise EnvironmentFailure(*reply["failure"])
        return reply["answer"]

    async def _cancel(self, future: asyncio.Future[dict[str, Any]], instance: int, reason: str) -> None:
        """Cancel a call, or end the process if that does not help; returns if another call has ended the process.

        Raises:
            EnvironmentFailure: It was this call that took too long.
        """
        if self._ended:
            await asyncio.wait([future])
        if future.done():
            return
        with contextlib.suppress(EnvironmentFailure):
            self.send(instance, "cancel", None)
        done, _ = await asyncio.wait([future], timeout=CANCEL_SECONDS)
        if not done:
            self.end(f"its process was ended: another environment blocked it ({reason})")
        raise EnvironmentFailure("deadline", reason)

    def send(self, instance: int, method: str, argument: Any) -> asyncio.Future[dict[str, Any]]:
        """Send a request; the result will be the worker's reply.

        Raises:
            EnvironmentFailure: The process has ended, or the argument is not JSON.
        """
        if self._ended or self._writer is None:
            raise EnvironmentFailure("crash", self._ended or "its process is not ready")
        number = next(self._ids)
        try:
            frame = frame_of({"id": number, "instance": instance, "method": method, "argument": argument})
        except (TypeError, ValueError, RecursionError) as error:
            raise EnvironmentFailure("error", f"the argument of {method} is not JSON: {error}") from error
        self._writer.write(frame)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        if method != "cancel":
            self._pending[number] = future
        return future

    def drop(self, instance: int) -> None:
        """Forget an environment; a process that may take no other one ends with its last."""
        self.instances.discard(instance)
        if self.left and not self.instances:
            self.end(f"environments left {self.left} behind")

    def end(self, reason: str) -> None:
        """End the process with all that it has started, without waiting for that; calls in it fail.

        Args:
            reason: What they say.
        """
        self._ended = self._ended or reason
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def wait(self) -> None:
        """Wait until the process has ended."""
        try:
            self._process.wait(GRACE_SECONDS + ORPHAN_SECONDS + GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    async def _connect(self) -> tuple[str, str] | None:
        """Wait for the first frame; return the failure, if it is one."""
        reader, self._writer = await asyncio.open_connection(sock=self._channel)
        try:
            async with asyncio.timeout(START_SECONDS):
                first = parse_json(await read_frame(reader, MAX_ANSWER_BYTES))
            if "failure" not in first:
                self._listener = asyncio.create_task(self._listen(reader, self._writer))
                return None
            kind, reason = first["failure"]
        except TimeoutError:
            kind, reason = "deadline", f"its process was not ready within {START_SECONDS:g} s"
        except (asyncio.IncompleteReadError, ConnectionError, ValueError, TypeError):
            kind, reason = "crash", await self._how_it_ended()
        self.end(reason)
        self._writer.close()
        return kind, reason

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hand replies to those who wait for them, until the process ends."""
        try:
            while True:
                reply = parse_json(await read_frame(reader, MAX_ANSWER_BYTES))
                if "left" in reply:
                    self.left = str(reply["left"])
                elif reply["id"] in self._pending:
                    checked = _checked(reply)  # before the call is forgotten: a damaged reply ends all that wait
                    self._pending.pop(reply["id"]).set_result(checked)
        except (asyncio.IncompleteReadError, ConnectionError):
            reason = await self._how_it_ended()
        except (ValueError, TypeError, KeyError):
            reason = "its process sent an invalid answer"
        finally:
            writer.close()
        self.end(reason)
        for future in self._pending.values():
            future.set_result({"failure": ["crash", self._ended]})
        self._pending.clear()

    async def _how_it_ended(self) -> str:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_SECONDS):
                while self._process.poll() is None:
                    await asyncio.sleep(0.02)
        code = self._process.poll()
        if self._ended:
            return self._ended
        return "its process closed its channel" if code is None else f"its process died with exit code {code}"


def _checked(reply: dict[str, Any]) -> dict[str, Any]:
    if "answer" not in reply:
        kind, reason = reply["failure"]
        return {"failure": [str(kind), str(reason)]}
    return reply
