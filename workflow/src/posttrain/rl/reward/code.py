"""The grader `code`: runs the last Python block of a response in a sandbox against the row's tests.

The program never sees what is expected: outputs and values are compared outside of its sandbox. So nothing that it
prints, returns or writes can be its verdict.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from posttrain.config.schema import Config
from posttrain.http_answers import parse_json
from posttrain.rl.reward.answer import Answer, Failure, Grade
from posttrain.rl.reward.assert_tests import VALUES, AssertTests
from posttrain.rl.reward.code_tests import CallTest, StdinTest, read_tests
from posttrain.rl.reward.job import reason_of
from posttrain.sandbox.client import runner_of
from posttrain.sandbox.program import Limits, Program, Result, Runner, SandboxUnavailable

NAME = "code"
# Two numbers with a decimal point are equal within this share of the expected one, or this distance below 1.
TOLERANCE = Decimal("1e-6")
_BLOCK = re.compile(
    r"^[ \t]*```[ \t]*(?:python|python3|py)(?:[ \t][^\n]*)?\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE | re.IGNORECASE
)
# More digits are compared as text: arithmetic with them would take time.
_MAX_DIGITS = 100
# Collections within each other in a value.
_MAX_NESTING = 100
Outcome = dict[str, Any]


class CodeGrader:
    """Grades programs by tests.

    Args:
        runner: Runs a program in a sandbox.
        limits: Limits of one test.
        num_workers: Sandboxes at a time, over all callers.
    """

    def __init__(self, runner: Runner, limits: Limits, num_workers: int):
        self._runner, self._limits, self._num_workers = runner, limits, num_workers
        self._turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    @classmethod
    def of(cls, config: Config) -> CodeGrader:
        """Return the grader of a configuration.

        Raises:
            ConfigError: A sandbox service is named, and the environment has no secret for it.
        """
        return cls(runner_of(config.sandbox), Limits.of(config.sandbox), config.reward.num_workers)

    async def grade_all(self, answers: Sequence[Answer]) -> list[Grade | Failure]:
        """Return the grade of each answer: 1 if all tests pass, otherwise 0, with the share that passes as a part."""
        return list(await asyncio.gather(*map(self._grade, answers)))

    async def _grade(self, answer: Answer) -> Grade | Failure:
        try:
            if answer.label is None:
                return Grade(None)
            tests = read_tests(answer)
            program = last_block(answer.text)
            if not program:
                return Grade(0.0, {"passed": 0.0})
            passed = await (
                self._assert(tests, program) if isinstance(tests, AssertTests) else self._test(tests, program)
            )
        except SandboxUnavailable as error:
            return Failure("sandbox", str(error))
        except Exception as error:
            return Failure("error", reason_of(error))
        return Grade(float(all(passed)), {"passed": sum(passed) / len(passed)})

    async def _test(self, tests: Sequence[StdinTest] | Sequence[CallTest], program: str) -> list[bool]:
        """Return which tests pass, each in a sandbox of its own; after one that takes too long the others fail."""
        is_late = False

        async def passes(test: StdinTest | CallTest) -> bool:
            nonlocal is_late
            async with self._turn():
                if is_late:
                    return False
                run = self._call(test, program) if isinstance(test, CallTest) else self._feed(test, program)
                passed, result = await run
            is_late = is_late or result.ended == "time"
            return passed

        tasks = [asyncio.create_task(passes(test)) for test in tests]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _feed(self, test: StdinTest, program: str) -> tuple[bool, Result]:
        if len(test.expected) > self._limits.output_bytes:
            raise ValueError("a test expects more output than sandbox.output_kib allows")
        result = await self._runner(Program(program, stdin=test.stdin.encode(errors="surrogatepass")), self._limits)
        return result.is_success and same_output(result.stdout.decode(errors="replace"), test.expected), result

    async def _call(self, test: CallTest, program: str) -> tuple[bool, Result]:
        outcomes, result = await self._evaluate([("call", test.function, test.arguments)], program)
        value = _plain(outcomes[0]["value"]) if "value" in outcomes[0] else math.nan
        return any(same_value(value, expected) for expected in test.expected), result

    async def _assert(self, tests: AssertTests, program: str) -> list[bool]:
        """Return which asserts hold about the values of a solution."""
        async with self._turn():
            outcomes, _ = await self._evaluate(tests.steps, program)
            values = [outcome for (kind, *_), outcome in zip(tests.steps, outcomes, strict=True) if kind == "eval"]
            asked = json.dumps({"name": VALUES, "outcomes": values, "checks": tests.checks}).encode()
            # The values may be as long as the solution's output.
            limits = dataclasses.replace(self._limits, output_kib=max(self._limits.output_kib, tests.num_asserts))
            result = await self._runner(Program(_harness("check_harness"), stdin=asked), limits)
        if not result.is_success:
            return [False] * tests.num_asserts if result.ended != "exit" else _refuse(result)
        return list(map(bool, parse_json(result.stdout)))

    async def _evaluate(self, steps: Sequence[Sequence[Any]], program: str) -> tuple[list[Outcome], Result]:
        """Return the outcome of each step beside a solution; those that it does not reach are errors."""
        files = {"solution.py": program.encode(errors="surrogatepass")}
        asked = Program(_harness("call_harness"), stdin=json.dumps(steps).encode(), files=files)
        result = await self._runner(asked, self._limits)
        outcomes = [_outcome(line) for line in result.stdout.split(b"\n")[: len(steps)] if line]
        return outcomes + [{"error": result.ended}] * (len(steps) - len(outcomes)), result

    def _turn(self) -> asyncio.Semaphore:
        # A semaphore is bound to the event loop that first awaits it.
        return self._turns.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._num_workers))


def last_block(text: str) -> str:
    """Return the last complete ```python block of a response; "" if there is none."""
    blocks = _BLOCK.findall(text.replace("\r\n", "\n"))
    return str(blocks[-1]) if blocks else ""


def same_output(printed: str, expected: str) -> bool:
    """Return whether two outputs are equal, white space at the ends of lines and of the text apart.

    Words that are numbers with a decimal point in the expected output are compared as numbers.
    """
    ours, theirs = ([line.split() for line in text.strip().splitlines()] for text in (printed, expected))
    return len(ours) == len(theirs) and all(
        len(one) == len(other) and all(map(_same_word, one, other)) for one, other in zip(ours, theirs, strict=True)
    )


def same_value(value: Any, expected: Any) -> bool:
    """Return whether two values of JSON types are equal, floats within `TOLERANCE`."""
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(same_value, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(same_value(value[key], expected[key]) for key in value)
    if isinstance(value, bool) is not isinstance(expected, bool):
        return False
    if isinstance(expected, float) and isinstance(value, int | float):
        try:
            return math.isclose(value, expected, rel_tol=float(TOLERANCE), abs_tol=float(TOLERANCE))
        except OverflowError:  # a whole number beyond all floats
            return False
    return bool(value == expected)


def _same_word(one: str, other: str) -> bool:
    if one == other:
        return True
    if "." not in other or max(len(one), len(other)) > _MAX_DIGITS:
        return False
    try:
        ours, theirs = Decimal(one), Decimal(other)
        return abs(ours - theirs) <= TOLERANCE * max(Decimal(1), abs(theirs))
    except (InvalidOperation, ArithmeticError):
        return False


def _outcome(line: bytes) -> Outcome:
    """Return a step's outcome. A solution can write any line, but only into its own outcomes."""
    try:
        found = parse_json(line)
    except ValueError:
        return {"error": "unreadable"}
    is_one = isinstance(found, dict) and len({"value", "error"} & {*found}) == 1
    return found if is_one and not _is_nested_deeper(found, _MAX_NESTING) else {"error": "unreadable"}


def _is_nested_deeper(value: Any, levels: int) -> bool:
    if not isinstance(value, list | dict):
        return False
    items = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_nested_deeper(item, levels - 1) for item in items)


def _plain(value: Any) -> Any:
    """Return a value of `call_harness.plain` with lists in place of tuples; no other collection is in JSON tests."""
    try:
        if not isinstance(value, list):
            return value
        letter, *items = value
        if letter == "d":
            return {str(_plain(key)): _plain(item) for key, item in items}
        return list(map(_plain, items)) if letter in ("t", "l") else math.nan
    except (ValueError, TypeError, RecursionError):
        return math.nan


def _refuse(result: Result) -> list[bool]:
    said = (result.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
    raise ValueError(f"the row's tests cannot be evaluated: {said}")


@lru_cache
def _harness(name: str) -> str:
    return Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
