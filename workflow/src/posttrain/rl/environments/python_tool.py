"""The environment `python`: questions, and a function that runs a Python program in a sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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


class PythonTool:
    """The agent may call `python` and ends the episode with a response without a call, which `math_answer` grades.

    Args:
        seed: Not used; nothing is random.
        settings: Fields of the section `sandbox`.

    Raises:
        ConfigError: A sandbox service is named, and the environment has no secret for it.
    """

    def __init__(self, seed: int, **settings: Any):
        given = SandboxSettings(**settings)
        self._run, self._limits = runner_of(given), Limits.of(given)
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
        return [await self._answer_to(call) for call in calls], False

    async def reward(self, trajectory: Mapping[str, Any]) -> float:
        """Return 1 if the final answer is the label, otherwise 0.

        Raises:
            ValueError: The label cannot be read.
        """
        return grade(GRADER, Answer(self._answer, self._label)).score or 0.0

    async def _answer_to(self, call: Mapping[str, Any]) -> Message:
        return {"role": "tool", "tool_call_id": call["id"], "content": await self._result(call["function"])}

    async def _result(self, function: Mapping[str, Any]) -> str:
        """Return what the agent reads after a call."""
        arguments = function["arguments"]
        if function["name"] != NAME:
            return f"error: there is no function {function['name']!r:.80}; call {NAME}"
        code = arguments.get("code") if isinstance(arguments, dict) else None
        if not isinstance(code, str) or not code.strip():
            return "error: give the argument code, a text"
        return observation_of(await self._run(Program(code), self._limits))


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
