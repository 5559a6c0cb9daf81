"""The environment `python`: questions, and a function that runs a Python program in a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from posttrain.config.environment import MAX_PROGRAMS
from posttrain.config.sandbox import SandboxSettings
from posttrain.rl.environments.protocol import Message
from posttrain.rl.reward.answer import Answer
from posttrain.rl.reward.grade import grade
from posttrain.sandbox.client import runner_of
from posttrain.sandbox.program import Limits, Program, Result

NAME = "python"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Runs a Python program and returns what it prints. Nothing is kept for the next call.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The program; it has to print its results"}},
            "required": ["code"],
        },
    },
}
# Characters of an output that the agent reads, half from its beginning and half from its end.
MAX_CHARACTERS = 4000
GRADER = "math_answer"
# Open files of a running sandbox, generously, and the part of what a process may open that is left to sandboxes: when
# half is open, the worker takes it for left behind.
FILES_PER_SANDBOX, FILES_SHARE = 8, 1 / 4


class PythonTool:
    """The agent may call `python` and ends the episode with a response without a call, which `math_answer` grades.

    Args:
        seed: Not used; nothing is random.
        num_workers: Processes that share this machine's CPUs.
        settings: Fields of the section `sandbox`.

    Raises:
        ConfigError: A sandbox service is named, and the environment has no secret for it.
    """

    def __init__(self, seed: int, num_workers: int = 1, **settings: Any):
        given = SandboxSettings(**settings)
        self._run, self._limits = runner_of(given), Limits.of(given)
        # A service has a limit of its own.
        self._num_at_once = 0 if given.address else max_sandboxes(num_workers)
        self._label: Any = None
        self._answer = ""

    async def reset(self, row: Mapping[str, Any]) -> tuple[list[Message], list[dict[str, Any]]]:
        """Ask the row's prompt."""
        self._label = row["label"]
        return [dict(message) for message in row["messages"]], [TOOL]

    async def step(self, action: Message) -> tuple[list[Message], bool]:
        """Answer calls with what their programs print; without a call, the episode has ended.

        Raises:
            SandboxUnavailable: No sandbox can run, which is no fault of the agent's.
        """
        calls = action.get("tool_calls") or []
        if not calls:
            self._answer = action["content"]
            return [], True
        return [await self._answer_to(call, number) for number, call in enumerate(calls)], False

    async def reward(self, trajectory: Mapping[str, Any]) -> float:
        """Return 1 if the final answer is the label, otherwise 0.

        Raises:
            ValueError: The label cannot be read.
        """
        return grade(GRADER, Answer(self._answer, self._label)).score or 0.0

    async def _answer_to(self, call: Mapping[str, Any], number: int) -> Message:
        too_many = f"error: at most {MAX_PROGRAMS} calls in one message"
        content = too_many if number >= MAX_PROGRAMS else await self._result(call["function"])
        return {"role": "tool", "tool_call_id": call["id"], "content": content}

    async def _result(self, function: Mapping[str, Any]) -> str:
        """Return what the agent reads after a call."""
        arguments = function["arguments"]
        if function["name"] != NAME:
            return f"error: there is no function {function['name']!r:.80}; call {NAME}"
        code = arguments.get("code") if isinstance(arguments, dict) else None
        if not isinstance(code, str) or not code.strip():
            return "error: give the argument code, a text"
        turn = _turns(asyncio.get_running_loop(), self._num_at_once) if self._num_at_once else contextlib.nullcontext()
        async with turn:
            return observation_of(await self._run(Program(code), self._limits))


@lru_cache(maxsize=1)
def _turns(loop: asyncio.AbstractEventLoop, num_at_once: int) -> asyncio.Semaphore:
    """Return what programs of all environments in an event loop wait for: their time limit runs once they start."""
    return asyncio.Semaphore(num_at_once)


def max_sandboxes(num_workers: int) -> int:
    """Return how many sandboxes a worker may run at the same time: one per CPU, if it may open their files."""
    num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_cpus = len(os.sched_getaffinity(0))
    return max(1, min(num_cpus // num_workers, int(num_files * FILES_SHARE) // FILES_PER_SANDBOX))


def observation_of(result: Result) -> str:
    """Return what a program has printed and, unless it ended well, what it said of that."""
    printed = _shortened(result.stdout)
    if result.is_success:
        return printed
    how = f"exit code {result.exit_code}" if result.ended == "exit" else result.ended
    said = _shortened(result.stderr)
    return "\n".join(filter(None, [printed.rstrip("\n"), f"error: {how}", said]))


def _shortened(output: bytes) -> str:
    text = output.decode(errors="replace")
    left_out = len(text) - MAX_CHARACTERS
    half = MAX_CHARACTERS // 2
    return f"{text[:half]}\n... {left_out} characters ...\n{text[-half:]}" if left_out > 0 else text
