"""Claims on artefacts, with real processes."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from posttrain.artifacts import FORMAT_VERSIONS, Receipt, building, claim, receipt_of, record_files, write_receipt
from posttrain.artifacts.build_lock import lock_folder_of
from posttrain.artifacts.lease import LeaseLostError, living_holder

WANTED = Receipt("patch_hf_config", (), {"hf": "0" * 64}, {"target": "native"})
MAKE = """
    import logging, sys
    from pathlib import Path
    from posttrain.artifacts import Receipt, building, claim, receipt_of, record_files, write_receipt
    logging.basicConfig(level="INFO", stream=sys.stdout, format="%(message)s")
    folder = Path(sys.argv[1])
    wanted = Receipt("patch_hf_config", (), {"hf": "0" * 64}, {"target": "native"})
    if claim(receipt_of(folder), wanted, folder):
        print("makes it", flush=True)
        with building(folder) as partial:
            (partial / "config.json").write_text("{}")
            sys.stdin.readline()
        write_receipt(receipt_of(folder), Receipt(wanted.step, record_files(folder), wanted.inputs, wanted.settings))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "hf_patched"


def start_maker(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", "-c", textwrap.dedent(MAKE), str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def make(folder: Path, wanted: Receipt = WANTED, content: str = "{}") -> None:
    """Make the artefact in this process."""
    with building(folder) as partial:
        (partial / "config.json").write_text(content)
    write_receipt(receipt_of(folder), dataclasses.replace(wanted, files=record_files(folder)))


def test_the_second_waits_is_told_for_whom_and_finds_the_work_done(folder: Path) -> None:
    first = start_maker(folder)
    assert first.stdout.readline() == "makes it\n"
    second = start_maker(folder)
    waiting = second.stdout.readline()
    assert waiting.startswith(f"waiting: {folder} is being made by process {first.pid} on {os.uname().nodename} (user ")
    first.communicate("\n")
    assert second.communicate()[0] == f"{folder}: was made meanwhile\n"
    assert len(folder.with_name("hf_patched.history.jsonl").read_text().splitlines()) == 1
    assert living_holder(lock_folder_of(receipt_of(folder))) is None


def test_the_second_takes_over_from_one_that_was_killed(folder: Path) -> None:
    first = start_maker(folder)
    assert first.stdout.readline() == "makes it\n"
    second = start_maker(folder)
    assert second.stdout.readline().startswith("waiting: ")
    first.kill()
    first.wait()
    assert second.stdout.readline() == "makes it\n"
    second.communicate("\n")
    assert not claim(receipt_of(folder), WANTED, folder)


def test_who_was_believed_dead_shows_nothing(folder: Path) -> None:
    assert claim(receipt_of(folder), WANTED, folder)
    lock = lock_folder_of(receipt_of(folder))
    (lock / "epoch-000002.json").write_text((lock / "epoch-000001.json").read_text().replace(": 1,", ": 2,"))
    with pytest.raises(LeaseLostError):
        make(folder)
    assert not folder.exists()
    assert not receipt_of(folder).exists()


@pytest.mark.parametrize(
    "wanted",
    [
        dataclasses.replace(WANTED, inputs={"hf": "1" * 64}),
        dataclasses.replace(WANTED, settings={"target": "deepseek_v32"}),
        dataclasses.replace(WANTED, step="quantize_serving"),
    ],
)
def test_what_stands_for_something_else_is_made_anew(folder: Path, wanted: Receipt) -> None:
    assert claim(receipt_of(folder), WANTED, folder)
    make(folder)
    assert not claim(receipt_of(folder), WANTED, folder)
    assert claim(receipt_of(folder), wanted, folder)
    assert not receipt_of(folder).exists()
    make(folder, wanted)
    assert not claim(receipt_of(folder), wanted, folder)


def test_another_format_is_made_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(folder)
    monkeypatch.setitem(FORMAT_VERSIONS, "patch_hf_config", 2)
    assert claim(receipt_of(folder), WANTED, folder)


def test_a_lost_file_or_a_newer_source_is_made_anew(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text("{}")
    make(folder)
    assert not claim(receipt_of(folder), WANTED, folder, [source])
    made = receipt_of(folder).stat().st_mtime
    os.utime(source, (made + 1, made + 1))
    assert claim(receipt_of(folder), WANTED, folder, [source])
    make(folder)
    (folder / "config.json").unlink()
    assert claim(receipt_of(folder), WANTED, folder)


def test_a_failed_step_does_not_get_its_old_receipt_back(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Snakemake keeps a copy of what a job updates; tests/workflow/test_shared_store.py has the real one."""
    monkeypatch.chdir(tmp_path)
    make(folder)
    backup = tmp_path / ".snakemake/backups" / receipt_of(folder).relative_to("/")
    backup.parent.mkdir(parents=True)
    backup.write_text(receipt_of(folder).read_text())
    assert not claim(receipt_of(folder), WANTED, folder)
    assert backup.exists()
    assert claim(receipt_of(folder), dataclasses.replace(WANTED, inputs={}), folder)
    assert not backup.exists()
