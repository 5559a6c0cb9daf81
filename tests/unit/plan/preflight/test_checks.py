from pathlib import Path

import pytest

from posttrain.errors import ConfigError
from posttrain.plan.preflight.checks import check_everything
from posttrain.plan.preflight.report import print_findings, raise_problems
from posttrain.plan.resolve import resolve
from posttrain.store import Paths

CONFIG_DIR = Path(__file__).resolve().parents[4] / "config"


def findings_of(root, overrides=""):
    roots = f"site.store={root}/store site.results={root}/results site.node_local={root}/local"
    workflow = {"model": "tiny", "site": "local", "set": f"{roots} {overrides}"}
    return check_everything(Paths(resolve(workflow, CONFIG_DIR)))


def test_the_tiny_model_can_run_here(tmp_path, capsys):
    findings = findings_of(tmp_path)
    raise_problems(findings)
    print_findings(findings)
    printed = capsys.readouterr().out
    assert printed.count("\nok") + printed.startswith("ok") >= 6
    assert "problem" not in printed


def test_all_problems_come_in_one_report(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    overrides = f"logging.wandb_mode=online engine.kind=sglang engine.python={tmp_path}/none"
    with pytest.raises(ConfigError) as caught:
        raise_problems(findings_of(tmp_path, overrides))
    assert [problem.key for problem in caught.value.problems] == ["engine.python", "logging.wandb_mode"]
