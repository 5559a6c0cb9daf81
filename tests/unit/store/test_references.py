"""Who uses what of a store, and when nobody does."""

from __future__ import annotations

import dataclasses
import getpass
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.support.rejections import rejected

from posttrain.config.load import digest8
from posttrain.plan.resolve import resolve
from posttrain.store import Paths, write_json
from posttrain.store import references as references_module
from posttrain.store.garbage import delete_unused
from posttrain.store.references import Reference, is_gone, read_references, references_folder, register_run

CONFIG = Path(__file__).parents[3] / "config"
STARTED = 1_000_000_000
# As another user: is a run kept, and is its folder seen?
LOOK = """
import os, sys
from posttrain.store.garbage import delete_unused
from posttrain.store.references import Reference
os.setgroups([]), os.setgid(54321), os.setuid(54321)
for run in sys.argv[1:]:
    print(Reference(run, os.path.dirname(run), "ada", "node7", 0.0, ()).is_live(14), os.path.isdir(run))
"""


def reference(run: Path, **more: object) -> Reference:
    row = {"run": str(run), "results": str(run.parent), "user": "ada", "host": "node7", "last_start_unix": STARTED}
    return Reference(**{**row, "artefacts": ("glm5/abc/hf",), **more})


# ---- no permission is not absence ----


def test_only_what_is_certainly_not_there_is_gone(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "nowhere").symlink_to("nothing")
    assert not is_gone(str(tmp_path))
    assert not is_gone(str(tmp_path / "file"))
    assert is_gone(str(tmp_path / "none"))
    assert is_gone(str(tmp_path / "nowhere"))
    for unknown in (tmp_path / "loop", tmp_path / "file" / "x", tmp_path / ("x" * 300)):
        assert not is_gone(str(unknown)), "the system does not say that there is none"


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")
def test_a_run_that_we_may_not_look_at_keeps_what_it_uses(tmp_path: Path) -> None:
    private = tmp_path / "home" / "results"
    (private / "first").mkdir(parents=True)
    private.parent.chmod(0o700)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(folder.stat().st_mode | 0o055)
    words = [sys.executable, "-c", LOOK, str(private / "first"), str(private / "never-there")]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == "True False\n" * 2


# ---- how long ----


@pytest.mark.parametrize(("days", "is_live"), [(0, True), (13.999, True), (14, False), (15, False)])
def test_a_run_without_a_folder_counts_for_some_days(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: float, is_live: bool
) -> None:
    monkeypatch.setattr(references_module.time, "time", lambda: STARTED + days * 86_400)
    (tmp_path / "results").mkdir()
    assert reference(tmp_path / "results" / "first").is_live(14) == is_live


def test_a_run_with_a_folder_or_on_a_disk_that_is_not_here_counts_for_ever(tmp_path: Path) -> None:
    run = tmp_path / "results" / "first"
    assert reference(run).is_live(14), "its results are not mounted"
    run.parent.mkdir()
    assert not reference(run).is_live(14)
    run.mkdir()
    assert reference(run).is_live(14)


# ---- the files ----


def test_what_a_run_says_of_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    paths = Paths(resolve({"model": "tiny", "site": "local", "set": "site.store=store site.results=results"}, CONFIG))
    before = time.time()
    register_run(paths)
    ((path, found),) = read_references(paths.store).items()
    run = str(tmp_path / "results" / paths.run.name)
    assert path == Path("store/users") / f"{paths.run.name}-{digest8(run)}.json"
    assert before - 0.001 <= found.last_start_unix <= time.time() + 0.001
    assert dataclasses.replace(found, last_start_unix=0, artefacts=()) == Reference(
        run, str(tmp_path / "results"), getpass.getuser(), socket.gethostname(), 0, ()
    )
    assert found.artefacts[0].startswith("made/tiny-")
    assert [name.split("/")[-1].split("-")[0] for name in found.artefacts] == [
        *("tiny", "sort_digits", "pass", "pass", "pass", "hf", "hf_patched", "torch_dist"),
        *("rollout_fp8", "rollout_start", "calibration", "nvfp4", "bf16", "export_fp8"),
    ]
    register_run(paths)
    assert len(read_references(paths.store)) == 1


def test_a_store_without_users(tmp_path: Path) -> None:
    assert read_references(tmp_path) == {}
    references_folder(tmp_path).mkdir()
    assert read_references(tmp_path) == {}


def test_users_are_read_in_order_and_nothing_else_is(tmp_path: Path) -> None:
    rows = {references_folder(tmp_path) / f"{name}.json": reference(tmp_path / name) for name in ("b", "a")}
    for path, row in rows.items():
        write_json(path, dataclasses.asdict(row))
    (references_folder(tmp_path) / ".a.json.host.1.tmp").touch()
    assert list(read_references(tmp_path).items()) == sorted(rows.items())


def test_users_that_cannot_be_read_are_not_nobody(tmp_path: Path) -> None:
    references_folder(tmp_path).touch()
    with pytest.raises(NotADirectoryError):
        read_references(tmp_path)
    references_folder(tmp_path).unlink()
    references_folder(tmp_path).symlink_to("users")
    with pytest.raises(OSError, match="Too many levels"):
        read_references(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"artefacts": ["../../home/ada"]},
        {"artefacts": 5},
        {"run": 5},
        {"run": "/a\0b"},
        {"last_start_unix": "yesterday"},
        {"more": 1},
    ],
)
def test_a_reference_that_cannot_be_understood_stops_the_deleting(tmp_path: Path, change: dict) -> None:
    (tmp_path / "results").mkdir()
    path = references_folder(tmp_path) / "first.json"
    write_json(path, {**dataclasses.asdict(reference(tmp_path / "results" / "first")), **change})
    with rejected("reference-invalid", path):
        read_references(tmp_path)
    for text in (json.dumps(change)[:-1], "[" * 200_000):
        path.write_text(text)
        with rejected("reference-invalid", "delete it"):
            read_references(tmp_path)


def test_a_reference_that_goes_while_it_is_read_was_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        write_json(references_folder(tmp_path) / f"{name}.json", dataclasses.asdict(reference(tmp_path / name)))
    names = os.listdir(references_folder(tmp_path))
    (references_folder(tmp_path) / "a.json").unlink()
    monkeypatch.setattr(os, "listdir", lambda folder: names)
    assert [path.name for path in read_references(tmp_path)] == ["b.json"]


# ---- forgetting ----


def refer(store: Path, run: Path, started: float = 0.0) -> Path:
    """Leave a reference; returns its file."""
    path = references_folder(store) / f"{run.name}.json"
    write_json(path, dataclasses.asdict(reference(run, last_start_unix=started)))
    return path


def test_only_dead_references_are_forgotten(tmp_path: Path) -> None:
    (tmp_path / "results/alive").mkdir(parents=True)
    kept = [refer(tmp_path, tmp_path / "results/alive"), refer(tmp_path, tmp_path / "results/new", time.time())]
    dead = refer(tmp_path, tmp_path / "results/gone")
    delete_unused(tmp_path, 14)
    assert [path.exists() for path in (*kept, dead)] == [True, True, False]


def test_a_reference_that_another_gc_forgets_meanwhile_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "results").mkdir()
    refer(tmp_path, tmp_path / "results/gone")
    unlink = Path.unlink

    def slower(path: Path, *more: object, **options: object) -> None:
        if path.parent == references_folder(tmp_path):
            os.unlink(path)
        unlink(path, *more, **options)

    monkeypatch.setattr(Path, "unlink", slower)
    assert delete_unused(tmp_path, 14)[1] == []
    assert list(references_folder(tmp_path).iterdir()) == []


def test_runs_of_one_name_share_no_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two users train the same into results of their own, over one store: what they trained is not the same."""
    exports = set()
    for user in ("one", "two"):
        (tmp_path / user).mkdir()
        monkeypatch.chdir(tmp_path / user)
        asked = {"model": "tiny", "site": "local", "set": f"site.store={tmp_path}/store site.results=results"}
        paths = Paths(resolve(asked, CONFIG))
        exports.add((paths.run, paths.rollout_fp8, paths.export_fp8))
    assert len({run for run, _, _ in exports}) == len({came for _, came, _ in exports}) == 1
    assert len({trained for _, _, trained in exports}) == 2
