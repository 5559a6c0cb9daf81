import os
import shutil
from pathlib import Path

import pytest

from posttrain.plan.preflight.storage import (
    SPARE_BYTES,
    Need,
    bytes_below,
    check_free_space,
    check_writable,
    nearest_existing,
    storage_needs,
)
from posttrain.plan.resolve import resolve
from posttrain.plan.sizing.storage import storage
from posttrain.store import Paths

CONFIG_DIR = Path(__file__).resolve().parents[4] / "config"


def paths_of(root, model="tiny", more=""):
    roots = f"site.store={root}/store site.results={root}/results site.node_local={root}/local"
    return Paths(resolve({"model": model, "site": "local", "set": f"{roots} {more}"}, CONFIG_DIR))


def test_a_fresh_run_needs_everything(tmp_path):
    paths = paths_of(tmp_path)
    needed = storage(paths.resolved.config)
    assert [(need.key, need.missing_bytes) for need in storage_needs(paths)] == [
        ("site.store", needed.store_bytes),
        ("site.results", needed.run_bytes),
        ("site.node_local", 2 * needed.node_local_bytes),
    ]


def test_what_is_there_is_not_needed_again(tmp_path):
    paths = paths_of(tmp_path)
    needed = storage(paths.resolved.config)
    for folder, size in (
        (paths.hf, needed.hf),
        (paths.torch_dist.with_name(paths.torch_dist.name + ".partial"), 1000),
    ):
        folder.mkdir(parents=True)
        (folder / "data").write_bytes(bytes(size))
    paths.node_local("node0").mkdir(parents=True)
    (paths.node_local("node0") / "data").write_bytes(bytes(500))
    store, _, local = storage_needs(paths)
    assert store.missing_bytes == needed.store_bytes - needed.hf - 1000
    assert local.missing_bytes == 2 * needed.node_local_bytes - 500


def test_an_export_that_is_evaluated_in_fp8_is_counted_until_it_is_there(tmp_path):
    paths = paths_of(tmp_path, more="evaluation.precision=fp8")
    needed = storage(paths.resolved.config)
    assert storage_needs(paths)[0].missing_bytes == needed.store_bytes
    assert needed.store_bytes == needed.hf + needed.torch_dist + 2 * needed.rollout_fp8
    paths.export_fp8.mkdir(parents=True)
    (paths.export_fp8 / "data").write_bytes(bytes(700))
    assert storage_needs(paths)[0].missing_bytes == needed.store_bytes - 700


def test_links_are_not_counted_twice(tmp_path):
    (tmp_path / "a").write_bytes(bytes(100))
    os.link(tmp_path / "a", tmp_path / "b")
    (tmp_path / "c").symlink_to(tmp_path / "a")
    assert bytes_below(tmp_path) == 100
    assert bytes_below(tmp_path / "absent") == 0


def test_a_disk_without_room_is_one_problem_for_all_roots_on_it(tmp_path):
    huge = 1 << 60
    needs = [Need("site.store", tmp_path / "store", huge), Need("site.results", tmp_path, 5)]
    (finding,) = check_free_space(needs)
    assert finding.problem.key == "site.store, site.results"
    assert finding.problem.allowed == "at least 1153 PB (site.store 1153 PB, site.results 5 B, and 1.07 GB to spare)"
    assert "free on the disk of" in finding.problem.value


def test_room_to_spare_is_part_of_the_need(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    (tight,) = check_free_space([Need("site.store", tmp_path, free - SPARE_BYTES // 2)])
    (wide,) = check_free_space([Need("site.store", tmp_path, free // 4)])
    assert (tight.status, wide.status) == ("problem", "ok")


def test_a_folder_that_does_not_exist_yet_is_judged_by_the_one_above_it(tmp_path):
    assert nearest_existing(tmp_path / "a/b/c") == tmp_path
    assert check_writable("site.store", tmp_path / "a/b/c").status == "ok"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_a_problem(tmp_path):
    (tmp_path / "file").write_text("")
    if os.geteuid() == 0:
        # Root may write anywhere but here.
        folder, reason = Path("/proc/self/task"), "/proc/self/task"
    else:
        folder, reason = tmp_path / "closed", "Permission denied"
        folder.mkdir(mode=0o500)
    finding = check_writable("site.store", folder)
    assert finding.problem.key == "site.store"
    assert reason in finding.problem.value


@pytest.mark.parametrize("names", ["[node0]", "[]"])
def test_each_named_node_needs_a_copy_and_one_without_names(tmp_path, names):
    paths = paths_of(tmp_path, more=f"site.node_names={names}")
    assert storage_needs(paths)[2].missing_bytes == storage(paths.resolved.config).node_local_bytes
