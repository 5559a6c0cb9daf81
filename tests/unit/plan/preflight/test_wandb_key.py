from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.config.schema import Config, Logging
from posttrain.plan.preflight.wandb_key import check_wandb

ONLINE = Logging(wandb_mode="online")
SECRET = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of one's own, without a key."""
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def status_of(settings: Logging) -> str:
    finding = check_wandb(Config(logging=settings))
    assert SECRET not in f"{finding.detail}{finding.problem}"
    return finding.status


@pytest.mark.parametrize(
    ("settings", "status"), [(Logging(wandb=False), "ok"), (Logging(wandb_mode="offline"), "ok"), (ONLINE, "problem")]
)
def test_a_key_is_needed_only_online(settings: Logging, status: str) -> None:
    assert status_of(settings) == status


def test_the_environment_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    assert status_of(ONLINE) == "ok"


@pytest.mark.parametrize(
    ("url", "machine", "status"),
    [
        (None, "api.wandb.ai", "ok"),
        (None, "wandb.example.org", "problem"),
        ("https://wandb.example.org:8443/base", "wandb.example.org", "ok"),
        ("https://wandb.example.org", "api.wandb.ai", "problem"),
    ],
)
def test_what_wandb_login_leaves_is_found_for_its_own_server(
    home: Path, monkeypatch: pytest.MonkeyPatch, url: str | None, machine: str, status: str
) -> None:
    (home / ".netrc").write_text(f"machine {machine}\n  login user\n  password {SECRET}\n")
    (home / ".netrc").chmod(0o600)
    if url:
        monkeypatch.setenv("WANDB_BASE_URL", url)
    assert status_of(ONLINE) == status


def test_another_place_for_it_and_one_that_cannot_be_read(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NETRC", str(home / "mine"))
    (home / "mine").write_text(f"machine api.wandb.ai login user password {SECRET}\n")
    (home / "mine").chmod(0o600)
    assert status_of(ONLINE) == "ok"
    (home / "mine").write_text("machine api.wandb.ai nonsense\n")
    assert status_of(ONLINE) == "problem"


def test_the_library_itself_finds_the_key_there(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts is what W&B reads: `wandb login` writes the file, and the library takes the key from it."""
    from wandb.sdk.lib import wbauth

    wbauth.write_netrc_auth(host="https://api.wandb.ai", api_key=SECRET)
    assert status_of(ONLINE) == "ok"
    assert wbauth.read_netrc_auth(host="https://api.wandb.ai") == SECRET
