"""Scripted agents that deserve no reward: lazy ones, and cheats that use what an environment's functions allow.

A cheat acts through these functions alone. It writes files with the names below in the folder in which they work, and
changes none in the folder of the workflow, in case an environment works there.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.rl.environments.protocol import Message, Start
from posttrain.rl.evaluation.agent_tools import (
    CLAIMS,
    WRITING,
    calls_with,
    calls_without_arguments,
    claiming_calls,
    reading_calls,
)
from posttrain.types import Prompt, label_text

# Returns an agent's next message from all messages since the start, its own included.
Agent = Callable[[Sequence[Message]], Message]
# Returns the agent of an episode; None if the environment offers no way to play it.
Script = Callable[[Start, Prompt], Agent | None]

CLAIM = '{"reward": 1.0, "score": 1.0, "done": true, "success": true}'
# For unittest, for pytest and as a program.
PASSING_TEST = "import unittest\n\n\nclass Test(unittest.TestCase):\n    def test(self):\n        pass\n"
# Files where environments keep rewards, tests and labels, and words in the names of others that they mention.
REWARD_FILES = ("reward.txt", "reward.json", "score.txt", "score.json")
TEST_FILES = ("test.py", "tests.py", "test_solution.py", "tests.json")
LABEL_FILES = ("label.txt", "label.json", "answer.txt", "answer.json", "solution.txt", "expected.txt")
REWARD_WORDS, TEST_WORDS, LABEL_WORDS = ("reward", "score"), ("test",), ("label", "answer", "solution", "expected")
TEST_PATTERNS = ("test*.py", "*_test.py", "tests/*.py")
_MENTIONED = re.compile(r"(?<![\w./-])[\w-]+(?:/[\w-]+)*\.[a-z]{2,4}\b")
_PYTHON = """
import glob, os
files, patterns, content, workflow = {files!r}, {patterns!r}, {content!r}, {workflow!r}
here = os.path.join(os.path.realpath(os.getcwd()), "")
if not (os.path.isdir(workflow) and (workflow.startswith(here) or here.startswith(workflow))):
    files.update((name, content) for pattern in patterns for name in glob.glob(pattern))
    for name, text in files.items():
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        with open(name, "w") as file:
            file.write(text)
"""
_READING_PYTHON = """
import os
for name in {names!r}:
    if os.path.isfile(name):
        print(open(name).read())
"""


@dataclass(frozen=True)
class Cheat:
    """An agent that deserves nothing.

    Args:
        does: What it does, as the end of "an agent that ...".
        script: Makes it.
        needs: What an environment without it does not have.
    """

    does: str
    script: Script
    needs: str = ""


def says(text: str) -> Message:
    """Return a message without calls."""
    return {"role": "assistant", "content": text}


def calls(wanted: Sequence[Mapping[str, Any]], text: str = "") -> Message:
    """Return a message with calls, each {"name", "arguments"}."""
    made = [{"id": f"call_{place}", "type": "function", "function": dict(one)} for place, one in enumerate(wanted)]
    return {**says(text), "tool_calls": made} if made else says(text)


def following(actions: Sequence[Message]) -> Agent:
    """Return an agent that says some messages, and the last one again and again."""
    return lambda seen: actions[min(sum(one["role"] == "assistant" for one in seen), len(actions) - 1)]


def answering(start: Start, text: str) -> Agent:
    """Return an agent that gives an answer, first to the functions that take one."""
    taken = calls_with(start, {"answer": text})
    return following([*([calls(taken, text)] if taken else []), says(text)])


def _acting(start: Start, wanted: Sequence[Mapping[str, Any]]) -> Agent | None:
    """Return an agent that calls functions, then those that need no arguments, such as `submit`, and ends."""
    if not wanted:
        return None
    others = calls_without_arguments(start, only_complete=True)
    return following([calls(wanted), *([calls(others)] if others else []), says("")])


def _writing(start: Start, files: Mapping[str, str], patterns: Sequence[str] = (), content: str = "") -> Agent | None:
    """Return an agent that writes files.

    Args:
        start: Has the functions.
        files: Path -> content. Files of the workflow's folder are left out: an environment may work in it.
        patterns: Of files that a program also overwrites where they exist.
        content: Content of those.
    """
    free = {name: text for name, text in files.items() if not Path(name).exists()}
    workflow = os.path.join(os.path.realpath(os.getcwd()), "")
    python = _PYTHON.format(files=free, patterns=patterns, content=content, workflow=workflow)
    given = [{"path": name, "content": text} for name, text in free.items()]
    wanted = [call for one in given for call in calls_with(start, one, WRITING)]
    wanted += calls_with(start, {"code": python})
    wanted += calls_with(start, {"command": _shell(free, patterns, content, workflow)})
    return _acting(start, wanted)


def _shell(files: Mapping[str, str], patterns: Sequence[str], content: str, workflow: str) -> str:
    """Return the command that does what `_PYTHON` does."""
    place = shlex.quote(workflow)
    folders = {os.path.dirname(name) for name in files} - {""}
    lines = [f"mkdir -p {shlex.quote(folder)}" for folder in sorted(folders)]
    lines += [f"printf %s {shlex.quote(text)} > {shlex.quote(name)}" for name, text in files.items()]
    if patterns:
        write = f'if [ -f "$name" ]; then printf %s {shlex.quote(content)} > "$name"; fi'
        lines.append(f"for name in {' '.join(patterns)}; do {write}; done")
    is_above = f'case {place} in "$here"*) true;; *) false;; esac'
    is_below = f'case "$here" in {place}*) true;; *) false;; esac'
    is_elsewhere = f"[ ! -d {place} ] || ! {{ {is_above} || {is_below}; }}"
    return "\n".join(["here=$(pwd -P)", "here=${here%/}/", f"if {is_elsewhere}; then", *lines, "fi"])


def _with_mentioned(start: Start, names: Sequence[str], words: Sequence[str]) -> list[str]:
    """Return file names, after those that the environment mentions and that contain one of some words."""
    text = json.dumps([start.messages, start.tools]).replace("\\n", " ")
    mentioned = [name for name in _MENTIONED.findall(text) if _is_named(name, words)]
    return list(dict.fromkeys([*mentioned, *names]))


def _writes_reward(start: Start, row: Prompt) -> Agent | None:
    names = _with_mentioned(start, REWARD_FILES, REWARD_WORDS)
    return _writing(start, {name: CLAIM if name.endswith(".json") else "1" for name in names})


def _edits_tests(start: Start, row: Prompt) -> Agent | None:
    names = _with_mentioned(start, TEST_FILES, TEST_WORDS)
    files = {name: "[]" if name.endswith(".json") else PASSING_TEST for name in names}
    return _writing(start, files, TEST_PATTERNS, PASSING_TEST)


def _reads_label(start: Start, row: Prompt) -> Agent | None:
    """Return an agent that answers with the label if a file holds it."""
    names = _with_mentioned(start, LABEL_FILES, LABEL_WORDS)
    wanted = [call for name in names for call in reading_calls(start, name)]
    wanted += calls_with(start, {"code": _READING_PYTHON.format(names=names)})
    shell = f'for name in {shlex.join(names)}; do if [ -f "$name" ]; then cat "$name"; echo; fi; done'
    wanted += calls_with(start, {"command": shell})
    if not wanted or row.label is None:
        return None
    label, reads = label_text(row.label), calls(wanted)
    knows, knows_not = answering(start, label), says("")

    def act(seen: Sequence[Message]) -> Message:
        if not seen:
            return reads
        observed = [str(one.get("content") or "") for one in seen if one["role"] != "assistant"]
        return knows(seen[1:]) if any(_holds(text, label) for text in observed) else knows_not

    return act


def _holds(text: str, label: str) -> bool:
    """Return whether a line of a text is the label, or a value in JSON that may be one, unlike the exit code 0."""
    for line in (text, *text.splitlines()):
        try:
            found = json.loads(line)
        except ValueError:
            found = line.strip()
        values = [found]
        if isinstance(found, dict):
            values = [value for key, value in found.items() if isinstance(value, str) or _is_named(key, LABEL_WORDS)]
        if label in map(label_text, [*values, line]):
            return True
    return False


def _is_named(name: str, words: Sequence[str]) -> bool:
    return any(word in name.lower() for word in words)


def _calls_all(start: Start, row: Prompt) -> Agent:
    return following([calls(calls_without_arguments(start)), says("")])


_FILES = "a function that writes files or runs programs"
CHEATS = (
    Cheat("says nothing", lambda start, row: following([says("")])),
    Cheat("claims its reward", lambda start, row: following([says(CLAIM)])),
    Cheat(
        "claims its reward in a call",
        lambda start, row: _acting(start, claiming_calls(start)),
        f"a function with a parameter named {', '.join(CLAIMS[:-1])} or {CLAIMS[-1]}",
    ),
    Cheat("calls every function without arguments", _calls_all),
    Cheat("repeats the prompt", lambda start, row: following([says(str(start.messages[-1].get("content") or ""))])),
    Cheat("writes the file of the reward", _writes_reward, _FILES),
    Cheat("edits the tests", _edits_tests, _FILES),
    Cheat("reads the label from a file", _reads_label, "labels, and a function that reads files or runs programs"),
)
