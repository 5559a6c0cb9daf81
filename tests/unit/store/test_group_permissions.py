"""Two users of one group in one store, with real user ids."""

from __future__ import annotations

import grp
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.rejections import rejected

from posttrain.store import write_text
from posttrain.store.group_permissions import (
    STORE_VARIABLE,
    announce_sharing,
    share_store,
    share_what_follows,
    shared,
)

ADA, BOB = 54_321, 54_322
# Any group that the machine knows by name and that is nobody's own.
GROUP = "games"
MAKE = """
    import dataclasses, os, pwd, sys
    from pathlib import Path
    from posttrain.store import Receipt, building, claim, receipt_of, record_files, write_receipt
    from posttrain.store.group_permissions import announce_sharing, share_store
    store, group, target, user, number = Path(sys.argv[1]), *sys.argv[2:4], *map(int, sys.argv[4:])
    # Only now: Python itself may lie where other users cannot read.
    os.setgroups([number]), os.setgid(user), os.setuid(user), os.umask(0o077)
    announce_sharing(store, group)
    share_store(store, group)
    (store.parent / str(user)).mkdir(exist_ok=True)
    (store.parent / str(user) / "results").touch()
    folder = store / "model" / "hf"
    wanted = Receipt("patch_hf_config", (), {}, {"target": target})
    if claim(receipt_of(folder), wanted, folder):
        with building(folder) as partial:
            (partial / "config.json").write_text(target)
        write_receipt(receipt_of(folder), dataclasses.replace(wanted, files=record_files(folder)))
        print("made")
"""


def make_as(user: int, store: Path, target: str, group: str = GROUP) -> str:
    """Make the artefact as another user; returns what was printed, errors included."""
    number = grp.getgrnam(GROUP).gr_gid
    command = [sys.executable, "-c", textwrap.dedent(MAKE), str(store), group, target, str(user), str(number)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.stdout


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that everybody may reach and write to, unlike pytest's own."""
    if os.getuid() != 0:
        pytest.skip("needs root, to be other users")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        yield Path(folder) / "store"


def test_what_one_made_the_other_finds_and_can_make_anew(place: Path) -> None:
    assert make_as(ADA, place, "native") == "made\n"
    assert make_as(BOB, place, "native") == ""
    assert make_as(BOB, place, "deepseek_v32") == "made\n"
    assert make_as(ADA, place, "native") == "made\n"
    number = grp.getgrnam(GROUP).gr_gid
    for path in [place, *place.rglob("*")]:
        status = path.stat()
        assert status.st_gid == number, path
        assert status.st_mode & 0o020, path
        assert path.is_file() or status.st_mode & 0o2000, path
        assert not status.st_mode & 0o007, "nobody else was let in"
    for user in (ADA, BOB):
        for path in (place.parent / str(user), place.parent / str(user) / "results"):
            assert path.stat().st_mode & 0o077 == 0, "what is not in the store stays closed"


def test_without_a_group_the_store_is_its_makers(place: Path) -> None:
    assert make_as(ADA, place, "native", group="") == "made\n"
    assert "Permission denied" in make_as(BOB, place, "deepseek_v32", group="")


@pytest.mark.parametrize("group", ["nobody-knows-it", GROUP])
def test_a_group_that_is_not_ours_is_refused(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STORE_VARIABLE, "/elsewhere")
    monkeypatch.setattr(os, "getgroups", lambda: [os.getgid()])
    with rejected("not-your-group", key="site.store_group") as refused:
        announce_sharing(Path("store"), group)
    mine = grp.getgrgid(os.getgid()).gr_name
    assert f"allowed: a group of yours: {mine}\n" in str(refused.value)
    assert STORE_VARIABLE not in os.environ


@pytest.fixture
def own_group() -> str:
    return grp.getgrgid(os.getgid()).gr_name


@pytest.fixture
def umask() -> Iterator[None]:
    """A user who shows others nothing."""
    before = os.umask(0o077)
    yield
    os.umask(before)


def mode_of_a_new_file(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "file"
    path.unlink(missing_ok=True)
    write_text(path, "x")
    return path.stat().st_mode & 0o777


@pytest.mark.usefixtures("umask")
def test_only_what_is_written_to_the_store_is_opened(
    tmp_path: Path, own_group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STORE_VARIABLE, "")
    store = tmp_path / "store"
    announce_sharing(store, own_group)
    assert os.environ[STORE_VARIABLE] == str(store)
    assert mode_of_a_new_file(store) == 0o600, "to be told of it changes nothing"
    for closed in (tmp_path / "results", tmp_path / "store2", tmp_path):
        with shared(closed / "file"):
            assert mode_of_a_new_file(closed) == 0o600
    for opened in (store, store / "deep" / "folder"):
        with shared(opened / "file"):
            assert mode_of_a_new_file(opened) == 0o660
        assert mode_of_a_new_file(opened) == 0o600
    with pytest.raises(ValueError, match="broken"), shared(store):
        raise ValueError("broken")
    assert mode_of_a_new_file(store) == 0o600
    share_what_follows(tmp_path / "results")
    assert mode_of_a_new_file(store) == 0o600
    share_what_follows(store / "hf.receipt.json")
    assert mode_of_a_new_file(store) == 0o660


@pytest.mark.usefixtures("umask")
def test_without_a_group_nothing_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STORE_VARIABLE, str(tmp_path))
    announce_sharing(tmp_path, "")
    share_store(tmp_path / "store", "", [tmp_path / "store" / "a" / "b"])
    assert not (tmp_path / "store").exists()
    share_what_follows(tmp_path / "file")
    assert mode_of_a_new_file(tmp_path) == 0o600


@pytest.mark.parametrize(("umask", "expected"), [(0o077, 0o2770), (0o022, 0o2775), (0o027, 0o2770)])
def test_folders_are_there_before_snakemake_makes_them(
    tmp_path: Path, own_group: str, umask: int, expected: int
) -> None:
    """Up to the root of the store; whoever is neither in the group nor the user gets what the umask gives him."""
    store, before = tmp_path / "store", os.umask(umask)
    try:
        (store / "glm5").mkdir(parents=True)
        outputs = [str(store / "glm5" / "abc" / "hf.parts" / "0.receipt.json"), tmp_path / "results" / "x.json"]
        share_store(store, own_group, outputs)
        assert mode_of_a_new_file(tmp_path / "own") == 0o666 & ~umask
    finally:
        os.umask(before)
    for name in ("", "glm5", "glm5/abc", "glm5/abc/hf.parts"):
        assert (store / name).stat().st_mode & 0o7777 == expected, name
        assert (store / name).stat().st_gid == os.getgid()
    assert not (store / "glm5/abc/hf.parts/0.receipt.json").exists()
    assert not (tmp_path / "results").exists()


def test_what_another_user_owns_is_left_as_it_is(place: Path) -> None:
    place.mkdir()
    os.chown(place, ADA, ADA)
    place.chmod(0o700)
    share_store(place, GROUP)
    assert (place.stat().st_gid, place.stat().st_mode & 0o7777) == (ADA, 0o700)
