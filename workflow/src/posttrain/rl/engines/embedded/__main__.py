"""Start the embedded engine: `python -m posttrain.rl.engines.embedded --model-path DIR --port PORT`.

The port is bound before torch is imported, so that a port in use is reported within a second. A client that
connects while the model loads waits for its answer. Clients must send the secret from the engine's environment
(`rl.engines.secret`).
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import time
from pathlib import Path

from posttrain.cli import command_line, run
from posttrain.errors import ConfigError, Problem
from posttrain.rl.engines.secret import take_secret

log = logging.getLogger("engine")
# Time for open requests at shutdown; half of the supervisor's grace period (`processes.GRACE_SECONDS`).
STOP_SECONDS = 5.0
DTYPES = ("float32", "bfloat16")


def main() -> None:
    """Bind the port, load the model, and serve until a signal."""
    started = time.perf_counter()
    arguments = command_line(
        __doc__,
        model_path=(Path, "checkpoint folder in Hub layout, BF16 or FP8"),
        host={"default": "127.0.0.1"},
        port=int,
        served_threads={"type": int, "default": 0, "help": "CPU threads; 0: torch's choice"},
        dtype={"choices": DTYPES, "default": "float32", "help": "precision of weights and activations"},
        deterministic={
            "action": argparse.BooleanOptionalAction,
            "default": True,
            "help": "every request is a batch of its own; off, waiting requests are merged",
        },
        max_running_requests={"type": int, "default": 512, "help": "rows of a merged batch"},
        load_format={
            "choices": ("auto", "dummy"),
            "default": "auto",
            "help": "dummy: read no weights, the first update brings them",
        },
        weight_version={"default": "default", "help": "name of the weights in --model-path"},
    )
    secret = take_secret()
    listening = _listen(arguments.host, arguments.port)
    asyncio.run(_serve(arguments, secret, listening, started))


async def _serve(arguments: argparse.Namespace, secret: str, listening: socket.socket, started: float) -> None:
    import torch
    from aiohttp import web

    from posttrain.rl.engines.embedded.model import load_model
    from posttrain.rl.engines.embedded.server import make_application
    from posttrain.rl.engines.embedded.worker import Worker

    if arguments.served_threads:
        torch.set_num_threads(arguments.served_threads)
    has_weights = arguments.load_format == "auto"
    loaded = load_model(arguments.model_path, getattr(torch, arguments.dtype), has_weights)
    loaded.weights.version = arguments.weight_version
    worker = Worker(
        loaded.model,
        lambda: loaded.weights.version,
        not arguments.deterministic,
        arguments.max_running_requests,
        lambda: loaded.weights.is_whole,
    )
    worker.start()
    runner = web.AppRunner(make_application(loaded, worker, secret), access_log=None, shutdown_timeout=STOP_SECONDS)
    await runner.setup()
    await web.SockSite(runner, listening).start()
    # Installed only now: while the model loads there is nothing to close, and a signal should end the process at once.
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    host, port = listening.getsockname()[:2]
    log.info("ready on http://%s:%d after %.1f s", host, port, time.perf_counter() - started)
    await stop.wait()
    log.info("told to end")
    worker.stop(STOP_SECONDS)
    await runner.cleanup()


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=1024)
    except OSError as error:
        remedy = "choose another port, or end what listens there"
        problem = Problem(
            "port-in-use", "--port", f"{port} on {host} ({os.strerror(error.errno or 0)})", "a free port", remedy
        )
        raise ConfigError([problem]) from error


if __name__ == "__main__":
    run(main)
