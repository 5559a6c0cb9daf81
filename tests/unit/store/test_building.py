"""Folders get their names when they are whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.system_calls import Calls

from posttrain.store import building, partial_of, write_text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "hf_patched"


def test_a_folder_has_its_name_when_all_of_it_is_on_the_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    with building(folder) as partial:
        assert partial == partial_of(folder)
        (partial / "config.json").write_text("{}")
        assert calls.of("fsync") == []
    assert calls.of("fsync", "rename", "replace")[-4:] == [
        ("fsync", str(partial / "config.json")),
        ("fsync", str(partial)),
        ("rename", str(partial), str(folder)),
        ("fsync", str(folder.parent)),
    ]


def test_what_an_earlier_attempt_left_is_built_on(folder: Path) -> None:
    for before in (partial_of(folder), folder):
        before.mkdir()
        (before / "kept").write_text("1")
        with building(folder) as partial:
            assert (partial / "kept").exists()
            assert not folder.exists()
        assert (folder / "kept").exists()
        assert not partial.exists()
        (folder / "kept").unlink()
        folder.rmdir()


def test_of_two_the_finished_folder_is_the_better_start(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for path, text in ((folder, "finished"), (partial_of(folder), "half")):
        path.mkdir()
        (path / "file").write_text(text)
    with building(folder) as partial:
        assert (partial / "file").read_text() == "finished"
    assert f"removing {partial_of(folder)}: {folder} is complete" in caplog.text


def test_an_error_leaves_what_was_made_under_its_partial_name(folder: Path) -> None:
    partial_of(folder).mkdir()
    (partial_of(folder) / "file").touch()
    with pytest.raises(ValueError, match="broken"), building(folder):
        raise ValueError("broken")
    assert not folder.exists()
    assert (partial_of(folder) / "file").exists()


def test_of_two_that_finish_at_once_the_first_stays(folder: Path) -> None:
    with pytest.raises(RuntimeError, match="another process finished it while this one did"), building(folder):
        write_text(folder / "theirs", "")
    assert (folder / "theirs").exists()
