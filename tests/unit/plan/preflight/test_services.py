import socket
import subprocess
import sys
import textwrap

import pytest
from tests.support.hub_server import HubServer

# The Hub's address is read when its library is imported, so each check runs in a process of its own.
PROGRAM = """
import sys
from posttrain.plan.preflight.services import check_repository
finding = check_repository("model.source", "model", sys.argv[1], sys.argv[2])
print(finding.status, "|", finding.detail, "|", finding.problem)
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("repo")
    (folder / "config.json").write_text("{}")
    with HubServer() as server:
        server.revision = server.add_repo("owner/name", folder)
        yield server


def check(endpoint, repo_id, revision, **environment):
    env = {"HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_TELEMETRY": "1", **environment}
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), repo_id, revision]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**_inherited(), **env})
    return done.stdout


def _inherited():
    import os

    return {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}


def test_a_visible_revision_passes(hub):
    assert check(hub.url, "owner/name", hub.revision).startswith("ok | revision")


def test_an_unknown_revision_and_an_unknown_repository_are_told_apart(hub):
    unknown = check(hub.url, "owner/name", "f" * 40)
    assert unknown.startswith("problem")
    assert "model.source.revision = " + "f" * 40 in unknown
    missing = check(hub.url, "owner/other", hub.revision)
    assert "model.source.repo_id = owner/other: not found" in missing
    assert "HF_TOKEN" in missing


def test_a_gated_repository_is_asked_for_access(hub, tmp_path):
    (tmp_path / "test.jsonl").write_text("{}")
    revision = hub.add_repo("owner/gated", tmp_path, token="hf_right", gated=True)
    refused = check(hub.url, "owner/gated", revision)
    assert "model.source.repo_id = owner/gated: access is restricted" in refused
    assert "accept its terms" in refused
    assert check(hub.url, "owner/gated", revision, HF_TOKEN="hf_right").startswith("ok | revision")


def test_a_suite_without_a_commit_is_a_problem(hub):
    assert "model.source.revision = unpinned" in check(hub.url, "owner/name", "unpinned")


def test_a_hub_that_does_not_answer_is_a_problem():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        output = check(endpoint, "owner/name", "f" * 40)
    assert output.startswith("problem")
    assert endpoint in output


def test_offline_skips_the_question(hub):
    assert check("http://127.0.0.1:9", "owner/name", "f" * 40, HF_HUB_OFFLINE="1").startswith(
        "skipped | HF_HUB_OFFLINE"
    )
