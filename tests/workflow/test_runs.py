"""`snakemake` and runs that have begun: who only looks need not say what is learned; forks come before training."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.support.begun_runs import begin_run
from tests.support.rejections import assert_rejected
from tests.support.workflow_runs import run_snakemake


@pytest.fixture
def snakemake(tmp_path: Path):
    begin_run(tmp_path / "results", "old")

    def run(*words: str, set: str = "", **config: str) -> tuple[int, str]:
        pairs = [f"{key}={value}" for key, value in config.items()] + ([f"set={set}"] if set else [])
        ended = run_snakemake(tmp_path, *words, "--config", *pairs)
        return ended.returncode, ended.stdout

    return run


@pytest.mark.parametrize("target", ["status", "snapshot", "attach"])
def test_who_looks_at_a_run_need_not_say_what_it_learns(snakemake, target: str) -> None:
    code, output = snakemake("-n", run="old")
    assert code != 0
    assert "training.num_steps = 80" in output
    code, output = snakemake(target, "--cores", "1", run="old")
    assert code == 0, output
    assert "6 of 40" in output


def test_what_is_asked_for_beside_a_look_is_refused_all_the_same(snakemake, tmp_path: Path) -> None:
    begun = (tmp_path / "results/old/experiment.yaml").read_text()
    code, output = snakemake("status", "resolve_config", "--cores", "1", "--forcerun", "resolve_config", run="old")
    assert code != 0
    assert "training.num_steps = 80" in output
    assert (tmp_path / "results/old/experiment.yaml").read_text() == begun


def test_a_preflight_is_made_each_time_it_is_asked_for(snakemake, tmp_path: Path) -> None:
    for number in ("001", "002"):
        code, output = snakemake("preflight", "--cores", "1", run="new")
        assert code == 0, output
        assert (tmp_path / "results/new/preflight" / number / "preflight.json").exists()
    assert json.loads((tmp_path / "results/new/preflight.json").read_text())["unfit"] == {}


def test_what_cannot_be_trained_yet_has_a_preflight(snakemake, tmp_path: Path) -> None:
    """GLM-5 with engines that prefill apart from those that decode: only one machine is too few for it."""
    code, output = snakemake("-n", "preflight", model="glm5", site="local")
    assert code != 0
    assert re.findall(r"^  - (.*?) = (.*)$", output, re.MULTILINE) == [("nodes", "16 [one-machine]")]
    code, output = snakemake("-n", "preflight", model="glm5", site="example_slurm")
    assert code == 0, output
    assert "h200 (17 nodes, 136 GPUs)" in output
    code, output = snakemake("-n", "preflight", model="glm5", site="example_kubernetes")
    assert code != 0
    assert_rejected(output, "preflight-in-pods", key="site.launcher")


def test_training_of_a_fork_waits_for_its_checkpoint(snakemake) -> None:
    code, output = snakemake("-n", run="new", fork="old@4")
    assert code == 0, output
    assert "begin new with the state of old@4" in output
    assert output.index("begin new with") < output.index("train new with grpo: ")
    assert "fork_checkpoint" not in snakemake("-n", run="other")[1]


def test_bad_forks_are_refused_by_the_dry_run(snakemake, tmp_path: Path) -> None:
    for fork, set_, rejection, key, datum in (
        ("old@3", "", "no-such-step", "fork", "2, 4"),
        ("odl@4", "", "no-such-run", "fork", "'old'"),
        ("old", "", "not-a-run-at-step", "fork", "RUN@STEP"),
        ("old@4", "training.num_steps=4", "fork-has-ended", "training.num_steps", "4"),
    ):
        code, output = snakemake("-n", run="new", fork=fork, set=set_)
        assert code != 0
        assert_rejected(output, rejection, datum, key=key)
        assert "Traceback" not in output
    assert not (tmp_path / "results" / "new").exists()


def test_a_damaged_receipt_of_a_fork_is_told_without_a_traceback(snakemake, tmp_path: Path) -> None:
    receipt = tmp_path / "results" / "new" / "fork.receipt.json"
    receipt.parent.mkdir()
    receipt.write_text("{}")
    code, output = snakemake("-n", run="new", fork="old@4")
    assert code != 0
    assert f"{receipt.relative_to(tmp_path)}: not a receipt" in output
    assert "Traceback" not in output
