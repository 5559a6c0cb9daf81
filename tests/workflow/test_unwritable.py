"""Folders that cannot be written are told before any job begins, by us and not by Snakemake."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.small_disk import remount, small_disk
from tests.workflow_runs import FAST, WorkflowFolder

from posttrain.preflight.storage import require_writable

pytestmark = pytest.mark.slow


def test_results_on_a_read_only_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path, "size=1m") as disk:
        workflow = WorkflowFolder(tmp_path / "work", tmp_path / "store", FAST | {"site.results": disk / "results"})
        remount(disk, "ro")
        code, output = workflow.attempt("resolve_config", "download_dataset")
        assert code == 1
        assert re.search(
            rf"^{disk}: the file system is read-only\n  remedy: have it mounted for writing, ", output, re.M
        )
        assert "Traceback" not in output
        assert not workflow.store.exists(), "no job has begun"
        remount(disk, "rw")
        workflow.run("resolve_config")


def test_only_where_something_will_be_made(tmp_path: Path) -> None:
    require_writable([])
    require_writable([tmp_path / "a" / "b", str(tmp_path / "c")])
    assert list(tmp_path.iterdir()) == []
    with small_disk(tmp_path, "size=1m,nr_inodes=2") as disk:
        (disk / "last").touch()
        with pytest.raises(OSError, match="No space left on device") as refused:
            require_writable([tmp_path / "a", disk / "deep" / "b"])
        assert refused.value.filename == str(disk)
