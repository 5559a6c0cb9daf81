"""Every command of docs/tutorial.md, in its order, in an empty folder outside of the clone."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.support.workflow_runs import ROOT

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs/tutorial.md"
# A block, the file that a line before it names, and at what a command is interrupted.
BLOCK = re.compile(
    r"(?:^`(?P<file>[\w./]+)`:\n\n)?^```(?P<kind>\w+)\n(?P<text>.*?)^```\n(?:<!-- interrupted at (?P<at>\S+) -->)?",
    re.MULTILINE | re.DOTALL,
)
LONGEST_SECONDS, LONGEST_WITH_INSTALLATION_SECONDS = 300, 900


class Block(NamedTuple):
    file: str | None
    kind: str
    text: str
    at: str | None


def blocks() -> Iterator[Block]:
    for match in BLOCK.finditer(PAGE.read_text()):
        yield Block(*match.group("file", "kind", "text", "at"))


def run_until(command: str, folder: Path, log: Path, interrupted_at: str | None, clone: Path) -> str:
    """Run a command as a shell does that belongs to a terminal, and return what it said."""
    path = f"{clone}/.venv/bin:{os.environ['PATH']}"
    with log.open("w") as output:
        process = subprocess.Popen(
            ["bash", "-e", "-c", command],
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "POSTTRAIN": str(clone), "PATH": path},
            start_new_session=True,
            # Whoever starts tests in the background has them ignore it, and all that they start.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        while interrupted_at and process.poll() is None and not (folder / interrupted_at).exists():
            time.sleep(0.1)
        if interrupted_at:
            assert process.poll() is None, log.read_text()
            os.killpg(process.pid, signal.SIGINT)
        process.wait(LONGEST_SECONDS)
    assert (process.returncode == 0) == (interrupted_at is None), log.read_text()
    return log.read_text()


def follow(folder: Path, clone: Path) -> None:
    """Do what the page says, in an empty folder."""
    said = ""
    for number, block in enumerate(blocks()):
        if block.file:
            (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.file).write_text(block.text)
        elif block.kind == "text":
            for line in block.text.splitlines():
                assert line in said
        elif not block.text.startswith("POSTTRAIN="):
            said = run_until(block.text, folder, folder.with_name(f"{number}.log"), block.at, clone)
    attempts = (folder / "results/sorting/train/attempts.jsonl").read_text().splitlines()
    assert len(attempts) == 2, "it was interrupted while it trained"


def test_every_command(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    follow(folder, ROOT)


@pytest.mark.faults("slow")
def test_a_fresh_clone_is_through_with_it_in_a_quarter_of_an_hour(tmp_path: Path) -> None:
    clone, folder, started = tmp_path / "posttrain", tmp_path / "mine", time.perf_counter()
    folder.mkdir()
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    subprocess.run(["make", "env"], cwd=clone, check=True)
    follow(folder, clone)
    assert time.perf_counter() - started < LONGEST_WITH_INSTALLATION_SECONDS


def test_all_blocks_are_found() -> None:
    found = list(blocks())
    assert len(found) == PAGE.read_text().count("\n```") // 2
    assert [block.file for block in found if block.file] == [*("rows.py", "my_reward.py", "my.yaml", "ask.py")]
    assert [block.at for block in found if block.at] == ["results/sorting/train/checkpoints/step_000010"]
