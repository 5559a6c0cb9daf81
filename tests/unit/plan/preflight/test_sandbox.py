"""Whether a node can run responses, tried for real; and a node that forbids namespaces."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.rejections import rejected

from posttrain.config.sandbox import SANDBOX_SECRET_VARIABLE
from posttrain.config.sandbox_needs import needs_sandbox
from posttrain.config.schema import Config
from posttrain.plan.preflight.judgement import summarize
from posttrain.plan.preflight.node import inspect_node
from posttrain.plan.preflight.refusals import find_refusals
from posttrain.plan.preflight.sandbox import check_sandbox, describe_sandbox, sandbox_problems
from posttrain.plan.resolve import resolve
from posttrain.sandbox.bubblewrap import find_bwrap
from posttrain.sandbox.guards import describe_guards

CONFIG_DIR = Path(__file__).parents[4] / "config"
SUITE = "evaluation.suites.mine"


def config_of(overrides: str = "", **words: str) -> Config:
    return resolve({"model": "tiny", "site": "local", **words, "set": overrides}, CONFIG_DIR).config


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("", False),
        ("data.reward=code", True),
        ("data.reward=code+0.1*format", True),
        (
            "evaluation.suites.mine.file=x.jsonl evaluation.suites.mine.kind=files evaluation.suites.mine.reward=code",
            True,
        ),
    ],
)
def test_only_some_rewards_need_a_sandbox(overrides: str, expected: bool) -> None:
    assert needs_sandbox(config_of(overrides)) is expected


OWN = """
class Own:
    def __init__(self, seed): ...
    def reset(self, row): ...
    def step(self, action): ...
    def reward(self, trajectory): ...
"""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("from posttrain.sandbox.run import run", True),
        ("from posttrain import sandbox", True),
        ("import posttrain.sandbox.run as run", True),
        ("from posttrain.sandboxes import run", False),
        ("import json", False),
    ],
)
def test_an_environment_that_imports_the_sandbox_needs_it(tmp_path: Path, line: str, expected: bool) -> None:
    (path := tmp_path / "own.py").write_text(f"{line}\n{OWN}")
    assert needs_sandbox(config_of(f"data.environment={path}:Own data.reward=environment")) is expected


def test_a_machine_that_can_says_how() -> None:
    finding = check_sandbox(config_of("data.reward=code"))
    assert finding.status == "ok"
    assert finding.detail == f"runs here; {describe_guards()}"
    assert check_sandbox(config_of()).status == "skipped"


def test_the_plan_says_what_limits_programs_as_far_as_it_knows() -> None:
    here = config_of("data.reward=code")
    away = dataclasses.replace(here, site=dataclasses.replace(here.site, launcher="slurm"))
    assert describe_sandbox(config_of()) == ""
    assert describe_sandbox(here) == f"this machine runs the programs; {describe_guards()}"
    assert describe_sandbox(config_of("data.reward=code sandbox.address=http://n7:8700")).startswith(
        "http://n7:8700 runs"
    )
    told = describe_sandbox(away)
    assert "preflight says which, and whether it has Landlock" in told
    assert told.endswith(f"(this machine: {describe_guards()})")


def test_nodes_of_a_job_are_tried_there(tmp_path: Path) -> None:
    config = config_of("data.reward=code")
    facts = inspect_node(config, tmp_path / "local", tmp_path / "shared")
    assert facts.problems == []
    assert facts.sandbox == f"sandbox: {describe_guards()}"
    assert summarize({"node0": facts.as_dict(), "node1": facts.as_dict()}, {}, {}).endswith(f" MB/s, {facts.sandbox}")
    assert inspect_node(config_of(), tmp_path / "local", tmp_path / "shared").sandbox == ""
    site = dataclasses.replace(config.site, launcher="slurm")
    assert check_sandbox(dataclasses.replace(config, site=site)).status == "skipped"


FORBIDDEN = f"""
import json, sys
from pathlib import Path
from posttrain.plan.preflight.judgement import summarize
from posttrain.plan.preflight.node import inspect_node
from posttrain.plan.preflight.sandbox import check_sandbox
from posttrain.plan.resolve import resolve
request = {{"model": "tiny", "site": "local", "set": sys.argv[1]}}
config = resolve(request, Path({str(CONFIG_DIR)!r})).config
node = inspect_node(config, Path(sys.argv[2]), Path(sys.argv[2]))
print(json.dumps([check_sandbox(config).as_dict(), node.problems]))
"""


def test_a_machine_that_forbids_namespaces_says_what_helps(tmp_path: Path) -> None:
    outer = [find_bwrap(), "--dev-bind", "/", "/", "--unshare-user", "--disable-userns", "--"]
    command = [*outer, sys.executable, "-c", FORBIDDEN, "data.reward=code", str(tmp_path)]
    finding, (problem,) = json.loads(subprocess.run(command, stdout=subprocess.PIPE, timeout=120, check=True).stdout)
    assert finding["problem"]["code"] == "no-sandbox"
    assert "max_user_namespaces" in finding["problem"]["remedy"]
    assert problem.startswith("sandbox: bubblewrap cannot make a sandbox here")
    assert "sandbox.address" in problem


def test_a_service_needs_its_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SANDBOX_SECRET_VARIABLE, raising=False)
    config = config_of("data.reward=code sandbox.address=http://127.0.0.1:9")
    problem = check_sandbox(config).problem
    assert problem
    assert (problem.code, problem.key) == ("secret-not-set", SANDBOX_SECRET_VARIABLE)
    assert sandbox_problems(config) == [str(problem)]
    assert [one for one in find_refusals(config, ["train"]) if one.code == "secret-not-set"] == [problem]
    assert [one for one in find_refusals(config, ["report"]) if one.code == "secret-not-set"] == []


def test_a_service_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SANDBOX_SECRET_VARIABLE, "secret")
    finding = check_sandbox(config_of("data.reward=code sandbox.address=http://127.0.0.1:9"))
    assert finding.problem
    assert (finding.problem.code, finding.problem.key) == ("no-sandbox", "sandbox.address")
    assert "http://127.0.0.1:9" in finding.problem.value


@pytest.mark.parametrize("address", ["node:8700", "ftp://node", "http://me:pass@node", "http://node/?key=1"])
def test_an_address_is_a_place_without_secrets(address: str) -> None:
    with rejected("not-an-address", key="sandbox.address") as caught:
        config_of(f"sandbox.address={address}")
    assert "pass" not in str(caught.value).replace("password", "")
    assert "key=1" not in str(caught.value)
