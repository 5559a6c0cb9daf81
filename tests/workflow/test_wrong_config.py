"""Wrong configuration ends before any rule: one message with every problem, exit code 1, no traceback, no file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.workflow.branches import dry_run

# What `--config` gives; the keys that must be named, each with what its remedy says.
WRONG: dict[str, tuple[dict[str, object], dict[str, str]]] = {
    "misspelled choice": ({"modle": "glm5"}, {"modle": "did you mean 'model'?"}),
    "misspelled key": ({"set": "optmizer.lr=1e-6"}, {"optmizer.lr": "did you mean 'optimizer.lr'?"}),
    "key outside of set": ({"optimizer_lr": 1}, {"optimizer_lr": "set='optimizer_lr=1'"}),
    "wrong type": ({"set": "training.num_steps=many"}, {"training.num_steps": "give a whole number"}),
    "not a number": ({"set": "rollout.temperature=nan"}, {"rollout.temperature": "a finite number"}),
    "out of range": ({"set": "optimizer.lr=2"}, {"optimizer.lr": "choose more than 0 and at most 1"}),
    "unknown model": ({"model": "tyni"}, {"model": "did you mean 'tiny'?"}),
    "unknown hardware": ({"hardware": "h2000"}, {"hardware": "did you mean 'h200'?"}),
    "unknown site": ({"site": "lokal"}, {"site": "did you mean 'local'?"}),
    "no nodes": ({"nodes": 0}, {"nodes": "give the number of nodes"}),
    "nodes in set": ({"set": "nodes=2"}, {"set: nodes": "--config nodes=2"}),
    "run name of digits": ({"run": "2026_11_21"}, {"run": "choose another name"}),
    "run name with a slash": ({"run": "mine/too"}, {"run": "choose another name"}),
    "node name that is a path": ({"set": "site.node_names=[../a]"}, {"site.node_names": "give each node's host name"}),
    "unreadable set": ({"set": "optimizer.lr"}, {"set": "has no '='"}),
    "batch that does not divide": ({"set": "training.global_batch_size=48"}, {"training.global_batch_size": "change"}),
    "layout that does not fit": (
        {"model": "glm5", "set": "parallel.tensor_model_parallel_size=3"},
        {"parallel": "divides", "parallel.tensor_model_parallel_size": "divides"},
    ),
    "everything at once": (
        {"model": "tyni", "hardware": "gpu", "site": "lokal", "nodes": 0, "set": "optmizer.lr=1 training.num_steps=x"},
        dict.fromkeys(["model", "hardware", "site", "nodes", "optmizer.lr", "training.num_steps"], ""),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_refused_in_one_message(name: str, tmp_path: Path) -> None:
    config, expected = WRONG[name]
    code, output = dry_run(tmp_path, config)
    assert code == 1
    assert "Traceback" not in output
    assert 'File "' not in output
    problems = re.findall(r"^  - (.*?) = (.+)\n      allowed: (.+)\n      remedy:  (.+)$", output, re.MULTILINE)
    assert {key for key, *_ in problems} == set(expected), output
    assert output.count(f"{len(problems)} problem{'s' * (len(problems) > 1)} in the configuration:\n") == 1
    for key, _, _, remedy in problems:
        assert expected[key] in remedy
    assert {path.name for path in tmp_path.iterdir()} <= {".snakemake"}
