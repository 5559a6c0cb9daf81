"""Every step that writes to the store or to a node's disk, with the power cut at random moments.

What a cut leaves on the disk is the crash image: whatever receipt is on it must be true, and the same command must lead
to the undisturbed run's bytes. `make test` cuts a few times with a fixed seed; `make test-faults` cuts 100 times
(`POSTTRAIN_CRASH_IMAGES`) and adds its row to `.test-results/faults.json`.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from tests.support import saving
from tests.support.checkpoint_store import DIMENSIONS, NUM_PARTS, Store, make_store, run_here
from tests.support.fault_record import FaultRecord
from tests.support.interruptions import (
    Driver,
    assert_gone,
    check_claims,
    files_made,
    processes_of,
    start,
    wait_or_end,
)
from tests.support.killing import run_killed
from tests.support.power_cut import Disk, new_disk
from tests.support.resolved_words import words_with
from tests.support.workflow_runs import WorkflowFolder

from posttrain.rl.training.checkpoints import committed_checkpoints
from posttrain.store import (
    manifest_of,
    part_receipt_of,
    partial_of,
    read_receipt,
    receipt_of,
    require_files,
    write_text,
)

NUM_IMAGES = int(os.environ.get("POSTTRAIN_CRASH_IMAGES", "100"))
# Of these, so many while `snakemake` runs the steps and keeps its own records on the same disk.
NUM_WORKFLOW_IMAGES = NUM_IMAGES // 10
SEED = 24
# No step changes files more often; a point beyond a step's last change lets it end.
MOST_CHANGES = 60
TARGETS = ("finalize_torch_dist", "finalize_rollout_fp8")
# Changes of files at which training is cut, each from where the one before has left it.
TRAINING_POINTS = [41, 41, 50]
DATA = {"kind": "sort_digits", "num_digits": 3, "num_train_prompts": 64, "num_heldout_prompts": 16, "seed": 7}


@dataclass(frozen=True)
class Step:
    """One script of the data plane on a store.

    Args:
        script: Its name.
        arguments: Its command line.
        receipt: What makes it count as done.
        folder: What the receipt is about.
        is_part: The folder has another name until all parts are there.
    """

    script: str
    arguments: list[object]
    receipt: Path
    folder: Path
    is_part: bool = False

    @property
    def outputs(self) -> list[Path]:
        """Return everything that it writes, of parts and of what joins them only what belongs to them alone."""
        if self.is_part or self.script.startswith("finalize"):
            return [self.receipt]
        return [self.receipt, self.folder, partial_of(self.folder)]


def steps_of(store: Store) -> Iterator[Step]:
    """Yield the steps in the order of the data; each finds what the one before has made."""
    root = store.root
    dataset, hf, patched = root / "dataset", root / "hf", root / "hf_patched"
    yield Step(
        "download_dataset",
        [*words_with(data=DATA), "--folder", dataset, "--receipt", receipt_of(dataset)],
        receipt_of(dataset),
        dataset,
    )
    yield from _download_steps(hf, root.parent / "origin" / "hf_patched")
    source = ["--source", hf, "--source-receipt", receipt_of(hf)]
    more = DIMENSIONS
    yield Step("patch_hf_config", [*source, *_to("folder", patched), *more], receipt_of(patched), patched)
    for name, part_step, last_step in (
        ("torch_dist", "convert_hf_to_torch_dist", "finalize_torch_dist"),
        ("rollout_fp8", "quantize", "finalize_quantized"),
        ("serving", "quantize", "finalize_quantized"),
    ):
        folder = store.folder(name)
        for part in range(NUM_PARTS):
            yield Step(part_step, store.part(name, part), part_receipt_of(folder, part), folder, is_part=True)
        yield Step(last_step, store.finalize(name), receipt_of(folder), folder)
    export = store.folder("exported")
    for part in range(NUM_PARTS):
        yield Step("export_hf", store.export(part, "exported"), part_receipt_of(export, part), export, is_part=True)
    yield Step("finalize_export_hf", store.finalize_export("exported"), receipt_of(export), export)


def _download_steps(hf: Path, origin: Path) -> Iterator[Step]:
    manifest, listed = manifest_of(hf), ["--manifest", manifest_of(hf), "--folder", hf]
    source = ["--kind", "folder", "--source-folder", origin]
    yield Step("list_hf_checkpoint", [*source, *listed], manifest, hf, is_part=True)
    parts = [part_receipt_of(hf, part) for part in range(NUM_PARTS)]
    for part, receipt in enumerate(parts):
        more = ["--part", part, "--num-parts", NUM_PARTS, "--receipt", receipt]
        yield Step("download_hf_checkpoint", [*listed, *more], receipt, hf, is_part=True)
    arguments = [*listed, "--part-receipts", *parts, "--receipt", receipt_of(hf)]
    yield Step("finalize_hf_checkpoint", arguments, receipt_of(hf), hf)


def _to(option: str, folder: Path) -> list[object]:
    return [f"--{option}", folder, "--receipt", receipt_of(folder)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """All steps, once, on a disk that keeps its power."""
    root = tmp_path_factory.mktemp("undisturbed")
    make_store(root / "origin")
    store = Store(root / "store")
    for step in steps_of(store):
        run_here(step.script, step.arguments)
    return store


@pytest.fixture
def disk(tmp_path: Path, undisturbed: Store) -> Iterator[Disk]:
    """A disk with the origin on it."""
    with new_disk(tmp_path) as disk:
        make_store(disk.folder / "origin")
        os.sync()
        yield disk


def cut_all_steps(disk: Disk, undisturbed: Store, points_of: Callable[[], list[int]]) -> dict[str, int]:
    """Run every step with cuts, then compare everything; returns how often the power was cut during each.

    Args:
        disk: With the origin.
        undisturbed: What must come out.
        points_of: Returns for the next step at which changes of it the power is cut.
    """
    store = Store(disk.folder / "store")
    cuts: dict[str, int] = {}
    for step in steps_of(store):
        cuts[step.script] = cuts.get(step.script, 0) + cut_step(disk, step, [*points_of(), 10**9])
    for ours, theirs in zip(steps_of(store), steps_of(undisturbed), strict=True):
        if ours.script == "list_hf_checkpoint":
            # No receipt; what was made from it is compared.
            continue
        assert read_receipt(ours.receipt).files == read_receipt(theirs.receipt).files, ours.script
        require_files(ours.folder, ours.receipt, content=True)
    return cuts


def cut_step(disk: Disk, step: Step, points: list[int], forgetful: bool = False) -> int:
    """Run a step once per point, with a cut in each; returns how many hit. What is left must never be wrong."""
    endings = run_killed(
        step.script,
        step.arguments,
        disk.folder,
        points,
        claim=None if step.is_part else (step.folder, step.receipt),
        disk=disk,
        again=step.outputs,
        forgetful=forgetful,
    )
    assert set(endings) <= {0, -9}, (step.script, endings)
    assert endings[-1] == 0
    return endings.count(-9)


def test_the_disk_loses_what_was_not_synced_and_nothing_else(tmp_path: Path) -> None:
    with new_disk(tmp_path) as disk:
        write_text(disk.folder / "synced", "here")
        (disk.folder / "unsynced").write_text("lost")
        disk.cut()
        assert [path.name for path in disk.folder.iterdir()] == ["synced"]
        (disk.folder / "renamed.tmp").write_text("lost")
        (disk.folder / "renamed.tmp").rename(disk.folder / "renamed")
        write_text(disk.folder / "synced", "anew")
        disk.cut()
        assert (disk.folder / "synced").read_text() == "anew"
        assert (disk.folder / "renamed").read_bytes() == b"", "the name came with the other's sync, the data did not"


def test_a_step_that_does_not_sync_its_files_is_found_out(disk: Disk) -> None:
    """So the other tests here can fail."""
    step = next(step for step in steps_of(Store(disk.folder / "store")) if step.script == "download_dataset")
    with pytest.raises(AssertionError):
        cut_step(disk, step, [*range(20, 40), 10**9], forgetful=True)


@pytest.mark.faults("images")
def test_a_power_cut_in_every_step(disk: Disk, undisturbed: Store) -> None:
    rng = random.Random(SEED)
    cuts = cut_all_steps(disk, undisturbed, lambda: [rng.randint(5, 25)])
    assert sum(cuts.values()) >= 8, cuts


def cut_training(folder: Path, points: list[int], forgetful: bool = False) -> int:
    """Let one rank train to the end on a disk, with cuts at these changes; returns how many hit."""
    with new_disk(folder) as disk:
        endings = run_killed(
            str(Path(saving.__file__).with_suffix("")),
            [disk.folder],
            disk.folder,
            [*points, 10**9],
            disk=disk,
            forgetful=forgetful,
            timeout=60 + 60 * len(points),
        )
        done = disk.folder / "run/train/done.json"
        assert set(endings) <= {0, -9}, endings
        assert endings[-1] == 0
        assert done.exists()
        saving.check(disk.folder)
        steps = [step for step, _ in committed_checkpoints(done.parent / "checkpoints")]
        assert steps == [saving.NUM_STEPS - 1, saving.NUM_STEPS], "of these the newest are kept"
    return endings.count(-9)


def test_a_power_cut_while_training_saves(tmp_path: Path) -> None:
    assert cut_training(tmp_path, TRAINING_POINTS) == len(TRAINING_POINTS)


def test_a_file_of_training_that_is_visible_before_its_bytes_is_found_out(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"is not what was written|: not a rollout"):
        cut_training(tmp_path, TRAINING_POINTS, forgetful=True)


@pytest.mark.faults("images")
@pytest.mark.timeout(3600)
def test_power_cuts_while_training_saves(tmp_path: Path, faults: FaultRecord) -> None:
    rng, started = random.Random(SEED + 3), time.monotonic()
    points = [rng.randint(1, MOST_CHANGES) for _ in range(NUM_IMAGES)]
    num_cuts = cut_training(tmp_path, points)
    faults.add_counts("crash_images", {"training": num_cuts}, time.monotonic() - started)
    faults.equal = True


@pytest.mark.faults("images")
@pytest.mark.timeout(3600)
def test_power_cuts_by_the_hundred(disk: Disk, undisturbed: Store, faults: FaultRecord) -> None:
    rng, started = random.Random(SEED + 1), time.monotonic()
    wanted = NUM_IMAGES - NUM_WORKFLOW_IMAGES
    # Two in five points, at least, lie before a step's last change.
    most = -(-wanted * 5 // (2 * len(list(steps_of(undisturbed)))))
    cuts = cut_all_steps(disk, undisturbed, lambda: [rng.randint(1, MOST_CHANGES) for _ in range(most)])
    faults.add_counts("crash_images", cuts, time.monotonic() - started)
    assert sum(cuts.values()) >= wanted, cuts
    faults.equal = True


@pytest.mark.faults("images")
@pytest.mark.timeout(3600)
def test_power_cuts_under_the_workflow(tmp_path: Path, store: Path, faults: FaultRecord) -> None:
    rng, started, num_cuts = random.Random(SEED + 2), time.monotonic(), 0
    with new_disk(tmp_path, 2048) as disk:
        workflow = WorkflowFolder(disk.folder / "work", disk.folder / "store")
        shutil.copytree(store / "made", workflow.store / "made")
        os.sync()
        driver = start(workflow, *TARGETS)
        while num_cuts < NUM_WORKFLOW_IMAGES or driver.process.poll() is None:
            ended = wait_or_end(driver, rng.uniform(3, 12) if num_cuts < NUM_WORKFLOW_IMAGES else math.inf)
            assert driver.process.returncode in (None, 0), driver.output[-4000:]
            if ended and num_cuts < NUM_WORKFLOW_IMAGES:
                shutil.rmtree(workflow.store / "tiny")
            elif not ended:
                cut_power(disk, driver)
                num_cuts += 1
            if num_cuts < NUM_WORKFLOW_IMAGES or not ended:
                driver = start(workflow, *TARGETS)
        faults.add_counts("crash_images", {"workflow": num_cuts}, time.monotonic() - started)
        assert files_made(workflow).items() <= files_made(WorkflowFolder(tmp_path, store)).items()
        assert len(list(workflow.store.glob("tiny/*/*.receipt.json"))) == 4
        check_claims(workflow)
        faults.equal = True


def cut_power(disk: Disk, driver: Driver) -> None:
    """End all processes of a workflow at once, lose what they have not synced, and look at what is left."""
    for process in processes_of(driver.workflow):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    driver.end()
    assert_gone(driver.workflow)
    disk.cut()
    check_claims(driver.workflow)
