"""Tasksets of verifiers in our server, and in verifiers alone."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.public_environments import ENVIRONMENTS, serving
from tests.support.requirements import require
from tests.support.workflow_runs import ROOT

from posttrain.rl.environments.protocol import Message

PYTHON = ENVIRONMENTS / "verifiers/bin/python"
MODULES = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT / "workflow/src", ROOT / "tests/support")))}


@dataclass(frozen=True)
class Taskset:
    """A taskset of verifiers.

    Args:
        name: By which verifiers finds it.
        settings: Its own.
        variables: Of the processes' environment.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def words(self) -> list[str]:
        """The arguments by which our programs know it."""
        return [self.name, *(f"taskset.{name}={json.dumps(value)}" for name, value in self.settings.items())]

    def rows(self, *words: str) -> list[dict[str, Any]]:
        """Return the rows that our program writes."""
        printed = self._run("-m", "posttrain_verifiers", "rows", *words, *self.words)
        return [json.loads(line) for line in printed.splitlines()]

    def served(self, *words: str):
        """Serve it through our server."""
        command = ["-m", "posttrain_verifiers", "serve", "--port", "PORT", *words, *self.words]
        return serving("verifiers", command, "/", **MODULES, **self.variables)

    def alone(
        self, folder: Path, episodes: Sequence[tuple[Mapping[str, Any], Sequence[Message]]], **seat: Any
    ) -> list[dict[str, Any]]:
        """Return what verifiers says of episodes without posttrain.

        Args:
            folder: For a file.
            episodes: Rows, and the actions in each.
            seat: Settings of the agent's.
        """
        played = [{"task": row["verifiers_task"], "actions": list(map(_as_chat, actions))} for row, actions in episodes]
        script = folder / "script.json"
        content = {"taskset": self.name, "settings": self.settings, "seat": seat, "episodes": played}
        script.write_text(json.dumps(content))
        return json.loads(self._run(str(ROOT / "tests/support/verifiers_alone.py"), str(script)).splitlines()[-1])

    def _run(self, *words: str) -> str:
        require("environments", "" if (ENVIRONMENTS / "verifiers/.ready").exists() else f"{PYTHON} is not there")
        variables = {**os.environ, **MODULES, **self.variables}
        done = subprocess.run([PYTHON, *words], env=variables, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout


def _as_chat(action: Message) -> Message:
    """Return an action with its arguments as texts, as chat completions have them."""
    calls = action.get("tool_calls", ())
    given = [call["function"]["arguments"] for call in calls]
    texts = [value if isinstance(value, str) else json.dumps(value) for value in given]
    changed = [
        {**call, "function": {**call["function"], "arguments": text}} for call, text in zip(calls, texts, strict=True)
    ]
    return {**action, "tool_calls": changed} if changed else action
