import json

import huggingface_hub
import pytest
from tests.support.hub_server import HubServer
from tests.support.rejections import rejected

from posttrain.checkpoint.hub.client import download
from posttrain.checkpoint.hub.listed_files import ListedFile
from posttrain.checkpoint.hub.listing import HubSource, list_files
from posttrain.checkpoint.hub.retries import RetryRule
from posttrain.errors import ConfigError
from posttrain.store import manifest_of

HELLO = ListedFile("config.json", 6, git_blob="ce013625030ba8dba906f756967f9e9ca394464a")
EMPTY_SHA256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "origin"
    folder.mkdir()
    (folder / "config.json").write_bytes(b"hello\n")
    (folder / "model.safetensors").touch()
    with HubServer() as hub:
        yield HubSource("owner/name", hub.add_repo("owner/name", folder), endpoint=hub.url)


@pytest.fixture
def manifest(tmp_path):
    return manifest_of(tmp_path / "hf")


@pytest.fixture
def go_offline(monkeypatch):
    return lambda: monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def test_files_have_the_hash_of_where_they_are_stored(source, manifest):
    files = list_files(source, manifest, lambda path: True).files
    assert files == (HELLO, ListedFile("model.safetensors", 0, EMPTY_SHA256))
    assert list_files(source, manifest, "config.json".__eq__).files == (HELLO,)


def test_the_answer_is_kept_for_offline_use(source, manifest, tmp_path, go_offline):
    online = list_files(source, manifest, lambda path: True)
    assert manifest == tmp_path / "hf.manifest.json"
    go_offline()
    assert list_files(source, manifest, lambda path: True) == online


def test_an_answer_about_another_commit_is_not_used(source, manifest, go_offline):
    list_files(source, manifest, lambda path: True)
    go_offline()
    with rejected("manifest-of-another-source", "hf.manifest.json", "owner/name@0000"):
        list_files(HubSource(source.repo_id, "0" * 40), manifest, lambda path: True)
    assert list_files(source, manifest.with_name("other.manifest.json"), lambda path: True) is None


def test_a_spoilt_answer_is_named(source, manifest, go_offline):
    manifest.write_text(json.dumps({"files": 3}))
    go_offline()
    with rejected("manifest-invalid", "hf.manifest.json"):
        list_files(source, manifest, lambda path: True)


def test_a_branch_is_no_pin(source, manifest):
    with pytest.raises(ConfigError) as raised:
        list_files(HubSource(source.repo_id, "main", endpoint=source.endpoint), manifest, lambda path: True)
    assert raised.value.problems[0].value == "main"
    assert source.revision in raised.value.problems[0].remedy


# ---- who refused what ----


@pytest.fixture
def hub(tmp_path):
    with HubServer() as hub:
        yield hub


@pytest.mark.parametrize(
    ("kind", "token", "what", "remedy"),
    [
        ("absent", "", "HTTP 401: no token was sent", "check the name"),
        ("absent", "hf_right", "HTTP 401: the token's account sees no such repository", "check the name"),
        ("private", "", "HTTP 401: no token was sent", "needs HF_TOKEN"),
        ("private", "hf_wrong", "HTTP 401: the token was rejected", "export HF_TOKEN anew"),
        ("gated", "", "HTTP 403: it is gated, and no token was sent", "ask for access on its page"),
        ("gated", "hf_other", "HTTP 403: it is gated, and the token's account has no access", "ask for access"),
        ("forbidden", "hf_right", "HTTP 403: the token's account sees no such repository, or may", "needs HF_TOKEN"),
        ("forbidden", "", "HTTP 403: no token was sent", "needs HF_TOKEN"),
    ],
)
def test_a_refusal_names_the_endpoint_and_what_was_refused(hub, tmp_path, monkeypatch, kind, token, what, remedy):
    folder = tmp_path / "origin"
    folder.mkdir()
    (folder / "config.json").write_bytes(b"hello\n")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
    monkeypatch.setenv("HF_TOKEN", token)
    revision = (
        hub.add_repo("owner/name", folder, token="hf_right", gated=kind == "gated") if kind != "absent" else "0" * 40
    )
    hub.faults.status = 403 if kind == "forbidden" else 0
    source = HubSource("owner/name", revision, endpoint=hub.url)
    with pytest.raises(ConfigError) as refused:
        # A gated repository lists what it does not give.
        download(source, tmp_path / "hf.partial", manifest_of(tmp_path / "hf"))
    (problem,) = refused.value.problems
    assert (problem.key, problem.value) == ("model.source.repo_id", "owner/name")
    assert f"{hub.url} answered with {what}" in problem.allowed
    assert remedy in problem.remedy
    assert "hf_" not in str(refused.value)


def test_user_and_password_of_the_endpoint_are_not_told(tmp_path):
    source = HubSource("owner/name", "0" * 40, endpoint="http://user:secret@127.0.0.1:1")
    with pytest.raises(RuntimeError) as refused:
        list_files(source, manifest_of(tmp_path / "hf"), lambda path: True, RetryRule(num_retries=0))
    assert "http://***@127.0.0.1:1 cannot be reached" in str(refused.value)
    assert "secret" not in repr(refused.value)
