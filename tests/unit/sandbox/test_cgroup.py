"""Which cgroup is taken, in trees of files like the kernel's; where one is delegated here, its limits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from posttrain.sandbox.cgroup import find_delegated, has_run_out_of_memory, limited_cgroup
from posttrain.sandbox.program import Limits


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a hierarchy in which user.slice is delegated."""
    root = tmp_path / "cgroup"
    for folder, enabled in (("", "cpu memory pids"), ("user.slice", "memory pids"), ("user.slice/session", "")):
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / "cgroup.subtree_control").write_text(enabled)
        (root / folder / "cgroup.procs").touch(mode=0o600 if folder else 0o400)
    (root / "cgroup.controllers").write_text("cpu memory pids")
    (tmp_path / "membership").write_text("4:pids:/other\n0::/user.slice/session\n")
    return root


def test_the_nearest_cgroup_that_may_hold_limited_ones_is_taken(tree: Path) -> None:
    assert find_delegated(tree, tree.parent / "membership") == tree / "user.slice"


@pytest.mark.parametrize("enabled", ["", "memory", "cpu pids"])
def test_both_controllers_are_needed(tree: Path, enabled: str) -> None:
    for folder in (tree, tree / "user.slice"):
        (folder / "cgroup.subtree_control").write_text(enabled)
    assert find_delegated(tree, tree.parent / "membership") is None


def test_version_1_has_none(tree: Path) -> None:
    (tree / "cgroup.controllers").unlink()
    assert find_delegated(tree, tree.parent / "membership") is None


def test_without_a_place_in_version_2_there_is_none(tree: Path) -> None:
    (tree.parent / "membership").write_text("4:memory:/user.slice\n")
    assert find_delegated(tree, tree.parent / "membership") is None


def test_abandoned_ones_are_removed(tree: Path) -> None:
    gone, own = (tree / "user.slice" / f"posttrain-sandbox-{pid}-0" for pid in (2**22 + 1, os.getpid()))
    gone.mkdir()
    own.mkdir()
    find_delegated(tree, tree.parent / "membership")
    assert (gone.exists(), own.exists()) == (False, True)


def test_limits_are_written_as_the_kernel_reads_them(tree: Path) -> None:
    with limited_cgroup(tree / "user.slice", Limits(memory_mib=64, processes=8)) as folder:
        written = {path.name: path.read_text() for path in folder.iterdir()}
    assert written == {"memory.max": str(64 << 20), "memory.oom.group": "1", "pids.max": "9"}


@pytest.mark.parametrize(("events", "expected"), [("low 0\noom 1\noom_kill 2\n", True), ("oom 0\noom_kill 0\n", False)])
def test_the_kernel_says_whether_memory_ran_out(tmp_path: Path, events: str, expected: bool) -> None:
    (tmp_path / "memory.events").write_text(events)
    assert has_run_out_of_memory(tmp_path) is expected
