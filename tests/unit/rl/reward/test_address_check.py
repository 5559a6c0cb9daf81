"""Services and judges are asked once before GPUs wait for them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.canaries import CANARIES, found_in
from tests.support.reward_server import RewardServer, cut, says, slow, status

from posttrain.config.schema import Config
from posttrain.plan.preflight.refusals import find_refusals
from posttrain.plan.preflight.report import Finding, print_findings
from posttrain.plan.preflight.reward_tokens import check_reward_tokens
from posttrain.plan.resolve import resolve
from posttrain.rl.reward.address_check import check_addresses

CONFIG = Path(__file__).parents[4] / "config"
VARIABLE = "HF_TOKEN"


def configured(url: str, more: str = "", reward: str = "far") -> Config:
    words = f"data.reward={reward} reward.services.far.url={url} {more}"
    return resolve({"model": "tiny", "site": "local", "set": words}, CONFIG).config


def check(url: str, more: str = "") -> Finding:
    (finding,) = check_addresses(configured(url, more))
    return finding


def test_each_is_asked_once_and_only_those_that_grade(tmp_path: Path) -> None:
    (tmp_path / "judge.txt").write_text("{response}")
    with RewardServer() as server:
        judge = {"url": server.judge_url, "model": "m", "prompt_file": tmp_path / "judge.txt"}
        more = " ".join(f"reward.judges.wise.{key}={value}" for key, value in judge.items())
        more += " reward.services.unused.url=http://127.0.0.1:9/score"
        findings = check_addresses(configured(server.url, more, "exact_match+0.1*far+wise"))
    assert [(one.status, one.name.partition(" ")[0]) for one in findings] == [
        ("ok", "reward.services.far"),
        ("ok", "reward.judges.wise"),
    ]
    assert server.asked[0] == {"answers": []}
    assert (server.asked[1]["model"], server.asked[1]["max_tokens"]) == ("m", 1)
    assert check_addresses(configured("http://127.0.0.1:9", reward="exact_match")) == []


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (status(401), "error: HTTP 401: you are None"),
        (status(404), "error: HTTP 404"),
        (status(503), "connection: HTTP 503"),
        (cut, "connection: RemoteProtocolError"),
        (slow(30), "deadline: no answer within 0.5 s"),
        (says("<html>"), "error: no JSON"),
        (says('["[/x]"]'), "error: expected an empty list for no answers, came ['[/x]']"),
    ],
)
def test_what_is_wrong_is_told_and_not_asked_again(fault, reason: str, capsys: pytest.CaptureFixture) -> None:
    with RewardServer(always=fault) as server:
        finding = check(server.url, "reward.services.far.deadline_seconds=0.5")
    assert finding.problem
    assert finding.problem.key == "reward.services.far.url"
    assert finding.problem.value.startswith(f"{server.url}: {reason}")
    assert len(server.asked) == 1
    print_findings([finding])
    assert reason in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (says("{}"), "error: expected a chat completion, came {}"),
        (status(404), "error: HTTP 404: you are None"),
    ],
)
def test_an_address_where_another_judge_lives(tmp_path: Path, fault, reason: str) -> None:
    (tmp_path / "judge.txt").write_text("{response}")
    with RewardServer([fault]) as server:
        judge = {"url": server.judge_url, "model": "m", "prompt_file": tmp_path / "judge.txt"}
        more = " ".join(f"reward.judges.wise.{key}={value}" for key, value in judge.items())
        (finding,) = check_addresses(configured(server.url, more, "wise"))
    assert finding.problem
    assert finding.problem.value == f"{server.judge_url}: {reason}"
    assert finding.problem.allowed == "an address that ends in /v1, and at it /chat/completions with this model"


def test_a_token_that_is_missing_is_refused_at_the_dry_run(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured("http://127.0.0.1:9/score", f"reward.services.far.token_variable={VARIABLE}")
    monkeypatch.setenv(VARIABLE, CANARIES[VARIABLE])
    (there,) = check_reward_tokens(config)
    assert (there.status, there.detail) == ("ok", "the token is in HF_TOKEN")
    assert find_refusals(config, ["train", "evaluate"]) == []
    monkeypatch.delenv(VARIABLE)
    (missing,) = check_reward_tokens(config)
    assert (missing.problem and missing.problem.value) == "HF_TOKEN, which is not set"
    for rule in ("train", "evaluate", "approve_data"):
        assert [problem.key for problem in find_refusals(config, [rule])] == ["reward.services.far.token_variable"]
    assert find_refusals(config, ["plan"]) == []
    (unasked,) = check_addresses(config)
    assert (unasked.status, unasked.name) == ("skipped", "reward.services.far at http://127.0.0.1:9/score")
    assert unasked.detail == "HF_TOKEN, which is not set"


def test_the_token_is_not_told_by_who_hears_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, CANARIES[VARIABLE])
    with RewardServer(always=status(403)) as server:
        finding = check(server.url, f"reward.services.far.token_variable={VARIABLE}")
    assert finding.detail == f"{server.url}: error: HTTP 403: you are Bearer ***"
    assert not found_in(str(finding))
