"""Wrong configuration ends before any rule: one message with every problem, exit code 1, no traceback, no file.

What does not fit this hardware ends the same way, but for the plan, whose page is drawn first, and for what is trained.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.support.branches import dry_run
from tests.support.rejections import assert_rejected
from tests.support.workflow_runs import run_snakemake

# What `--config` gives; the keys that must be named, each with its code and what its remedy suggests.
WRONG: dict[str, tuple[dict[str, object], dict[str, tuple[str, str]]]] = {
    "misspelled choice": ({"modle": "glm5"}, {"modle": ("unknown-key", "'model'")}),
    "misspelled key": ({"set": "optmizer.lr=1e-6"}, {"optmizer.lr": ("unknown-key", "'optimizer.lr'")}),
    "key outside of set": ({"optimizer_lr": 1}, {"optimizer_lr": ("unknown-key", "set='optimizer_lr=1'")}),
    "wrong type": ({"set": "training.num_steps=many"}, {"training.num_steps": ("wrong-type", "whole number")}),
    "not a number": ({"set": "rollout.temperature=nan"}, {"rollout.temperature": ("out-of-range", "finite")}),
    "out of range": ({"set": "optimizer.lr=2"}, {"optimizer.lr": ("out-of-range", "more than 0 and at most 1")}),
    "unknown model": ({"model": "tyni"}, {"model": ("unknown-name", "'tiny'")}),
    "unknown hardware": ({"hardware": "h2000"}, {"hardware": ("unknown-name", "'h200'")}),
    "unknown site": ({"site": "lokal"}, {"site": ("unknown-name", "'local'")}),
    "no nodes": ({"nodes": 0}, {"nodes": ("not-a-count", "")}),
    "nodes in set": ({"set": "nodes=2"}, {"set: nodes": ("chosen-inside-set", "--config nodes=2")}),
    "run name of digits": ({"run": "2026_11_21"}, {"run": ("wrong-type", "")}),
    "run name with a slash": ({"run": "mine/too"}, {"run": ("not-a-name", "")}),
    "node name that is a path": ({"set": "site.node_names=[../a]"}, {"site.node_names": ("not-node-names", "")}),
    "unreadable set": ({"set": "optimizer.lr"}, {"set": ("not-key-value", "'='")}),
    "batch that does not divide": (
        {"set": "training.global_batch_size=48"},
        {"training.global_batch_size": ("batch-divides-samples", "")},
    ),
    "layout that does not fit": (
        {"model": "glm5", "set": "parallel.tensor_model_parallel_size=3"},
        {"parallel": ("layout-divides-ranks", ""), "parallel.tensor_model_parallel_size": ("size-divides-model", "")},
    ),
    "everything at once": (
        {"model": "tyni", "hardware": "gpu", "site": "lokal", "nodes": 0, "set": "optmizer.lr=1 training.num_steps=x"},
        {
            **dict.fromkeys(["model", "hardware", "site"], ("unknown-name", "")),
            "nodes": ("not-a-count", ""),
            "optmizer.lr": ("unknown-key", ""),
            "training.num_steps": ("wrong-type", ""),
        },
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_refused_in_one_message(name: str, tmp_path: Path) -> None:
    config, expected = WRONG[name]
    code, output = dry_run(tmp_path, config)
    assert code == 1
    assert "Traceback" not in output
    assert 'File "' not in output
    told = r"^  - (.*?) = .+ \[(.+)\]\n      allowed: .+\n      remedy:  (.+)$"
    problems = re.findall(told, output, re.MULTILINE)
    assert {(key, code) for key, code, _ in problems} == {(key, code) for key, (code, _) in expected.items()}, output
    assert output.count(f"{len(problems)} problem{'s' * (len(problems) > 1)} in the configuration:\n") == 1
    for key, _, remedy in problems:
        assert expected[key][1] in remedy
    assert {path.name for path in tmp_path.iterdir()} <= {".snakemake"}


def test_files_of_the_command_line_are_read_strictly(tmp_path: Path) -> None:
    """Snakemake has read them by then, and kept the last of two equal keys."""
    (tmp_path / "mine.yaml").write_text("optimizer: {lr: 1e-5}\nnodes: 1\noptimizer: {beta1: 0.8}\n")
    (tmp_path / "other.yaml").write_text("1: 2\n")
    code, output = dry_run(tmp_path, {}, "--configfile", "mine.yaml", "other.yaml")
    assert code == 1
    assert "Traceback" not in output
    assert_rejected(output, "not-strict-yaml", "mine.yaml = line 3: 'optimizer'", key="mine.yaml")
    assert_rejected(output, "not-strict-yaml", "other.yaml = line 1: ", key="other.yaml")


@pytest.mark.parametrize("word", ["run=12e4567", "run=1_000", "run=True", "run=NaN", "model=1e3", "suites=0123"])
def test_a_name_that_snakemake_reads_as_a_number_is_rejected(word: str, tmp_path: Path) -> None:
    key, _, value = word.partition("=")
    code, output = dry_run(tmp_path, {key: value})
    assert code == 1
    assert "1 problem in the configuration:" in output
    assert f"  - {key} = " in output


TOO_LITTLE_MEMORY = {"run": "mine", "set": "hardware.memory_gib_per_gpu=0.1"}
REPORT = "1 problem in the configuration:\n  - parallel = "


def test_what_does_not_fit_is_refused_and_told_where_the_page_is(tmp_path: Path) -> None:
    code, output = dry_run(tmp_path, TOO_LITTLE_MEMORY)
    assert code == 1
    assert REPORT in output
    assert "`snakemake plan` with the same --config" in output
    assert {path.name for path in tmp_path.iterdir()} <= {".snakemake", "logs"}, "what was resolved"


def test_a_plan_is_drawn_and_ends_with_the_same_report(tmp_path: Path) -> None:
    words = [f"{key}={value}" for key, value in TOO_LITTLE_MEMORY.items()]
    ended = run_snakemake(tmp_path, "plan", "--cores", "1", "--config", *words)
    assert ended.returncode == 1
    assert REPORT in ended.stdout
    page = (tmp_path / "results" / "plans" / "tiny-1xcpu.html").read_text()
    assert "<h2>This cannot run</h2>" in page
    assert page.count('<li class="bad">') == 1
    assert (tmp_path / "results" / "plans" / "tiny-1xcpu.json").exists()


def test_what_is_asked_for_beside_a_plan_is_refused_before_work(tmp_path: Path) -> None:
    words = [f"{key}={value}" for key, value in TOO_LITTLE_MEMORY.items()]
    ended = run_snakemake(tmp_path, "plan", "all", "--cores", "1", "--config", *words)
    assert ended.returncode == 1
    assert ended.stdout.rstrip().endswith("`snakemake plan` with the same --config draws all figures.")
    assert "  - parallel = " in ended.stdout
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["configs"], "not even the plan"


def test_what_is_trained_stays_when_memory_is_judged_otherwise(tmp_path: Path) -> None:
    done = tmp_path / "results" / "mine" / "train" / "done.json"
    done.parent.mkdir(parents=True)
    done.write_text("{}")
    code, output = dry_run(tmp_path, TOO_LITTLE_MEMORY)
    assert code == 0, output
