"""Landlock guards a sandbox where the kernel has it, and its absence is named."""

from __future__ import annotations

import errno
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.sandbox.bubblewrap import find_bwrap
from posttrain.sandbox.landlock import describe_landlock, find_abi, landlock_rules, query_abi
from posttrain.sandbox.program import Limits, Program, SandboxUnavailable
from posttrain.sandbox.python_root import PythonRoot
from posttrain.sandbox.run import run_sync

ABI, REASON = query_abi()
needs_landlock = pytest.mark.skipif(not ABI, reason=f"no Landlock: {REASON}")
# The mount of /proc allows it.
WRITES_TO_PROC = "open('/proc/self/comm', 'w').write('renamed')"
RENAMES = """
import os
os.mkdir("/work/a"), os.mkdir("/work/b")
open("/work/a/file", "w").write("text")
os.rename("/work/a/file", "/work/b/file")
os.truncate("/work/b/file", 2)
open("/dev/null", "w").write("gone"), open("/dev/stdout", "w").write(open("/work/b/file").read())
print(len(os.listdir("/")) > 3)
"""


@needs_landlock
def test_a_program_cannot_write_where_only_the_mount_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    denied = run_sync(Program(WRITES_TO_PROC), Limits())
    assert b"PermissionError: [Errno 13]" in denied.stderr
    monkeypatch.setattr("posttrain.sandbox.run.find_abi", lambda: 0)
    assert run_sync(Program(WRITES_TO_PROC), Limits()).is_success


@pytest.mark.parametrize("abi", [0, 2, 3, 5, 6, ABI])
def test_a_program_can_do_in_its_folders_what_it_could(abi: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if abi > ABI:
        pytest.skip(f"the kernel has ABI {ABI}")
    monkeypatch.setattr("posttrain.sandbox.run.find_abi", lambda: abi)
    result = run_sync(Program(RENAMES), Limits())
    assert (result.stderr, result.stdout) == (b"", b"teTrue\n")


RESTRICTED = """
import ctypes, os, sys
from posttrain.sandbox import inside
ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
inside._restrict(sys.argv[1])
for path in sys.argv[2:]:
    try:
        os.close(os.open(path, os.O_WRONLY))
        print("open", end=" ")
    except PermissionError:
        print("denied", end=" ")
"""


@needs_landlock
def test_rights_hold_for_the_paths_that_have_them(tmp_path: Path) -> None:
    files = [tmp_path / "mine" / "file", tmp_path / "other"]
    files[0].parent.mkdir()
    for path in files:
        path.touch()
    rules = f"3\n3 {files[0].parent}"  # executing and writing are handled, and allowed in one folder
    done = subprocess.run([sys.executable, "-c", RESTRICTED, rules, *files], capture_output=True, text=True, check=True)
    assert done.stdout == "open denied "


@needs_landlock
def test_a_sandbox_whose_rules_the_kernel_refuses_does_not_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.sandbox.run.landlock_rules", lambda root, abi: f"{1 << 63}")
    with pytest.raises(SandboxUnavailable, match="Landlock: call 444 failed"):
        run_sync(Program("pass"), Limits())


def test_the_fields_of_each_abi() -> None:
    root = PythonRoot("/usr/bin/python", ("/usr",))
    first = {abi: landlock_rules(root, abi).partition("\n")[0] for abi in (2, 3, 4, 5, 6, 7)}
    full = str((1 << 16) - 1)
    assert first == {
        2: str((1 << 14) - 1),
        3: str((1 << 15) - 1),
        4: str((1 << 15) - 1),
        5: full,
        6: f"{full} 0 3",
        7: f"{full} 0 3",
    }
    assert landlock_rules(root, 0) == ""
    rights = dict(reversed(line.split(" ", 1)) for line in landlock_rules(root, 7).splitlines()[1:])
    assert rights["/usr"] == "5"
    assert int(rights["/work"]) & (1 << 6 | 1 << 11) == 0, "no devices"


def filter_answering(code: int) -> bytes:
    """Return a seccomp filter with which `landlock_create_ruleset` ends with an error."""
    words = [(0x20, 0, 0, 0), (0x15, 0, 1, 444), (0x06, 0, 0, 0x00050000 | code), (0x06, 0, 0, 0x7FFF0000)]
    return b"".join(struct.pack("<HBBI", *word) for word in words)


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (errno.ENOSYS, "no Landlock (this kernel has none)"),
        (errno.EOPNOTSUPP, "no Landlock (it is turned off in this kernel)"),
        (errno.EPERM, "no Landlock (this container forbids it)"),
    ],
)
def test_a_kernel_without_it_is_named(code: int, told: str, tmp_path: Path) -> None:
    (tmp_path / "filter").write_bytes(filter_answering(code))
    with open(tmp_path / "filter", "rb") as rules:
        outer = [find_bwrap(), "--dev-bind", "/", "/", "--seccomp", str(rules.fileno()), "--"]
        program = "from posttrain.sandbox.landlock import *; print(find_abi(), describe_landlock())"
        command = [*outer, sys.executable, "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, pass_fds=[rules.fileno()], check=True)
    assert done.stdout == f"0 {told}\n"


def test_this_kernel_is_named() -> None:
    assert describe_landlock() == (f"Landlock ABI {ABI}" if ABI else f"no Landlock ({REASON})")
    assert find_abi() == ABI
