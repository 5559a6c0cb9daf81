"""What a sandbox sees of this machine's Python."""

from __future__ import annotations

import os
import sys

import pytest

from posttrain.sandbox.program import Limits, Program, SandboxUnavailable
from posttrain.sandbox.python_root import find_python
from posttrain.sandbox.run import run_sync

# Modules that need shared libraries.
MODULES = "bz2, ctypes, hashlib, json, lzma, sqlite3, ssl, zlib, decimal, math, readline, multiprocessing, uuid"


def test_modules_find_their_libraries() -> None:
    result = run_sync(Program(f"import {MODULES}\nprint('ok')"), Limits())
    assert result.stdout == b"ok\n", result.stderr


def test_the_interpreter_is_the_one_of_the_environment() -> None:
    result = run_sync(Program("import sys\nprint(sys.version)"), Limits())
    assert result.stdout.decode().strip() == sys.version


def test_paths_are_there_and_none_is_within_another() -> None:
    paths = find_python().paths
    assert all(map(os.path.exists, paths))
    assert not [one for one in paths for other in paths if one.startswith(f"{other}/")]


@pytest.mark.parametrize("value", ["", "/nowhere"])
def test_folders_of_the_linker_are_named_where_this_process_names_some(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", value)
    root = find_python.__wrapped__()
    assert bool(root.library_path) is bool(value)
    assert all(map(os.path.isdir, filter(None, root.library_path.split(":"))))


def test_without_a_list_of_libraries_there_is_no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxUnavailable, match="install ldd"):
        find_python.__wrapped__()
