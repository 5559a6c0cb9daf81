"""Every command of docs/tutorial.md, in its order, in an empty folder outside of the clone.

`make test` does what comes before training, with a model that has learned nothing; `make test-faults PART=slow` does
all of it.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.support.tiny_checkpoint import make_random_checkpoint
from tests.support.workflow_runs import ROOT

from posttrain.checkpoint.tiny.tokenizer import make_tokenizer, stop_token_ids
from posttrain.plan.resolve import resolve

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs/tutorial.md"
# A block, the file that a line before it names, and at what a command is interrupted.
BLOCK = re.compile(
    r"(?:^`(?P<file>[\w./]+)`:\n\n)?^```(?P<kind>\w+)\n(?P<text>.*?)^```\n(?:<!-- interrupted at (?P<at>\S+) -->)?",
    re.MULTILINE | re.DOTALL,
)
# The first block that computes for long.
TRAINING = "snakemake -s $POSTTRAIN/Snakefile --cores 2 --configfile my.yaml\n"
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


def follow(folder: Path, clone: Path, wanted: Iterable[Block]) -> None:
    """Do what blocks of the page say, in a folder."""
    said = ""
    for number, block in enumerate(wanted):
        if block.file:
            (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.file).write_text(block.text)
        elif block.kind == "text":
            for line in block.text.splitlines():
                assert line in said
        elif not block.text.startswith("POSTTRAIN="):
            said = run_until(block.text, folder, folder.with_name(f"{number}.log"), block.at, clone)


def follow_all(folder: Path, clone: Path) -> None:
    """Do all of it in an empty folder."""
    folder.mkdir()
    follow(folder, clone, blocks())
    attempts = (folder / "results/sorting/train/attempts.jsonl").read_text().splitlines()
    assert len(attempts) == 2, "it was interrupted while it trained"


# Eight commands, each a process of its own.
def test_every_command_before_training(tmp_path: Path) -> None:
    """The first one makes the model."""
    folder = tmp_path / "mine"
    architecture = resolve({"model": "tiny_qwen3", "site": "local"}, ROOT / "config").config.model.architecture
    make_random_checkpoint(folder / "my_model", architecture, seed=1)
    make_tokenizer(architecture.max_position_embeddings).save_pretrained(folder / "my_model")
    (folder / "my_model/generation_config.json").write_text(json.dumps({"eos_token_id": stop_token_ids()}))
    page = [block for block in blocks() if "make_tiny_model" not in block.text]
    assert any(block.text == TRAINING for block in page)
    follow(folder, ROOT, itertools.takewhile(lambda block: block.text != TRAINING, page))
    assert (folder / "configs/models/mine.yaml").exists()


@pytest.mark.faults("slow")
def test_every_command(tmp_path: Path) -> None:
    follow_all(tmp_path / "mine", ROOT)


@pytest.mark.faults("slow")
def test_a_fresh_clone_is_through_with_it_in_a_quarter_of_an_hour(tmp_path: Path) -> None:
    clone, started = tmp_path / "posttrain", time.perf_counter()
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    subprocess.run(["make", "env"], cwd=clone, check=True)
    follow_all(tmp_path / "mine", clone)
    assert time.perf_counter() - started < LONGEST_WITH_INSTALLATION_SECONDS


def test_all_blocks_are_found() -> None:
    found = list(blocks())
    assert len(found) == PAGE.read_text().count("\n```") // 2
    assert [block.file for block in found if block.file] == [
        *("rows.py", "my_reward.py", "my.yaml", "ask.py", "second_try.py")
    ]
    assert [block.at for block in found if block.at] == ["results/sorting/train/checkpoints/step_000010"]
