"""Runs a script again and again, each time killed (SIGKILL) at a chosen change of its to the file system.

    endings = run_killed("patch_hf_config", ["--source", ...], root=tmp_path, points=[3, 1, 7])

One process imports the script once and forks a child per point, so a kill costs milliseconds. The child
counts what it opens for writing, renames, links and removes below `root`, and kills itself at that number. A
point beyond the last change lets the script end. A point may also be a moment: a share of the time that the
longest run before it took.

With a disk (`tests.support.power_cut`) its power is cut at the same moment, so that what was not synced is lost.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import runpy
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.support.forked_programs import run_program
from tests.support.power_cut import Disk

SCRIPTS = Path(__file__).parents[2] / "scripts"
CHANGES = ("open", "os.rename", "os.link", "os.symlink", "os.remove", "os.mkdir", "os.rmdir")
# What transformers imports when it builds and loads a model: several seconds.
LAYER_BY_LAYER = ["transformers.models.glm_moe_dsa.modeling_glm_moe_dsa", "transformers.core_model_loading"]


# Of an order, what may be left out.
PLAIN = {"disk": None, "again": [], "forgetful": False, "imports": [], "kept": None}


def run_killed(
    script: str,
    arguments: Sequence[object],
    root: Path,
    points: Sequence[int | float] | None,
    env: dict[str, str] | None = None,
    claim: tuple[Path, Path] | None = None,
    timeout: float = 120,
    disk: Disk | None = None,
    again: Sequence[Path] = (),
    forgetful: bool = False,
    imports: Sequence[str] = (),
    kept: Path | None = None,
) -> list[int]:
    """Run a script once per point and return how each run ended: -9 for a kill, else the exit code.

    Args:
        script: Its name, without ".py"; or the path of a program of the tests, which has a `main`, and a `check` that
            is called with `root` after each run.
        arguments: Its command line.
        root: Changes below this folder are counted.
        points: At which change each run is killed, from 1; a float is a share of the longest run before it, in time.
            None: at each change, until a run ends by itself.
        env: On top of the environment.
        claim: Folder and receipt; whenever the receipt is there, the folder's content must be what it says. With
            a disk it must be there after a good end.
        timeout: Seconds for all runs together.
        disk: Loses its power whenever the script is killed, and right after it has ended.
        again: Deleted whenever a run has ended by itself and others follow: they then have something to do.
        forgetful: Files are not synced when the script asks for it, only folders: what a step without fsync would do.
        imports: Modules that the script imports while it runs; taken once instead of in every child.
        kept: Every file below this folder keeps its bytes, however a run ends; temporary ones are left out.
    """
    order = {
        "script": str(SCRIPTS / f"{script}.py"),
        "arguments": [str(a) for a in arguments],
        "root": str(root),
        "points": points and list(points),
        "claim": claim and [str(path) for path in claim],
        "disk": disk and [str(disk.image), str(disk.folder)],
        "again": [str(path) for path in again],
        "forgetful": forgetful,
        "imports": list(imports),
        "kept": kept and str(kept),
    }
    if env:  # libraries read it when they are imported
        command = [sys.executable, "-m", "tests.support.killing", json.dumps(order)]
        done = subprocess.run(
            command, cwd=SCRIPTS.parent, env=os.environ | env, capture_output=True, text=True, timeout=timeout
        )
    else:
        done = run_program("tests.support.killing", json.dumps(order), timeout=timeout)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Do what the command line orders."""
    order = PLAIN | json.loads(sys.argv[1])
    program = runpy.run_path(order["script"], run_name="imported")
    script, check = program["main"], program.get("check", lambda root: None)
    from posttrain.cli import run

    for module in order["imports"]:
        importlib.import_module(module)
    sys.argv = [order["script"], *order["arguments"]]
    disk = Disk(*map(Path, order["disk"])) if order["disk"] else None
    if order["forgetful"]:
        os.fsync = _sync_folders_only
    kept = bytes_of(order["kept"])
    endings: list[int] = []
    longest = 0.0
    for point in order["points"] or itertools.count(1):
        if endings and endings[-1] == 0:
            _forget(order["again"])
        started = time.monotonic()
        if isinstance(point, float):
            endings.append(run_child_for(lambda: run(script), point * longest))
        else:
            endings.append(run_child(lambda: run(script), order["root"], point))
        longest = max(longest, time.monotonic() - started)
        if disk:
            disk.cut()
        assert bytes_of(order["kept"]) == kept
        _check_claim(order["claim"], must_be_there=bool(disk) and endings[-1] == 0)
        check(Path(order["root"]))
        if order["points"] is None and endings[-1] != -signal.SIGKILL:
            break
    print(json.dumps(endings))


def bytes_of(folder: str | None) -> dict[str, bytes]:
    """Return every file below a folder but temporary ones, which the next write removes."""
    files = Path(folder).rglob("*") if folder else ()
    return {str(path): path.read_bytes() for path in files if path.is_file() and path.suffix != ".tmp"}


def _forget(paths: Sequence[str]) -> None:
    for path in paths:
        shutil.rmtree(path) if os.path.isdir(path) else Path(path).unlink(missing_ok=True)
    if paths:
        os.sync()


def _sync_folders_only(descriptor: int, sync: Callable[[int], None] = os.fsync) -> None:
    if stat.S_ISDIR(os.fstat(descriptor).st_mode):
        sync(descriptor)


def _check_claim(claim: list[str] | None, must_be_there: bool) -> None:
    from posttrain.store import require_files

    if claim and (must_be_there or Path(claim[1]).exists()):
        require_files(Path(claim[0]), Path(claim[1]), content=True)


def run_child(work: Callable[[], None], root: str, point: int) -> int:
    """Do something in a child that is killed at a change below `root`, never with 0; returns how it ended."""

    def counted() -> None:
        _kill_at(point, root)
        work()

    return _ending(_fork(counted))


def run_child_for(work: Callable[[], None], seconds: float) -> int:
    """Do something in a child that is killed after so many seconds; returns how it ended."""
    child = _fork(work)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    return _ending(child)


def _fork(work: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        try:
            work()
        except SystemExit as ended:
            os._exit(ended.code if isinstance(ended.code, int) else 1)
        os._exit(0)
    return child


def _ending(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _kill_at(point: int, root: str) -> None:
    num_changes = 0

    def count(event: str, arguments: tuple) -> None:
        nonlocal num_changes
        if event in CHANGES and any(str(a).startswith(root) for a in arguments[:2]) and _changes(event, arguments):
            num_changes += 1
            if num_changes == point:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def _changes(event: str, arguments: tuple) -> bool:
    return event != "open" or bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))


if __name__ == "__main__":
    main()
