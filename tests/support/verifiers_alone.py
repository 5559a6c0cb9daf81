"""Plays scripted actions with verifiers alone, whose harness is its own `null`; prints what it says of each episode.

Usage: python verifiers_alone.py SCRIPT     prints a JSON list; runs in that library's environment, without posttrain

A script is a JSON object: `taskset`, `settings` of the taskset, `seat` of the agent, and `episodes`, each with a `task`
and `actions`, which are messages of an assistant. The harness's program runs in this interpreter, not in one of uv's.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from aiohttp import web
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.configs.env import EnvConfig
from verifiers.v1.dialects.chat import ChatDialect
from verifiers.v1.env import Env
from verifiers.v1.runtimes import Runtime
from verifiers.v1.utils.loaders import load_environment, resolve_env_config


class Model:
    """An endpoint that answers with the actions in turn."""

    def __init__(self, actions: list[dict[str, Any]]):
        self._actions, self.asked = [*actions], list[list[dict[str, Any]]]()

    async def complete(self, request: web.Request) -> web.Response:
        """Stream the next action."""
        self.asked.append((await request.json())["messages"])
        action = self._actions.pop(0)
        choice = {"index": 0, "message": action, "finish_reason": "tool_calls" if "tool_calls" in action else "stop"}
        raw = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        return web.Response(body=b"".join(ChatDialect().stream_events(raw)), content_type="text/event-stream")


async def in_this_interpreter(runtime: Runtime, script: str, env: Any = None, *, activate: bool = True) -> list[str]:
    """Stand in for `Runtime.prepare_uv_script`."""
    with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as file:
        file.write(script)
    return [sys.executable, file.name]


async def play(environment: Env, episode: dict[str, Any]) -> dict[str, Any]:
    """Return what verifiers says of an episode, and what its agent has read."""
    model, app = Model(episode["actions"]), web.Application()
    app.router.add_post("/v1/chat/completions", model.complete)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    address = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    kind = type(environment.taskset).task_type()
    task = kind(kind.data_type().model_validate(episode["task"]), environment.config.taskset.task)
    context = ModelContext("m", EvalClientConfig(base_url=address, api_key_var="NO_KEY"))
    (slot,) = environment.slots(task)
    played = await environment.run_slot(slot, context)
    await runner.cleanup()
    return {
        "ok": played.ok,
        "rewards": [trace.reward for trace in played.traces],
        "read": [message["content"] for message in model.asked[-1] if message["role"] != "assistant"],
        "num_asked": len(model.asked),
    }


async def main() -> None:
    """Play the script's episodes."""
    script = json.loads(Path(sys.argv[1]).read_text())
    content = {"taskset": {**script["settings"], "id": script["taskset"]}}
    (seat,) = agent_config_fields(resolve_env_config(content))
    content[seat] = {**script["seat"], "harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    config: EnvConfig = resolve_env_config(content)
    Runtime.prepare_uv_script = in_this_interpreter
    environment = load_environment(config)
    async with environment.serving():
        print(json.dumps([await play(environment, episode) for episode in script["episodes"]]))


if __name__ == "__main__":
    asyncio.run(main())
