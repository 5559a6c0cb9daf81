"""A taskset on the base classes of verifiers: find a digit with a tool. It runs in the environment of that library.

Calls of the tool are noted in the file that the variable COMPARE_CALLS names, if it is set.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import verifiers.v1 as vf

__all__ = ["CompareTaskset"]
FAULTS = ("setup", "hangs", "reward", "not a number", "no reward", "scoring takes too long")


class CompareToolset(vf.Toolset[vf.ToolsetConfig]):
    """Tools of the task."""

    TOOL_PREFIX = None

    @vf.tool
    async def compare(self, digit: int, number: int) -> str:
        """Compare two digits."""
        if path := os.environ.get("COMPARE_CALLS"):
            with Path(path).open("a") as file:
                file.write(f"{digit} {number}\n")
        return "equal" if digit == number else "greater" if number > digit else "less"


class CompareData(vf.TaskData):
    """A digit, and what goes wrong."""

    number: int
    fault: str = ""


class CompareConfig(vf.TaskConfig):
    """Settings of the task."""

    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class CompareTask(vf.Task[CompareData, vf.State, CompareConfig]):
    """The agent has to say the digit in few words, within four responses."""

    @classmethod
    def toolsets(cls, config: CompareConfig) -> list[vf.Toolset]:
        return [CompareToolset(config.tools)]

    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        if self.data.fault == "setup":
            raise RuntimeError("a defect")
        if self.data.fault == "hangs":
            await runtime.run(["sleep", "600.25"], {})

    @vf.stop
    async def enough(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 4

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))

    @vf.reward(weight=0.75)
    async def right(self, trace: vf.Trace) -> float | dict[str, float]:
        if self.data.fault == "reward":
            raise KeyError("gold")
        if self.data.fault == "no reward":
            return {}
        if self.data.fault == "scoring takes too long":
            await asyncio.sleep(600)
        return float("nan") if self.data.fault == "not a number" else float(str(self.data.number) in trace.last_reply)

    @vf.reward(weight=-0.25)
    async def long(self, trace: vf.Trace) -> float | dict[str, float]:
        return {} if self.data.fault == "no reward" else float(len(trace.last_reply) > 10)


class CompareTasksetConfig(vf.TasksetConfig):
    """Settings of the taskset."""

    task: CompareConfig = CompareConfig()


class CompareTaskset(vf.Taskset[CompareTask, CompareTasksetConfig]):
    """One digit without a fault, and one with each."""

    def load(self) -> Iterator[CompareTask]:
        for number, fault in enumerate(("", *FAULTS), start=3):
            data = CompareData(
                name=fault or "fine",
                system_prompt="Answer with a digit.",
                prompt=f"Which digit is it? The number is {number}.",
                number=number,
                fault=fault,
                timeout=vf.TaskTimeout(scoring=0.5) if "too long" in fault else vf.TaskTimeout(),
            )
            yield CompareTask(data, self.config.task)


if __name__ == "__main__":
    CompareToolset.run()
