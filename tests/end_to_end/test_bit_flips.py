"""Single bits flipped in what a whole run has made: `verify` finds and names each.

`make test` flips a few with a fixed seed, `make test-faults` 1,000 (`POSTTRAIN_BIT_FLIPS`).
"""

from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path

import pytest
from tests.support.fault_record import FaultRecord
from tests.support.workflow_runs import ROOT, WorkflowFolder

from posttrain.checkpoint.reference_logprobs import CANARY_NAME
from posttrain.checkpoint.verification import find_uncovered, verify
from posttrain.plan.resolve import resolve
from posttrain.store import Paths

pytestmark = pytest.mark.slow

NUM_FLIPS = int(os.environ.get("POSTTRAIN_BIT_FLIPS", "1000"))
SEED = 12


@pytest.fixture
def paths(undisturbed: WorkflowFolder, tmp_path: Path) -> Paths:
    """Of a copy of the undisturbed run and its store."""
    shutil.copytree(undisturbed.store, tmp_path / "store")
    shutil.copytree(undisturbed.results, tmp_path / "results")
    settings = undisturbed.settings | {"site.store": tmp_path / "store", "site.results": tmp_path / "results"}
    chosen = {"model": "tiny", "site": "local", "set": " ".join(f"{key}={value}" for key, value in settings.items())}
    return Paths(resolve(chosen, ROOT / "config"))


def flip_and_find(paths: Paths, count: int) -> dict[str, int]:
    """Flip one bit at a time, verify, flip it back; returns how many were flipped by kind of file."""
    assert not [problem for verdict in verify(paths) for problem in verdict.problems]
    rng, flipped = random.Random(SEED), {}
    files = outputs_of(paths)
    for _ in range(count):
        path = rng.choice(files)
        bit = rng.randrange(path.stat().st_size * 8)
        flip(path, bit)
        problems = [problem for verdict in verify(paths) for problem in verdict.problems]
        assert any(str(path) in problem for problem in problems), f"bit {bit} of {path} was not found: {problems}"
        flip(path, bit)
        kind = path.suffix or path.name
        flipped[kind] = flipped.get(kind, 0) + 1
    assert not [problem for verdict in verify(paths) for problem in verdict.problems]
    return flipped


def outputs_of(paths: Paths) -> list[Path]:
    """Return every file that a receipt names, the receipts, and what one of them repeats."""
    listed = [paths.experiment, paths.begun_from]
    for verdict in verify(paths, content=False):
        artefact = verdict.artefact
        if artefact.receipt is not None and artefact.folder.is_relative_to(paths.store.parent):
            listed += [artefact.folder / record.path for record in artefact.receipt.files]
            listed += [artefact.receipt_path] if artefact.receipt.files else []
    return sorted(set(listed))


def flip(path: Path, bit: int) -> None:
    """Flip one bit of a file in place."""
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        old = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([old ^ 1 << bit % 8]))


def test_a_few_flipped_bits_are_found(paths: Paths) -> None:
    assert sum(flip_and_find(paths, 3).values()) == 3


def test_all_that_people_read_is_among_them(paths: Paths) -> None:
    files = outputs_of(paths)
    read = (
        paths.report,
        paths.summary,
        paths.config,
        paths.experiment,
        paths.metrics,
        paths.attempts,
        paths.begun_from,
    )
    records = [paths.node_record(node) for node in paths.resolved.config.site.node_names]
    assert {*read, *records, paths.evaluation("before"), paths.evaluation("after")} <= set(files)
    older, final = (paths.checkpoints / f"step_{step:06d}" for step in (2, 4))
    names = {path.name for path in files if path.parent == final}
    assert names - {path.name for path in files if path.parent == older} == {CANARY_NAME}
    assert {path.name for path in files if path.parent == older} < names
    logs = ("attempts", "lease", "job.config.yaml", "engines", "history.jsonl", "hf.parts", "node_local.staged")
    uncovered = find_uncovered(paths, verify(paths, content=False))
    assert not [name for name in uncovered if not any(word in name for word in logs)]


@pytest.mark.faults("bits")
@pytest.mark.timeout(3600)
def test_flipped_bits_are_found_by_the_thousand(paths: Paths, faults: FaultRecord) -> None:
    started = time.monotonic()
    flipped = flip_and_find(paths, NUM_FLIPS)
    faults.add_counts("bit_flips", flipped, time.monotonic() - started)
    faults.equal = True
