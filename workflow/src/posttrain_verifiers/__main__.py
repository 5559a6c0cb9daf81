"""Serves a taskset of verifiers, writes its tasks as rows, or gives verifiers an engine (docs/environments.md)."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys

from aiohttp import web

from posttrain_verifiers.engine import TokenEndpoint
from posttrain_verifiers.server import TasksetServer
from posttrain_verifiers.taskset import config_of, make_environment, rows_of


def main(words: list[str]) -> None:
    """Serve until the process is ended, or print rows."""
    parser = argparse.ArgumentParser(prog="posttrain_verifiers", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    rows = commands.add_parser("rows", help="print the tasks as rows of data, one JSON object a line")
    rows.add_argument("--limit", type=int, help="number of rows")
    serve = commands.add_parser("serve", help="serve the environment")
    engine = commands.add_parser("engine", help="answer verifiers' training client with an engine of SGLang's API")
    engine.add_argument("address", help="of the engine: http://host:port")
    for command, port in ((serve, 8400), (engine, 8500)):
        command.add_argument("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0: all of this machine's")
        command.add_argument("--port", type=int, default=port)
    serve.add_argument("--idle-seconds", type=float, default=3600.0, help="a session without a call so long is closed")
    for command in (rows, serve):
        command.add_argument("taskset", help="name of an installed taskset, such as textarena")
        command.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="verifiers' own, below `env`")
    given = parser.parse_args(words)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    if given.command == "engine":
        _listen(TokenEndpoint(given.address).app(), given.host, given.port)
        return
    try:
        config = config_of(given.taskset, given.settings)
        if given.command == "rows":
            # What a taskset itself prints is no row.
            with contextlib.redirect_stdout(sys.stderr):
                for row in rows_of(config, given.limit):
                    print(json.dumps(row, ensure_ascii=False), file=sys.__stdout__)
            return
        app = TasksetServer(make_environment(config), given.idle_seconds).app()
    except (ValueError, TypeError, ImportError) as error:
        sys.exit(f"{given.taskset}: {error}")
    _listen(app, given.host, given.port)


def _listen(app: web.Application, host: str, port: int) -> None:
    # A client that goes away in `reset` does not know the session, and cannot close it.
    web.run_app(
        app,
        host=host,
        port=port,
        print=lambda text: print(text, flush=True),
        handler_cancellation=True,
        shutdown_timeout=1.0,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
