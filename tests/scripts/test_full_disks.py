"""Steps on disks that are full, without inodes or read-only: told with a remedy, which leads to the same bytes."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.checkpoint_store import NUM_PARTS, Store, assert_same_folder, make_store, run_here
from tests.support.small_disk import remount, small_disk

from posttrain.errors import explain
from posttrain.store import build_lock

PAGE_BYTES = 4096
# So many pages, or files, are left to a step before it is given all that it needs: it fails at another place each time.
LEFT = (0, 1, 2, 4, 8, 16)


def steps_of(store: Store) -> Iterator[tuple[str, list[object]]]:
    """Yield the steps in the order of the data."""
    for name, part_step, last_step in (
        ("torch_dist", "convert_hf_to_torch_dist", "finalize_torch_dist"),
        ("rollout_fp8", "quantize", "finalize_quantized"),
    ):
        yield from ((part_step, store.part(name, part)) for part in range(NUM_PARTS))
        yield last_step, store.finalize(name)
    yield from (("export_hf", store.export(part)) for part in range(NUM_PARTS))
    yield "finalize_export_hf", store.finalize_export()


@contextlib.contextmanager
def full(disk: Path, left: int) -> Iterator[None]:
    """Leave a few pages of the disk free."""
    with open(disk / "ballast", "wb", buffering=0) as ballast, contextlib.suppress(OSError):
        while True:
            ballast.write(bytes(PAGE_BYTES))
    size = (disk / "ballast").stat().st_size
    with open(disk / "ballast", "r+b") as ballast:
        ballast.truncate(max(0, size - left * PAGE_BYTES))
    yield
    (disk / "ballast").unlink()


@contextlib.contextmanager
def without_inodes(disk: Path, left: int) -> Iterator[None]:
    """Let a few files be made, however small."""
    folder = disk / "ballast"
    folder.mkdir()
    with contextlib.suppress(OSError):
        for number in range(100_000):
            (folder / str(number)).touch()
    for path in sorted(folder.iterdir())[:left]:
        path.unlink()
    yield
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


@contextlib.contextmanager
def read_only(disk: Path, left: int) -> Iterator[None]:
    """Let nothing be written."""
    remount(disk, "ro")
    yield
    remount(disk, "rw")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = make_store(tmp_path_factory.mktemp("undisturbed") / "store")
    for script, arguments in steps_of(store):
        run_here(script, arguments)
    return store


@pytest.mark.parametrize(
    ("trouble", "told", "remedy"),
    [
        (full, "disk is full|not enough disk space", "free some space there"),
        (without_inodes, "its inodes are used up", "delete files there"),
        (read_only, "the file system is read-only", "have it mounted for writing"),
    ],
)
def test_every_step_says_what_to_do_and_goes_on_when_it_is_done(
    tmp_path: Path, undisturbed: Store, trouble: Callable, told: str, remedy: str
) -> None:
    with small_disk(tmp_path, "size=16m,nr_inodes=200") as disk:
        store = make_store(disk / "store")
        for script, arguments in steps_of(store):
            messages = [text for left in LEFT if (text := attempt(script, arguments, trouble(disk, left)))]
            assert messages, f"{script} needs more than was left to it"
            for text in messages:
                first, *_, last = text.splitlines()
                assert first.startswith(f"{disk}/")
                assert any(words in first for words in told.split("|")), text
                assert last.startswith(f"  remedy: {remedy}"), text
            run_here(script, arguments)
        for name in ("torch_dist", "rollout_fp8", "hf"):
            assert_same_folder(store.folder(name), undisturbed.folder(name))


def attempt(script: str, arguments: list[object], trouble: contextlib.AbstractContextManager) -> str:
    """Return what a user is told when a step fails; "" when it does not, and what it made is then forgotten."""
    receipt = Path(str(arguments[arguments.index("--receipt") + 1]))
    told = ""
    with trouble:
        try:
            run_here(script, arguments)
        except OSError as error:
            told = explain(error) or str(error)
        for held in list(build_lock._held):
            build_lock.release(held)
    # The step's own process has ended by now, and with it what it held.
    for lock in [*receipt.parent.glob("*.lease"), *receipt.parent.glob("*.parts/*.lease")]:
        shutil.rmtree(lock)
    if not told:
        receipt.unlink()
    return told
