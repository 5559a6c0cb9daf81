"""SGLang's server with a secret: every route rejects requests without it.

It runs in SGLang's environment, which may lack this package. So it is started by path and imports only
`posttrain_weights` of ours, which SGLang imports in all of its processes.

The secret comes from the environment. SGLang's own `--api-key` would show it in the process list, and leaves routes
open: those that begin with /health, /ready or /metrics, web sockets, and every OPTIONS request.

It also restricts what else SGLang opens: on one node its ranks rendezvous in a file instead of a port on all addresses,
and the sockets of its processes are accessible to this user only.
"""

from __future__ import annotations

import hmac
import itertools
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

SECRET_VARIABLE = "POSTTRAIN_ENGINE_SECRET"
MEETING_VARIABLE = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"


class Hidden(str):
    """A string that hides itself when printed, because SGLang logs all of its arguments."""

    def __repr__(self) -> str:
        return "'(hidden)'"


class OnlyWithSecret:
    """ASGI middleware that refuses requests without the secret before reading their body.

    Args:
        app: The wrapped application.
        secret: Sent by SGLang's clients as `Authorization: Bearer ...`.
    """

    def __init__(self, app: Any, secret: str):
        self._app, self._wanted = app, f"Bearer {secret}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass on requests with the secret, and all other events."""
        if scope["type"] in ("http", "websocket") and not self._is_shown(scope):
            await _refuse(scope["type"], send)
        else:
            await self._app(scope, receive, send)

    def _is_shown(self, scope: Any) -> bool:
        shown = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(shown) == 1 and hmac.compare_digest(shown[0], self._wanted)


async def _refuse(kind: str, send: Any) -> None:
    if kind == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    headers = [(b"content-length", b"0"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def _tell_experts_in_bytes(http_server: Any) -> None:
    """Append routed experts to a /generate answer as bytes, instead of text within the JSON."""
    from sglang.srt.utils.json_response import dumps_json
    from starlette.responses import Response

    from posttrain_weights.routed_experts import behind_json

    plain = http_server.orjson_response

    def respond(content: Any, *args: Any, **kwargs: Any) -> Any:
        body = behind_json(content, dumps_json)
        return Response(body, media_type="application/x-json-and-routes") if body else plain(content, *args, **kwargs)

    http_server.orjson_response = respond


def main() -> None:
    """Run the server with SGLang's command line."""
    secret = Hidden(os.environ.pop(SECRET_VARIABLE, ""))
    if not secret:
        sys.exit(f"{SECRET_VARIABLE} is not set: it is what an engine and those whom it obeys share")
    os.umask(0o077)
    # SGLang's child processes inherit this path, and find the plug-in by its entry point.
    sys.path.append(str(Path(__file__).resolve().parents[3]))
    # The server sends itself HTTP requests with the secret, which must not go through a proxy.
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = "*"
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        if "--nnodes" not in sys.argv:
            words = dict(itertools.pairwise(sys.argv))
            # SGLang's kernels name shared resources by address and port, even if the rendezvous is a file.
            os.environ |= {"MASTER_ADDR": words["--host"], "MASTER_PORT": words["--port"]}
            os.environ[MEETING_VARIABLE] = f"file://{folder}/meeting"
        from sglang.launch_server import run_server
        from sglang.srt.entrypoints import http_server
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import prepare_server_args
        from sglang.srt.utils import kill_process_tree

        load_plugins()
        _tell_experts_in_bytes(http_server)
        http_server.app.add_middleware(OnlyWithSecret, secret=secret)
        arguments = prepare_server_args(sys.argv[1:])
        arguments.api_key = secret  # for its requests to itself
        try:
            run_server(arguments)
        finally:
            kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
