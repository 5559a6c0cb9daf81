"""The step as a whole: a head, a supervisor and a rank, killed with the head and begun again."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.support.calibrating import PASSES, contents, finished_shards, prepare
from tests.support.fault_record import FaultRecord
from tests.support.killing import SCRIPTS
from tests.support.resolved_words import words_with
from tests.support.tiny_checkpoint import TRAINED

from posttrain.store import (
    COVERAGE_NAME,
    Receipt,
    partial_of,
    pass_folders,
    read_receipt,
    receipt_of,
    record_files,
    require_files,
    write_receipt,
)
from posttrain.store.resolved_file import read_resolved


class Step:
    """A store with what the step needs, and its command line.

    Args:
        root: Everything lies below it.
        min_tokens: Of one of the passes.
    """

    def __init__(self, root: Path, min_tokens: int = 0):
        self.root, self.folder = root, root / "calibration"
        deep = dataclasses.replace(PASSES["deep"], min_tokens=min_tokens or PASSES["deep"].min_tokens)
        serving = {"passes": {**PASSES, "deep": deep}, "samples_per_shard": 1}
        self.words = words_with(TRAINED, serving=serving, site={"store": str(root)})
        prepare(root)
        config = read_resolved(Path(self.words[1])).config
        for name, folder in pass_folders(config).items():
            folder.parent.mkdir(exist_ok=True)
            (root / name).rename(folder)
            write_receipt(receipt_of(folder), Receipt("download_pass", record_files(folder), {}, {}))
        for name, step in (("hf", "patch_hf_config"), ("torch_dist", "finalize_torch_dist")):
            write_receipt(receipt_of(root / name), Receipt(step, record_files(root / name), {}, {}))

    def start(self) -> subprocess.Popen:
        hf, weights = self.root / "hf", self.root / "torch_dist"
        words = [
            *("--source", hf, "--source-receipt", receipt_of(hf)),
            *("--weights", weights, "--weights-receipt", receipt_of(weights)),
            *("--folder", self.folder, "--receipt", receipt_of(self.folder), "--log-folder", self.root / "logs"),
        ]
        command = [sys.executable, str(SCRIPTS / "calibrate.py"), *self.words, *map(str, words)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def run(self) -> tuple[int, str]:
        process = self.start()
        output, _ = process.communicate(timeout=240)
        return process.returncode, output


def kill(step: Step, shards: int) -> None:
    """Begin the step, and kill its head, which takes all others along, when so many shards more are finished."""
    goal, deadline = finished_shards(partial_of(step.folder)) + shards, time.monotonic() + 120
    process = step.start()
    while finished_shards(partial_of(step.folder)) < goal and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not receipt_of(step.folder).exists()


def check(step: Step) -> None:
    """Go on to the end, and find that what was made is whole."""
    code, output = step.run()
    assert code == 0, output
    assert "tokens per expert: median" in output.splitlines()[-1]
    assert "goes on behind shard" in (step.root / "logs" / "trainer0.log").read_text()
    require_files(step.folder, receipt_of(step.folder), content=True)
    names = sorted([*(f"{name}.safetensors" for name in PASSES), COVERAGE_NAME])
    assert sorted(path.name for path in step.folder.iterdir()) == names


@pytest.mark.faults("slow")
def test_a_step_whose_head_was_killed_goes_on(tmp_path: Path) -> None:
    step = Step(tmp_path)
    kill(step, shards=2)
    check(step)
    before = receipt_of(step.folder).read_bytes()
    assert step.run()[0] == 0
    assert receipt_of(step.folder).read_bytes() == before


@pytest.mark.timeout(1800)
@pytest.mark.faults("kills")
def test_many_killed_heads_leave_the_bytes_of_none(tmp_path: Path, faults: FaultRecord) -> None:
    calm, killed, begun = Step(tmp_path / "calm"), Step(tmp_path / "killed"), time.monotonic()
    assert calm.run()[0] == 0
    for _ in range(15):
        kill(killed, shards=1)
    check(killed)
    assert contents(calm.folder) == contents(killed.folder)
    calm_receipt, receipt = (read_receipt(receipt_of(step.folder)) for step in (calm, killed))
    assert receipt == calm_receipt
    faults.add_counts("kills", {"calibrate": 15}, time.monotonic() - begun)
    faults.equal = True


@pytest.mark.faults("slow")
def test_a_length_that_no_conversation_has_is_told_by_the_head(tmp_path: Path) -> None:
    code, output = Step(tmp_path, min_tokens=10**6).run()
    assert code == 1
    assert "serving.passes.deep.min_tokens = 1000000" in output
    assert not receipt_of(tmp_path / "calibration").exists()
