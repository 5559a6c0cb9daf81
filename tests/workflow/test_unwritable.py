"""Folders that cannot be written are told before any job begins, by us and not by Snakemake."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest
from tests.scripts.test_full_disks import full
from tests.support.small_disk import remount, small_disk
from tests.support.workflow_runs import FAST, WorkflowFolder

from posttrain.cluster.driver import message_of, refusal_of
from posttrain.plan.preflight.storage import require_writable

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


def last_words(output: str) -> str:
    """Return the last message on the screen, which nothing of Python's stands before."""
    assert "Traceback" not in output
    assert "Logging error" not in output
    return output.rstrip().rpartition("\n\n")[2]


def test_a_working_folder_on_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path, "size=1m") as disk:
        here = WorkflowFolder(disk / "here", tmp_path / "store")
        here.folder.mkdir()
        with full(disk, 0):
            elsewhere = WorkflowFolder(disk / "here", tmp_path / "store", FAST | {"site.results": tmp_path / "results"})
            for workflow, target, options, first in (
                (elsewhere, "resolve_config", [], f"{disk}/here: the disk is full"),
                (here, "resolve_config", ["-n"], f"{disk}/here: the disk is full"),
                # It makes nothing that a later step needs, so it begins; it cannot write its log.
                (here, "plan", [], "plan failed: it was ended from outside, or ended without a word"),
            ):
                code, output = workflow.attempt(target, options=options)
                words = last_words(output).splitlines()
                # Snakemake's own folder is named where it is the first that could not be written to.
                assert (code, words[0].replace("/.snakemake:", ":")) == (1, first), output
                assert "the disk is full" in "".join(words)
                assert words[-1].startswith("  remedy: free some space there"), output
            assert not (tmp_path / "results").exists(), "no job has begun"
            code, output = here.attempt("status")
            assert code == 0, output
            assert "no run in" in output
            last_words(output)


def test_a_read_only_working_folder(tmp_path: Path) -> None:
    with small_disk(tmp_path, "size=1m") as disk:
        workflow = WorkflowFolder(disk / "here", tmp_path / "store")
        workflow.folder.mkdir()
        remount(disk, "ro")
        code, output = workflow.attempt("resolve_config")
        first, note, remedy = last_words(output).splitlines()
        assert (code, first) == (1, f"{disk}/here/.snakemake: the file system is read-only")
        assert "`--directory`" in note
        assert remedy.startswith("  remedy: have it mounted for writing")


def test_a_disk_that_becomes_full_during_a_step(tmp_path: Path) -> None:
    with small_disk(tmp_path, "size=1m") as disk:
        for text, first in (("", "it was ended from outside, or ended without a word"), (None, "it left no log")):
            path = disk / f"{first[:7]}.log"
            if text is not None:
                path.write_text(text)
            assert message_of(path).splitlines()[0] == first
            assert "remedy" not in message_of(path)
            # A page is left: an empty file, or a small one, proves nothing.
            with full(disk, 1):
                said = message_of(path).splitlines()
            assert said[0] == first
            assert f"{disk}: the disk is full" in said
            assert said[-1].startswith("  remedy: free some space there")


def test_what_snakemake_could_not_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    records = RuntimeError("Error recording metadata")
    records.__context__ = OSError(errno.ENOSPC, "No space left on device")
    assert refusal_of(records).startswith(f"{tmp_path}: the disk is full\n")
    assert refusal_of(RuntimeError("another")) == refusal_of(FileNotFoundError(errno.ENOENT, "x", "y")) == ""
    assert refusal_of(None) == ""
