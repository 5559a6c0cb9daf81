"""The beginning of the chain: a repository on a Hub on loopback, and a local folder."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from tests.support.downloading import StoreFolder, from_folder, from_hub
from tests.support.hub_server import HubServer
from tests.support.small_checkpoint import make_small_checkpoint

from posttrain.checkpoint.hub.source_check import check_source
from posttrain.report.provenance import Artifact
from posttrain.store import Receipt, manifest_of, read_receipt, receipt_of, record_files


def made(store: StoreFolder, source: list[object]) -> Artifact:
    """Bring a checkpoint into the store by its three steps."""
    done = store.run_all(*source)
    assert done.returncode == 0, done.stderr
    return Artifact("hf", store.folder, receipt_of(store.folder), read_receipt(receipt_of(store.folder)))


def with_files(artefact: Artifact, files: tuple) -> Artifact:
    return dataclasses.replace(artefact, receipt=dataclasses.replace(artefact.receipt, files=files))


@pytest.fixture
def fetched(tmp_path: Path) -> Artifact:
    make_small_checkpoint(tmp_path / "origin")
    with HubServer() as hub:
        revision = hub.add_repo("owner/small", tmp_path / "origin")
        return made(
            StoreFolder(tmp_path / "store", environment={"HF_ENDPOINT": hub.url}), from_hub("owner/small", revision)
        )


def test_what_the_hub_lists_is_what_the_receipt_says(fetched: Artifact) -> None:
    source, problems = check_source(fetched)
    assert source == f"Hub: owner/small at {fetched.receipt.settings['revision'][:12]}"
    assert problems == []


def test_a_small_file_is_compared_with_gits_id(fetched: Artifact) -> None:
    """A receipt that was made for the changed file does not help."""
    path = fetched.folder / "config.json"
    path.write_bytes(path.read_bytes().replace(b" ", b"\t"))
    (problem,) = check_source(dataclasses.replace(fetched, receipt=_with_files(fetched)))[1]
    assert problem.startswith(f"{path}: Git blob id ")


def test_another_sha256_or_a_file_from_elsewhere_is_told(fetched: Artifact) -> None:
    files = list(fetched.receipt.files)
    at = next(number for number, record in enumerate(files) if record.sha256)
    files[at] = dataclasses.replace(files[at], sha256="0" * 64)
    (fetched.folder / "notes.txt").write_text("from nowhere")
    files += record_files(fetched.folder, ["notes.txt"])
    problems = check_source(with_files(fetched, tuple(files)))[1]
    assert f"{fetched.folder / files[at].path}: the list has" in problems[0]
    assert problems[1] == f"{fetched.folder / 'notes.txt'}: not in the list of its source"


def test_a_missing_list_or_one_of_another_revision_is_told(fetched: Artifact) -> None:
    manifest = manifest_of(fetched.folder)
    content = json.loads(manifest.read_text())
    content["source"]["revision"] = "0" * 40
    manifest.write_text(json.dumps(content))
    assert "not the list that" in check_source(fetched)[1][0]
    manifest.unlink()
    assert "nothing proves what the source had" in check_source(fetched)[1][0]


def test_a_local_source_is_compared_file_by_file(tmp_path: Path) -> None:
    origin = make_small_checkpoint(tmp_path / "origin")
    taken = made(StoreFolder(tmp_path / "store"), from_folder(origin))
    assert check_source(taken) == (f"folder: {origin}", [])
    text = (origin / "config.json").read_text()
    (origin / "config.json").unlink()
    (origin / "config.json").write_text(text + " ")
    assert check_source(taken)[1] == [f"{origin / 'config.json'}: missing or changed since it was taken"]
    origin.rename(tmp_path / "elsewhere")
    assert "is gone" in check_source(taken)[1][0]


def _with_files(fetched: Artifact) -> Receipt:
    """Return the receipt that an honest step would write about the files as they are now."""
    sha256 = {record.path: record.sha256 for record in fetched.receipt.files}
    files = tuple(
        dataclasses.replace(record, sha256=sha256[record.path]) for record in record_files(fetched.folder, sha256)
    )
    return dataclasses.replace(fetched.receipt, files=files)
