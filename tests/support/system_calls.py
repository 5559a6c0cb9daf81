"""Writes down the calls that decide what a kill or a power cut leaves, and makes each of them for real."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MOVES = ("replace", "rename", "link", "unlink", "utime", "mkdir")


class Calls:
    """What was done, in order: ("fsync", path), ("replace", from, to), ("unlink", path), ...

    Args:
        monkeypatch: Undoes it at the end of the test.
        look: Called before each of the calls with its name and paths.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, look: Callable[..., None] = lambda *call: None):
        self.made: list[tuple[str, ...]] = []
        fsync = os.fsync

        def sync(descriptor: int) -> None:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            look("fsync", path)
            fsync(descriptor)
            self.made.append(("fsync", path))

        monkeypatch.setattr(os, "fsync", sync)
        for name in MOVES:
            monkeypatch.setattr(os, name, self._recording(name, getattr(os, name), look))

    def _recording(self, name: str, function: Callable[..., Any], look: Callable[..., None]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            paths = [str(argument) for argument in arguments if isinstance(argument, str | Path)]
            look(name, *paths)
            result = function(*arguments, **more)
            self.made.append((name, *paths))
            return result

        return call

    def of(self, *names: str) -> list[tuple[str, ...]]:
        """Return the calls with these names."""
        return [call for call in self.made if call[0] in names]
