import os
import random
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from tests.hub_server import HubServer
from tests.scripts.killing import SCRIPTS, run_killed
from tests.small_checkpoint import make_small_checkpoint

from posttrain.artifacts import hash_file, read_receipt, require_files

NEEDED = [
    "chat_template.jinja",
    "config.json",
    "model-00001-of-00003.safetensors",
    "model-00002-of-00003.safetensors",
    "model-00003-of-00003.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
]


@pytest.fixture
def hub():
    with HubServer() as server:
        yield server


@pytest.fixture
def origin(tmp_path):
    return make_small_checkpoint(tmp_path / "origin")


def _arguments(store: Path, *more: object) -> list[object]:
    return ["--folder", store / "hf", "--receipt", store / "hf.receipt.json", *more]


def _run(arguments, hub=None, **options) -> subprocess.CompletedProcess:
    env = os.environ | ({"HF_ENDPOINT": hub.url} if hub else {}) | options.pop("env", {})
    command = [sys.executable, SCRIPTS / "download_hf_checkpoint.py", *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, **options)


def _hashes(folder: Path) -> dict[str, str]:
    return {path.name: hash_file(path) for path in sorted(folder.iterdir())}


def test_download_survives_kills_and_ends_with_the_hubs_bytes(hub, origin, tmp_path):
    revision = hub.add_repo("owner/small", origin)
    source = ["--kind", "hub", "--repo-id", "owner/small", "--revision", revision]
    store = tmp_path / "store"
    points = random.Random(1).sample(range(1, 90), 12)
    endings = run_killed(
        "download_hf_checkpoint",
        _arguments(store, *source),
        store,
        [*points, 10**9],
        env={"HF_ENDPOINT": hub.url},
        claim=(store / "hf", store / "hf.receipt.json"),
    )
    assert endings.count(-9) >= 6, endings
    assert endings[-1] == 0
    receipt = require_files(store / "hf", store / "hf.receipt.json", content=True)
    assert [record.path for record in receipt.files] == NEEDED
    assert _hashes(store / "hf") == {name: hash_file(origin / name) for name in NEEDED}
    assert sorted(path.name for path in store.iterdir()) == [
        "hf",
        "hf.history.jsonl",
        "hf.manifest.json",
        "hf.receipt.json",
    ]
    again = tmp_path / "again"
    assert _run(_arguments(again, *source), hub).returncode == 0
    assert read_receipt(again / "hf.receipt.json").digest == receipt.digest


def test_a_local_folder_is_linked_without_a_network(origin, tmp_path):
    store = tmp_path / "store"
    done = _run(
        _arguments(store, "--kind", "folder", "--source-folder", origin),
        env={"HF_ENDPOINT": "http://127.0.0.1:9"},
    )
    assert done.returncode == 0, done.stderr
    assert _hashes(store / "hf") == {name: hash_file(origin / name) for name in NEEDED}
    assert (store / "hf" / NEEDED[2]).samefile(origin / NEEDED[2])


def test_a_truncated_shard_of_a_local_folder_is_named_with_both_sizes(origin, tmp_path):
    shard = origin / NEEDED[3]
    size = shard.stat().st_size
    os.truncate(shard, size - 100)
    done = _run(_arguments(tmp_path / "store", "--kind", "folder", "--source-folder", origin))
    assert done.returncode == 1
    assert NEEDED[3] in done.stderr
    assert str(size) in done.stderr
    assert str(size - 100) in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "store" / "hf.receipt.json").exists()
    assert not (tmp_path / "store" / "hf").exists()


def test_a_revision_that_does_not_exist_is_one_message(hub, origin, tmp_path):
    hub.add_repo("owner/small", origin)
    source = ["--kind", "hub", "--repo-id", "owner/small", "--revision", "0" * 40]
    done = _run(_arguments(tmp_path / "store", *source), hub)
    assert done.returncode == 1
    assert "model.source.revision = " + "0" * 40 in done.stderr
    assert "Traceback" not in done.stderr


def test_a_disk_that_becomes_full_is_one_message_and_keeps_what_is_complete(hub, origin, tmp_path):
    """A limit on file sizes stands for the full disk: both end a write with an error of the system."""
    revision = hub.add_repo("owner/small", origin)
    arguments = _arguments(
        tmp_path / "store",
        "--kind",
        "hub",
        "--repo-id",
        "owner/small",
        "--revision",
        revision,
        "--workers",
        1,
    )
    limit = (origin / NEEDED[3]).stat().st_size
    assert (origin / NEEDED[2]).stat().st_size > limit
    done = _run(arguments, hub, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    assert done.returncode == 1
    assert "free some space and run again" in done.stderr
    assert "Traceback" not in done.stderr
    assert _run(arguments, hub).returncode == 0


def test_the_token_appears_nowhere(hub, origin, tmp_path):
    revision = hub.add_repo("owner/private", origin, token="hf_canary0123456789")
    arguments = _arguments(tmp_path / "store", "--kind", "hub", "--repo-id", "owner/private", "--revision", revision)
    done = _run(arguments, hub, env={"HF_TOKEN": "hf_canary0123456789"})
    assert done.returncode == 0, done.stderr
    written = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert not any(b"hf_canary" in path.read_bytes() for path in written)
    assert "hf_canary" not in done.stdout + done.stderr
    refused = _run(_arguments(tmp_path / "other", *arguments[4:]), hub, env={"HF_TOKEN": ""})
    assert refused.returncode == 1
    assert "HF_TOKEN" in refused.stderr
