"""What bash itself passes to `train.py`, and how an import compares with it.

Each script runs in an empty folder. A `python3` first on PATH writes its arguments down and does nothing else.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from posttrain_import.script import FLAG, Script, Word, flags_of

STUB = '#!/bin/sh\n{ printf "%s\\0" "$@"; printf "\\1\\0"; } >> "$CALLS"\n'


def calls_of(text: str, beside: Mapping[str, str] | None = None) -> list[list[str]]:
    """Return the words that each call of `train.py` gets.

    Args:
        text: Of the script.
        beside: Name -> text of files that lie beside it.
    """
    with tempfile.TemporaryDirectory() as folder:
        programs, place, calls = Path(folder, "bin"), Path(folder, "run"), Path(folder, "calls")
        programs.mkdir()
        place.mkdir()
        for name in ("python3", "python"):
            (programs / name).write_text(STUB)
            (programs / name).chmod(0o755)
        for name, content in {**(beside or {}), "run.sh": text}.items():
            (place / name).write_text(content)
        # Only what a shell always has: a default of the script's is one.
        environment = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": folder, "CALLS": str(calls), "TERM": "dumb"}
        subprocess.run(
            ["bash", "run.sh"], cwd=place, env=environment, capture_output=True, stdin=subprocess.DEVNULL,
            timeout=60, check=False,
        )  # fmt: skip
        if not calls.exists():
            return []
        words = [call.split("\0")[:-1] for call in calls.read_bytes().decode().split("\1\0")[:-1]]
    found = []
    for call in words:
        place_of = next((at for at, word in enumerate(call) if re.search(r"(^|/)train(_async)?\.py$", word)), None)
        if place_of is not None:
            found.append(call[place_of + 1 :])
    return found


def wrong(script: Script, calls: list[list[str]]) -> list[str]:
    """Return each flag that an import knows otherwise than some call gets it, or keeps silent about."""
    found = []
    for call in calls or [[]]:
        passed = flags_of(Word(word, "", "") for word in call).flags
        for name, given in script.flags.items():
            if not given.why and (name not in passed or passed[name].values != given.values):
                there = passed[name].values if name in passed else "none"
                found.append(f"{name} is {given.values} here and {there} in bash")
        silent = [name for name in passed if name not in script.flags and not script.unread]
        found += [f"{name} is not named" for name in silent]
    return found


def known(script: Script, calls: list[list[str]]) -> tuple[int, int]:
    """Return how many flags of the last call are known, and how many there are."""
    passed = flags_of(Word(word, "", "") for word in calls[-1]).flags if calls else {}
    return sum(name in script.flags and not script.flags[name].why for name in passed), len(passed)


def flags_in(text: str) -> list[str]:
    """Return the flags that a text spells."""
    return FLAG.findall(text)
