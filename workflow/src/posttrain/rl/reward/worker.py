"""A process that grades: `python -m posttrain.rl.reward.worker DESCRIPTOR PARENT_PID MEMORY_BYTES [MODULE ...]`.

It reads jobs from a socket one by one, and answers each with its grades or a failure. Both directions use frames: the
length in 8 bytes, then a pickled job one way and JSON the other, so that the trainer unpickles nothing from a process
that ran a reward function.

A grader's side effects must not reach the next answer. `process_state` restores what it can. If threads, files or
memory remain, the process reports that with its answer and ends; the next answer gets a new process.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import resource
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from typing import Any

import psutil

from posttrain.cluster.processes import die_with_parent
from posttrain.rl.reward.answer import Failure
from posttrain.rl.reward.expression import warm_up
from posttrain.rl.reward.job import Grades, Job, grade_job, reason_of
from posttrain.rl.reward.process_state import ProcessState

# Message of a process that is ready for its first job.
READY = "ready"
HEADER = struct.Struct("!Q")
NO_MEMORY = "the worker had no memory left"


def main(descriptor: int, parent_pid: int, memory_bytes: int, modules: Sequence[str]) -> None:
    """Grade until the other side closes the socket, or the process state cannot be restored."""
    die_with_parent(parent_pid)
    # Ignore Ctrl-C, which reaches every process of the terminal: the trainer decides when a worker ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warm_up()
    for name in modules:
        importlib.import_module(name)
    most = psutil.Process().memory_info().vms + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    with socket.socket(fileno=descriptor) as channel:
        _send(channel, READY)
        state = ProcessState.now()
        while (packed := _receive(channel)) is not None:
            outcome, left = _grade(packed)
            left = left or state.restore()
            if not left and psutil.Process().memory_info().vms > most - memory_bytes // 2:
                left = f"more than half of {memory_bytes / 2**30:.3g} GiB (reward.memory_gib) in use"
            _send(channel, {"left": left, **_as_json(outcome)})
            if left:
                break
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    # Exit hard, so that a grader's threads and exit handlers cannot keep the process alive.
    os._exit(0)


def _grade(packed: bytes) -> tuple[Grades | Failure, str]:
    """Grade a packed job; also return the side effects that cannot be restored, "" if none."""
    source = ""
    try:
        job: Job = pickle.loads(packed)
        source = job.source
        return grade_job(job), ""
    except MemoryError:
        return Failure("crash", NO_MEMORY), "no memory"
    # `sys.exit()` in a reward function is an error of that function and does not end the process.
    except BaseException as error:
        return Failure("error", reason_of(error, source)), ""


def _as_json(outcome: Grades | Failure) -> dict[str, Any]:
    if isinstance(outcome, Failure):
        return {"failure": [outcome.kind, outcome.reason]}
    return {"grades": [[grade.score, grade.parts] for grade in outcome]}


def _send(channel: socket.socket, content: Any) -> None:
    packed = json.dumps(content).encode()
    channel.sendall(HEADER.pack(len(packed)) + packed)


def _receive(channel: socket.socket) -> bytes | None:
    """Return the next frame; None if the other side has closed the socket."""
    header = channel.recv(HEADER.size, socket.MSG_WAITALL)
    if len(header) < HEADER.size:
        return None
    (size,) = HEADER.unpack(header)
    packed = bytearray()
    while len(packed) < size:
        if not (chunk := channel.recv(min(size - len(packed), 1 << 20))):
            return None
        packed += chunk
    return bytes(packed)


if __name__ == "__main__":
    DESCRIPTOR, PARENT_PID, MEMORY_BYTES, *MODULES = sys.argv[1:]
    main(int(DESCRIPTOR), int(PARENT_PID), int(MEMORY_BYTES), MODULES)
