"""Secrets that tests put into the environment, and the ways in which one could get out."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

LOOK_SECONDS = 0.1
NAMES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "GITHUB_TOKEN")
# Longer than the 40 characters that W&B wants of a key.
CANARIES = {name: f"canary{number}" * 6 for number, name in enumerate(NAMES)}


def found_in(text: bytes | str) -> list[str]:
    """Return the names of the secrets that stand in a text."""
    content = text.encode() if isinstance(text, str) else text
    return [name for name, value in CANARIES.items() if value.encode() in content]


def found_below(folders: Iterable[Path]) -> list[tuple[Path, str]]:
    """Return the files with a secret in them, hidden ones too, each with the secret's name."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return [(path, name) for path in files for name in found_in(path.read_bytes())]


@contextmanager
def command_lines() -> Iterator[set[str]]:
    """Collect the command lines of all processes of the machine while the block runs."""
    seen: set[str] = set()
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(LOOK_SECONDS):
            for process in psutil.process_iter():
                try:
                    seen.add("\0".join(process.cmdline()))
                except psutil.Error:
                    continue

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield seen
        time.sleep(LOOK_SECONDS)
    finally:
        is_over.set()
        watcher.join()
