"""Servers of other libraries' environments, in Python environments of their own, and scripted actions for them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tests.support.requirements import require
from tests.support.workflow_runs import ROOT

from posttrain.config.load import merge
from posttrain.rl.engines.ports import choose_free_ports
from posttrain.rl.environments.kinds import environments_of
from posttrain.rl.environments.protocol import Message

ENVIRONMENTS = Path(os.environ.get("POSTTRAIN_ENVIRONMENTS") or ROOT / ".envs" / "environments")
START_SECONDS = 120


@contextlib.contextmanager
def serving(kind: str, words: list[str], ready: str, folder: Path | None = None, **variables: str) -> Iterator[str]:
    """Start a server in the environment of its kind; yield its address."""
    python = ENVIRONMENTS / kind / "bin" / "python"
    require("environments", "" if (ENVIRONMENTS / kind / ".ready").exists() else f"{python} is not there")
    (port,) = choose_free_ports(1)
    command = [str(python), *(word.replace("PORT", str(port)) for word in words)]
    with subprocess.Popen(command, cwd=folder, env={**os.environ, "HF_HUB_OFFLINE": "1", **variables}) as server:
        try:
            until = time.monotonic() + START_SECONDS
            while True:
                assert server.poll() is None
                assert time.monotonic() < until
                if _answers(f"http://127.0.0.1:{port}{ready}"):
                    break
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


def nemo_gym(module: str, name: str):
    """Serve a resources server of NeMo Gym."""
    script = str(ROOT / "tests/support/serve_nemo_gym.py")
    return serving("nemo-gym", [script, f"{module}:{name}", "PORT"], "/openapi.json")


def openenv(app: str, folder: Path, **variables: str):
    """Serve an environment of OpenEnv."""
    return serving("openenv", ["-m", "uvicorn", app, "--port", "PORT"], "/schema", folder, **variables)


def row_of(module: str) -> dict:
    """Return the first row of a resources server's own examples."""
    (folder,) = ENVIRONMENTS.glob("nemo-gym/lib/python*/site-packages/resources_servers")
    with (folder / module / "data/example.jsonl").open() as file:
        return json.loads(file.readline())


def act(*calls: tuple[str, object], text: str = "") -> Message:
    listed = [
        {"id": f"call_{place}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for place, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": text} | ({"tool_calls": listed} if listed else {})


def play(address: str, row: dict, *actions: Message, end: str = "done") -> tuple[list[str], float]:
    """Return what the agent has read after the start, and the reward with those of turns.

    Args:
        address: As in `data.environment`.
        row: Its columns.
        actions: The agent's. With the end "truncated" the last one is cut, and the environment does not answer it.
        end: Why the episode ends.
    """
    is_cut = end == "truncated"
    words = f"data.environment={address} data.reward=environment"
    config = merge({"model": "tiny", "site": "local", "set": words}, ROOT / "config").config

    async def episode():
        with environments_of(config) as environments:
            environment = await environments.open(3)
            try:
                start = await environment.reset({"messages": [], "label": None, **row})
                messages, read, of_turns, done = [*start.messages], [], 0.0, False
                for action in actions[:-1] if is_cut else actions:
                    assert not done
                    answer = await environment.step(action)
                    read += [message["content"] for message in answer.messages]
                    messages += [action, *answer.messages]
                    of_turns, done = of_turns + (answer.reward or 0.0), answer.done
                trajectory = {"messages": [*messages, *actions[-1:]] if is_cut else messages, "end": end}
                graded = await environment.reward(trajectory | {"num_turns": len(actions)})
                return read, of_turns + graded.reward
            finally:
                await environment.close()

    return asyncio.run(asyncio.wait_for(episode(), 60))


def _answers(url: str) -> bool:
    """Return whether a server answers, with whatever status."""
    try:
        urllib.request.urlopen(url, timeout=5)
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True
