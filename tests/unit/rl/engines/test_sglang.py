"""What this package says to SGLang, held against SGLang 0.5.23 itself (no server; those are end-to-end
tests)."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.support.sglang_environment import require_sglang, run_in_sglang

from posttrain.plan.resolve import resolve
from posttrain.rl.engines import sglang_server
from posttrain.rl.engines.launch_command import render_engine_command
from posttrain.rl.engines.responses import NO_WEIGHTS
from posttrain.rl.engines.tensor_payload import serialize_bucket

ROOT = Path(__file__).parents[4]

pytestmark = pytest.mark.sglang

READ_PAYLOAD = """
import json, sys
from sglang.srt.utils import MultiprocessingSerializer
tensors = MultiprocessingSerializer.deserialize(json.load(sys.stdin))
print("RESULT", json.dumps([[name, str(t.dtype), list(t.shape), t.float().flatten().tolist()] for name, t in tensors]))
"""
PARSE_FLAGS = """
import json, sys
from sglang.srt.server_args import prepare_server_args
for argv in json.load(sys.stdin):
    parsed = prepare_server_args(argv)
    parallel = [parsed.tp_size, parsed.attn_dp_size, parsed.page_size, parsed.device]
    print("RESULT", json.dumps([*parallel, parsed.load_format, parsed.weight_version]))
"""


ASK_EVERY_ROUTE = """
import asyncio, json, runpy, sys
from sglang.srt.entrypoints.http_server import app

ours = runpy.run_path(json.load(sys.stdin))
guarded = ours["OnlyWithSecret"](app, ours["Hidden"]("of the attempt"))

async def ask(kind, method, path, shown):
    told = []
    headers = [(b"host", b"x"), *([(b"authorization", shown)] if shown is not None else [])]
    scope = {"type": kind, "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
             "headers": headers, "method": method, "http_version": "1.1", "scheme": "http", "subprotocols": []}
    async def send(message):
        told.append([message["type"], message.get("status", message.get("code"))])
    async def receive():
        told.append(["read", None])
        raise RuntimeError("the body is read")
    await guarded(scope, receive, send)
    return [kind, method, path, told]

def all_of(routes):
    for route in routes:
        yield from all_of(route.original_router.routes) if hasattr(route, "original_router") else [route]

async def main():
    routes = [("websocket" if not hasattr(route, "methods") else "http", method, route.path)
              for route in all_of(app.routes) for method in sorted(getattr(route, "methods", None) or {"GET"})]
    routes += [("http", "OPTIONS", "/generate"), ("http", "GET", "/metrics/x"), ("http", "POST", "/nothing")]
    shown = [None, b"", b"Bearer ", b"of the attempt", b"Bearer of the attemps", b"Bearer (hidden)"]
    for route in routes:
        print("RESULT", json.dumps([await ask(*route, header) for header in shown]))

asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def environment():
    require_sglang()


def test_no_route_of_its_own_application_answers_who_does_not_show_the_secret():
    """Nor is a byte of a body read. `--api-key` alone would leave /health, /metrics, web sockets and more open."""
    answers = [answer for answers in run_in_sglang(ASK_EVERY_ROUTE, sglang_server.__file__) for answer in answers]
    asked = {(kind, method, path) for kind, method, path, _ in answers}
    assert len(asked) > 100
    for kind, path in (("http", "/generate"), ("http", "/update_weights_from_disk"), ("websocket", "/v1/realtime")):
        assert (kind, path) in {(kind, path) for kind, _, path in asked}
    refused = {
        "http": [["http.response.start", 401], ["http.response.body", None]],
        "websocket": [["websocket.close", 1008]],
    }
    assert not [answer for answer in answers if answer[3] != refused[answer[0]]]


def test_what_shows_the_secret_and_what_is_no_request_is_passed_on():
    import asyncio

    passed = []

    async def application(scope, receive, send):
        passed.append(scope["type"])

    guarded = sglang_server.OnlyWithSecret(application, sglang_server.Hidden("s"))
    right, twice = [(b"authorization", b"Bearer s")], [(b"authorization", b"Bearer s")] * 2

    async def refuse(message):
        passed.append(message.get("status"))

    for scope in ({"type": "lifespan"}, {"type": "http", "headers": right}, {"type": "http", "headers": twice}):
        asyncio.run(guarded(scope, None, refuse))
    assert passed == ["lifespan", "http", 401, None]
    assert repr({"api_key": sglang_server.Hidden("s")}) == "{'api_key': '(hidden)'}"


def test_the_launcher_needs_nothing_of_ours():
    code = f"import runpy, sys; runpy.run_path({sglang_server.__file__!r}); assert 'posttrain' not in sys.modules"
    subprocess.run([sys.executable, "-P", "-S", "-c", code], env={}, check=True, timeout=60)


def test_its_unpickler_reads_our_payload():
    values = torch.tensor([[1.5, -2.0], [0.25, 448.0]])
    bucket = [
        ("a", values),
        ("b", values.bfloat16()),
        ("c", values.to(torch.float8_e4m3fn)),
        ("d", values.t()),
    ]
    (read,) = run_in_sglang(READ_PAYLOAD, serialize_bucket(bucket))
    assert read == [[name, str(t.dtype), [2, 2], t.float().flatten().tolist()] for name, t in bucket]


def test_its_parser_knows_our_flags():
    argv = []
    for workflow in ({"model": "tiny", "set": "engine.kind=sglang"}, {"model": "glm5"}):
        config = resolve({"site": "local", **workflow}, ROOT / "config").config
        command = render_engine_command(
            config, 0, Path("/m"), "127.0.0.1", 30000, first_node="node0:5000", without_weights=True
        )
        argv.append(command.argv[3:])
    on_cpu, on_cuda = run_in_sglang(PARSE_FLAGS, argv)
    assert on_cpu[0] == 1
    assert on_cpu[3] == "cpu"
    assert on_cuda[:3] == [64, 64, 64]
    assert on_cpu[4:] == on_cuda[4:] == ["dummy", NO_WEIGHTS]
