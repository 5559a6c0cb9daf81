"""Serve sandboxes: `python -m posttrain.sandbox.serve --host ADDRESS --port PORT`.

For nodes that forbid namespaces: `sandbox.address` of a configuration names this address. Clients must show the secret
that the environment variable POSTTRAIN_SANDBOX_SECRET holds on both sides.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import time

from aiohttp import web

from posttrain.cli import command_line, run
from posttrain.config.sandbox import SANDBOX_SECRET_VARIABLE
from posttrain.errors import ConfigError, Problem
from posttrain.sandbox.guards import describe_guards
from posttrain.sandbox.messages import shared_secret
from posttrain.sandbox.program import REMEDY, Limits, Program, SandboxUnavailable
from posttrain.sandbox.run import run_sync
from posttrain.sandbox.service import make_application

log = logging.getLogger("sandbox")


def main() -> None:
    """Try a sandbox, then serve until a signal."""
    arguments = command_line(
        __doc__,
        host={"default": "127.0.0.1", "help": "address to listen on"},
        port=int,
        num_sandboxes={"type": int, "default": os.cpu_count() or 1, "help": "programs at a time; others wait"},
    )
    secret = shared_secret()
    del os.environ[SANDBOX_SECRET_VARIABLE]
    try:
        run_sync(Program("pass"), Limits())
    except SandboxUnavailable as error:
        raise ConfigError(
            [Problem("no-sandbox", "this node", str(error), "a node that can run sandboxes", REMEDY)]
        ) from error
    asyncio.run(_serve(arguments, secret))


async def _serve(arguments: argparse.Namespace, secret: str) -> None:
    started = time.perf_counter()
    application = make_application(secret, arguments.num_sandboxes)
    # The program of a client that goes away is ended.
    runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=0)
    await runner.setup()
    try:
        await web.TCPSite(runner, arguments.host, arguments.port).start()
    except OSError as error:
        value = f"{arguments.port} on {arguments.host} ({os.strerror(error.errno or 0)})"
        remedy = "choose another port, or stop the process that listens there"
        raise ConfigError([Problem("port-in-use", "--port", value, "a free port", remedy)]) from error
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    host, port = runner.addresses[0][:2]
    log.info("ready on http://%s:%d after %.1f s; %s", host, port, time.perf_counter() - started, describe_guards())
    await stop.wait()
    await runner.cleanup()


if __name__ == "__main__":
    run(main)
