import json
import os

import pytest
from tests.support.downloading import NEEDED, StoreFolder, from_folder, from_hub
from tests.support.hub_server import HubServer
from tests.support.rejections import assert_rejected
from tests.support.small_checkpoint import make_small_checkpoint

from posttrain.store import manifest_of


@pytest.fixture
def hub():
    with HubServer() as server:
        yield server


@pytest.fixture
def origin(tmp_path):
    return make_small_checkpoint(tmp_path / "origin")


@pytest.fixture
def store(tmp_path):
    return StoreFolder(tmp_path / "store")


def _refusal(store, hub, *source, more=(), **environment):
    store.environment = {"HF_ENDPOINT": hub.url, "HF_TOKEN": ""} | environment
    done = store.run("list_hf_checkpoint", *source, more=more)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert not manifest_of(store.folder).exists()
    return done.stderr


def test_the_list_holds_names_sizes_and_hashes(store, hub, origin):
    revision = hub.add_repo("owner/small", origin)
    store.environment["HF_ENDPOINT"] = hub.url
    assert store.run("list_hf_checkpoint", *from_hub("owner/small", revision)).returncode == 0
    row = json.loads(manifest_of(store.folder).read_text())
    assert row["source"] == {"kind": "hub", "repo_id": "owner/small", "revision": revision, "repo_type": "model"}
    assert [file["path"] for file in row["files"]] == NEEDED
    assert [file["size_bytes"] for file in row["files"]] == [(origin / name).stat().st_size for name in NEEDED]
    assert not hub.fetched


def test_a_revision_that_does_not_exist_is_one_message(store, hub, origin):
    hub.add_repo("owner/small", origin)
    text = _refusal(store, hub, *from_hub("owner/small", "0" * 40))
    assert "model.source.revision = " + "0" * 40 in text


@pytest.mark.parametrize("gated", [True, False])
def test_a_repository_that_may_not_be_read(store, hub, origin, gated):
    source = from_hub("owner/other", hub.add_repo("owner/other", origin, token="hf_right", gated=gated))
    if not gated:
        assert "HF_TOKEN" in _refusal(store, hub, *source, HF_TOKEN="hf_wrong")
        return
    # Anyone may list a gated repository; its files are refused.
    store.environment = {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_without_rights"}
    assert store.run("list_hf_checkpoint", *source).returncode == 0
    done = store.run("download_hf_checkpoint")
    assert done.returncode == 1
    assert_rejected(done.stderr, "no-such-repository", "it is gated", key="model.source.repo_id")
    assert "hf_without_rights" not in done.stderr


def test_a_hub_that_stays_broken(store, hub, origin):
    hub.faults.status = 502
    source = from_hub("owner/small", hub.add_repo("owner/small", origin))
    text = _refusal(store, hub, *source, more=["--num-retries", 1])
    assert "HTTP 502; retry 1 of 1 in 1.0 s" in text
    assert f"{hub.url} answered with HTTP 502 (2 attempts)" in text


def test_a_truncated_shard_of_a_local_folder_is_named_with_both_sizes(store, hub, origin):
    shard = origin / NEEDED[3]
    size = shard.stat().st_size
    os.truncate(shard, size - 100)
    text = _refusal(store, hub, *from_folder(origin))
    assert all(word in text for word in (NEEDED[3], str(size), str(size - 100)))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, "config.json: missing"),
        ("tokenizer.json", None, "no tokenizer"),
        ("tokenizer_config.json", "{", "tokenizer_config.json: not JSON"),
        ("model-00001-of-00003.safetensors", None, "no such file"),
    ],
)
def test_a_local_folder_that_is_not_whole(store, hub, origin, name, content, message):
    (origin / name).unlink() if content is None else (origin / name).write_text(content)
    assert message in _refusal(store, hub, *from_folder(origin))
