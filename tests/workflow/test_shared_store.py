"""Several users, each with a driver and a working folder of their own, over one store."""

from __future__ import annotations

import dataclasses
import grp
import os
import shutil
from pathlib import Path

import pytest
from tests.support.branches import jobs_of
from tests.support.interruptions import check_claims, files_made, start
from tests.support.workflow_runs import FAST, WorkflowFolder

from posttrain.store import read_receipt, write_receipt

pytestmark = pytest.mark.slow

TARGETS = ("finalize_torch_dist", "finalize_rollout_fp8")
# What is made of them before anything imports torch: a list, two parts and what joins them.
FIRST = ("finalize_hf_checkpoint",)


def drivers(tmp_path: Path) -> list[WorkflowFolder]:
    return [WorkflowFolder(tmp_path / name, tmp_path / "store") for name in ("first", "second")]


def builds_of(store: Path) -> dict[str, int]:
    """Return how often each artefact was brought to its receipt."""
    histories = store.rglob("*.history.jsonl")
    return {path.relative_to(store).as_posix(): len(path.read_text().splitlines()) for path in histories}


@pytest.mark.parametrize(
    "targets", [FIRST, pytest.param(TARGETS, marks=pytest.mark.faults("slow"))], ids=["first", "all"]
)
def test_two_drivers_on_a_fresh_store_build_everything_once(
    tmp_path: Path, store: Path, targets: tuple[str, ...]
) -> None:
    """Fresh but for the model that both start with, the longest step."""
    workflows = drivers(tmp_path)
    shutil.copytree(store / "made", tmp_path / "store" / "made")
    running = [start(workflow, *targets) for workflow in workflows]
    for driver in running:
        code, output = driver.finish()
        assert code == 0, output[-4000:]
        assert "Traceback" not in output
    builds = builds_of(tmp_path / "store")
    assert set(builds.values()) == {1}, builds
    # Other tests have asked the session's store for more: other datasets, weights for serving, a start without any.
    for_others = ("/nvfp4-", "/calibration-", "/rollout_start-")
    for_others += ("/hf_patched-", "/torch_dist-", "/rollout_fp8-") if targets == FIRST else ()
    assert builds.keys() == {
        name
        for name in builds_of(store)
        if not name.startswith("datasets") and not any(part in name for part in for_others)
    }
    assert check_claims(workflows[0]) == len(builds)
    assert files_made(workflows[0]).items() <= files_made(WorkflowFolder(tmp_path, store)).items()
    for workflow in workflows:
        assert "Nothing to be done" in workflow.dry_run(*targets)


def test_another_split_spoils_nothing_that_is_finished(tmp_path: Path, store: Path) -> None:
    """Also with a receipt of a part that is gone: its part is made again, of the split that there was."""
    shutil.copytree(store, tmp_path / "store", symlinks=True)
    workflow = WorkflowFolder(tmp_path / "work", tmp_path / "store", FAST | {"convert.num_parts": 3})
    workflow.folder.mkdir()
    makers = {"convert_hf_to_torch_dist", "quantize"}
    assert not makers & jobs_of(workflow.dry_run(*TARGETS))
    (gone,) = workflow.store.glob("tiny/*/torch_dist-????????.parts/1.receipt.json")
    gone.unlink()
    output = workflow.dry_run(*TARGETS)
    assert makers & jobs_of(output) == {"convert_hf_to_torch_dist"}
    assert "convert part 1 of 2 " in output
    (other,) = workflow.store.glob("tiny/*/torch_dist-????????.parts/0.receipt.json")
    for split in ({}, {"num_parts": "2"}, {"num_parts": 0}):
        write_receipt(other, dataclasses.replace(read_receipt(other), settings={"part": 0, **split}))
        assert "convert part 2 of 3 " in workflow.dry_run(*TARGETS), "one that says none stands for none"


def test_a_failed_step_does_not_get_its_old_receipt_back(tmp_path: Path) -> None:
    """Snakemake puts back what a failed job has updated; a receipt must not come back for files that changed."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{number}", "label": "1"}}\n' for number in range(40)))
    settings = FAST | {"data.kind": "jsonl", "data.train_file": rows, "data.heldout_file": rows}
    workflow = WorkflowFolder(tmp_path / "work", tmp_path / "store", settings)
    workflow.run("download_dataset")
    (receipt,) = workflow.store.glob("datasets/*.receipt.json")
    rows.write_text('{"prompt": "0", "label": "1"}\nnot JSON\n')
    code, output = workflow.attempt("download_dataset")
    assert code == 1
    assert "rows.jsonl" in output
    assert not receipt.exists()


def test_a_group_opens_the_store_and_nothing_else(tmp_path: Path) -> None:
    """What Snakemake makes of it, too: folders of outputs, before a step begins."""
    workflow = WorkflowFolder(tmp_path / "work", tmp_path / "store")
    workflow.settings |= {"site.store_group": grp.getgrgid(os.getgid()).gr_name}
    before = os.umask(0o027)
    try:
        workflow.run("resolve_config", "download_dataset")
    finally:
        os.umask(before)
    in_store = [workflow.store, *workflow.store.rglob("*")]
    assert {path.name for path in in_store} >= {"users", "datasets"}
    for path in in_store:
        mode = path.stat().st_mode
        assert mode & 0o060 == 0o060, path
        assert path.is_file() or mode & 0o2010 == 0o2010, path
        assert not mode & 0o007, path
    closed = [path for path in workflow.folder.rglob("*") if not path.is_symlink()]
    assert {path.name for path in closed} >= {"results", "logs", ".snakemake", "experiment.yaml"}
    # Snakemake gives its records of jobs to the group by itself, whatever the umask.
    opened = [path for path in closed if path.stat().st_mode & 0o020 and path.parent.name != "metadata"]
    assert opened == []
