"""A process that hosts environments: `python -m posttrain.rl.environments.worker MEMORY_BYTES SOURCE [PARENT_PID]`.

Its standard input is a socket to the trainer. With PARENT_PID it only supervises: it starts itself without, and ends
everything that environments have started when that process ends, the parent ends, or the parent says so.

All instances share one event loop. An `async def` method of an environment runs in it, so it must not block; a plain
method runs in a thread of its own. Prints go to the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import json
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import psutil

from posttrain.cluster.processes import adopt_orphans, die_with_parent, end_processes, run_with_family
from posttrain.rl.environments.frames import MAX_ANSWER_BYTES, frame_of, read_frame
from posttrain.rl.reward.job import reason_of
from posttrain.rl.reward.own import load_module
from posttrain.rl.reward.process_state import MAX_KEPT_FILES

NO_MEMORY = "the process ran out of memory"
# Plain methods that run at the same time, and the stack of each.
MAX_THREADS, STACK_BYTES = 64, 4 << 20
_THREADS = "environment"


def main(memory_bytes: int, source: Mapping[str, str]) -> None:
    """Host environments until the trainer closes the socket.

    Args:
        memory_bytes: Limit on memory mapped beyond that after the import of the environment.
        source: "path", "name" and "digest" of the user's class, or "module" and "name" of one of ours, perhaps
            with "settings", further arguments as JSON.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of the terminal
    channel = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    try:
        make = _class_of(source)
    except BaseException as error:
        channel.sendall(frame_of({"failure": ["error", reason_of(error, source.get("path", ""))]}))
        os._exit(1)
    most = psutil.Process().memory_info().vms + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    threading.stack_size(STACK_BYTES)
    asyncio.run(Host(make, source.get("path", ""), most, memory_bytes).serve(channel))


def _class_of(source: Mapping[str, str]) -> Callable[[int], Any]:
    own = "path" in source
    module = load_module(source["path"], source["digest"]) if own else importlib.import_module(source["module"])
    made: Callable[..., Any] = getattr(module, source["name"])
    return partial(made, **json.loads(source["settings"])) if "settings" in source else made


class Host:
    """The environments of this process.

    Args:
        make: Makes an environment from a seed.
        source: The user's file; "" for a built-in environment.
        most: Memory that the process may map, in bytes.
        memory_bytes: How much of that is for environments.
    """

    def __init__(self, make: Callable[[int], Any], source: str, most: int, memory_bytes: int):
        self._make, self._source = make, source
        self._most, self._memory = most, memory_bytes
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix=_THREADS)
        self._instances: dict[int, Any] = {}
        # The call of each instance that runs one, and the instances whose call can be cancelled: plain ones cannot.
        self._running: dict[int, asyncio.Task[Any]] = {}
        self._cancellable: set[int] = set()
        self._serving: set[asyncio.Task[Any] | None] = set()
        self._num_files = 0

    async def serve(self, channel: socket.socket) -> None:
        """Answer requests, each {"id", "instance", "method", "argument"}, until the other side closes the channel."""
        reader, writer = await asyncio.open_connection(sock=channel)
        self._num_files = _num_files()
        self._serving.add(asyncio.current_task())
        writer.write(frame_of({"ready": True}))
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                request = json.loads(await read_frame(reader))
                if request["method"] == "cancel":
                    self._cancel(request["instance"])
                    continue
                task = asyncio.create_task(self._answer(request, writer))
                self._serving.add(task)
                task.add_done_callback(self._serving.discard)
        # Exit hard, so that threads and exit handlers of environments cannot keep the process alive.
        os._exit(0)

    async def _answer(self, request: Mapping[str, Any], writer: asyncio.StreamWriter) -> None:
        left = ""
        try:
            reply = frame_of({"id": request["id"], "answer": await self._call(request)}, _plain)
            if len(reply) > MAX_ANSWER_BYTES:
                raise ValueError(f"an answer of {len(reply)} bytes exceeds the limit of {MAX_ANSWER_BYTES}")
        except MemoryError:
            left, reply = "no memory", frame_of({"id": request["id"], "failure": ["crash", NO_MEMORY]})
        except asyncio.CancelledError:
            reply = frame_of({"id": request["id"], "failure": ["error", "its call was cancelled"]})
        except BaseException as error:  # `sys.exit()` of an environment is its error and does not end the process
            reason = reason_of(error, self._source)
            reply = frame_of({"id": request["id"], "failure": ["error", reason.encode(errors="replace").decode()]})
        if left := left or self._left_behind():
            writer.write(frame_of({"left": left}))
        writer.write(reply)

    async def _call(self, request: Mapping[str, Any]) -> Any:
        number, method, argument = request["instance"], request["method"], request["argument"]
        if method == "open":
            self._instances[number] = await self._run(number, self._make, argument)
            return None
        if method == "close":
            return await self._close(number)
        instance = self._instances[number]
        if method == "perfect" and not hasattr(instance, method):
            return None
        return SHAPES[method](await self._run(number, getattr(instance, method), argument))

    async def _close(self, number: int) -> None:
        """Close an instance after the call that still runs in it, if any."""
        if task := self._cancel(number):
            await asyncio.wait([task])
        instance = self._instances.pop(number, None)
        if hasattr(instance, "close"):
            await self._run(number, instance.close)

    def _cancel(self, number: int) -> asyncio.Task[Any] | None:
        """Cancel the call that runs in an instance if it can be; return it."""
        task = self._running.get(number)
        if task and number in self._cancellable:
            task.cancel()
        return task

    async def _run(self, number: int, function: Callable[..., Any], *arguments: Any) -> Any:
        task = asyncio.current_task()
        assert task is not None
        self._running[number] = task
        try:
            if inspect.iscoroutinefunction(function):
                result = function(*arguments)
            else:
                result = await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)
                if not inspect.isawaitable(result):
                    return result
            self._cancellable.add(number)
            return await result
        finally:
            self._cancellable.discard(number)
            del self._running[number]

    def _left_behind(self) -> str:
        """Return what environments have not given back, "" if that is little: a new process takes the next ones."""
        if psutil.Process().memory_info().vms > self._most - self._memory // 2:
            return f"more than half of {self._memory / 2**30:.3g} GiB (environment.memory_gib) in use"
        num_files, (most, _) = _num_files(), resource.getrlimit(resource.RLIMIT_NOFILE)
        if num_files > (most // 2 if self._instances else self._num_files + MAX_KEPT_FILES):
            return f"{num_files - self._num_files} open files"
        if self._instances:
            return ""
        for task in asyncio.all_tasks() - self._serving:
            task.cancel()
        threads = [thread for thread in threading.enumerate() if not thread.name.startswith(_THREADS)]
        return f"{len(threads) - 1} running threads" if len(threads) > 1 else ""


def _start(result: Any) -> dict[str, Any]:
    try:
        messages, tools = result
    except (TypeError, ValueError):
        raise TypeError(f"reset returned {result!r:.80}; expected (messages, tools)") from None
    return {"messages": messages, "tools": tools}


def _observation(result: Any) -> dict[str, Any]:
    try:
        messages, done, *rest = result
        (reward,) = rest or [None]
    except (TypeError, ValueError):
        raise TypeError(
            f"step returned {result!r:.80}; expected (messages, done) or (messages, done, reward)"
        ) from None
    return {"messages": messages, "done": done, "reward": reward}


def _reward(result: Any) -> dict[str, Any]:
    parts = dict(result) if isinstance(result, Mapping) else {"reward": result}
    return {"reward": parts.pop("reward", None), "parts": parts}


def _actions(result: Any) -> dict[str, Any]:
    texts = [{"role": "assistant", "content": action} if isinstance(action, str) else action for action in result]
    return {"messages": texts}


# What each method returns, as it is sent.
SHAPES: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "reset": _start,
    "step": _observation,
    "reward": _reward,
    "perfect": _actions,
}


def _plain(value: Any) -> Any:
    """Return a number of numpy or torch as Python's.

    Raises:
        TypeError: The value is something else.
    """
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not a JSON type")


def _num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def supervise(words: Sequence[str], parent_pid: int) -> int:
    """Run a worker, and end all that it has started when it has ended or the trainer's thread has.

    Args:
        words: The worker's arguments.
        parent_pid: The trainer.

    Returns:
        The worker's exit code.
    """
    die_with_parent(parent_pid, signal.SIGTERM)
    adopt_orphans()
    code = run_with_family([sys.executable, "-P", "-u", "-m", "posttrain.rl.environments.worker", *words])
    os.dup2(2, 0)  # this end of the socket was kept open for the worker
    end_processes(psutil.Process().children())
    return code


if __name__ == "__main__":
    MEMORY_BYTES, SOURCE, *PARENT_PID = sys.argv[1:]
    if PARENT_PID:
        sys.exit(supervise([MEMORY_BYTES, SOURCE], int(PARENT_PID[0])))
    main(int(MEMORY_BYTES), json.loads(SOURCE))
