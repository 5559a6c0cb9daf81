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

from posttrain.artifacts.sharing import share_umask
from posttrain.errors import ConfigError

ADA, BOB = 54_321, 54_322
# Any group that the machine knows by name and that is nobody's own.
GROUP = "games"
MAKE = """
    import dataclasses, os, pwd, sys
    from pathlib import Path
    from posttrain.artifacts import Receipt, building, claim, receipt_of, record_files, write_receipt
    from posttrain.artifacts.sharing import share_store, share_umask
    store, group, target, user, number = Path(sys.argv[1]), *sys.argv[2:4], *map(int, sys.argv[4:])
    # Only now: Python itself may lie where other users cannot read.
    os.setgroups([number]), os.setgid(user), os.setuid(user), os.umask(0o077)
    share_umask(group)
    share_store(store, group)
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


def test_without_a_group_the_store_is_its_makers(place: Path) -> None:
    assert make_as(ADA, place, "native", group="") == "made\n"
    assert "Permission denied" in make_as(BOB, place, "deepseek_v32", group="")


@pytest.mark.parametrize("group", ["nobody-knows-it", GROUP])
def test_a_group_that_is_not_ours_is_refused(group: str) -> None:
    if group == GROUP and grp.getgrnam(GROUP).gr_gid in (os.getgid(), *os.getgroups()):
        pytest.skip("it is ours")
    with pytest.raises(ConfigError, match=r"site\.store_group"):
        share_umask(group)
