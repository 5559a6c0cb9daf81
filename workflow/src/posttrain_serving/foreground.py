"""Runs an engine in the foreground: ready once it serves the exported weights, ended with this process."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import psutil

from posttrain.checkpoint.reference_logprobs import read_reference_logprobs
from posttrain.cluster.processes import end_processes, start_child
from posttrain.plan.flags.environment import started_with
from posttrain.plan.flags.flag import as_environment
from posttrain.rl.engines.calls import EngineError
from posttrain.rl.engines.process import ended_with_family
from posttrain.rl.engines.reference_logprobs import hold, told, wait_healthy
from posttrain.rl.engines.secret import SECRET_VARIABLE
from posttrain_serving.launch import Process

log = logging.getLogger(__name__)

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class ToldToEndError(SystemExit):
    """A signal requested the end of this process; the exit code is the shell's for that signal."""


def serve_in_foreground(
    process: Process,
    url: str,
    folder: Path | None,
    precision: str,
    ready_seconds: float,
) -> int:
    """Start an engine, check it against its checkpoint's reference log-probabilities, and return its exit code.

    Args:
        process: The process to start.
        url: URL of the engine; empty: another node's engine process serves requests.
        folder: The checkpoint; None if it is not on this machine.
        precision: Precision of its weights.
        ready_seconds: Time limit to become healthy.

    Raises:
        ConfigError: The engine serves other weights than the export; it was ended.
        RuntimeError: The engine did not become healthy in time or does not answer; it was ended.
        CheckpointError: The reference log-probabilities are unreadable.
    """
    canary = read_reference_logprobs(folder) if folder else None
    secret = os.environ.get(SECRET_VARIABLE, "") if process.is_ours else ""
    argv, told_by = ended_with_family(process.argv)
    child = start_child(argv, told_by, env=started_with(os.environ, as_environment(process.environment)))

    def check_process() -> None:
        if child.poll() is not None:
            raise EngineError(f"the engine ended with exit code {child.returncode} before it was ready")

    try:
        if url and canary:
            held = asyncio.run(hold(url, secret, canary, precision, ready_seconds, check_process))
            log.info("ready at %s: %s", url, told(held))
        elif url:
            asyncio.run(wait_healthy(url, secret, ready_seconds, check_process))
            log.info("healthy at %s; not checked: only exports of a training hold log-probabilities to check", url)
        return _wait(child)
    finally:
        end_processes([child])


def _wait(child: psutil.Popen) -> int:
    code = int(child.wait())
    return 128 - code if code < 0 else code


@contextmanager
def told_to_end() -> Iterator[None]:
    """Raise at the first signal to end; ignore further ones."""

    def end(number: int, _: FrameType | None) -> None:
        for one in ENDING:
            signal.signal(one, signal.SIG_IGN)
        raise ToldToEndError(128 + number)

    # With nohup or `&` the shell makes a process ignore a signal; keep ignoring it.
    heard = [one for one in ENDING if signal.getsignal(one) is not signal.SIG_IGN]
    before = {one: signal.signal(one, end) for one in heard}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
