from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.config.load import dump_resolved, load_resolved, merge
from posttrain.errors import ConfigError

CONFIG_DIR = Path(__file__).resolve().parents[3] / "config"


def problems_of(**workflow):
    with pytest.raises(ConfigError) as caught:
        merge({"model": "tiny", "site": "local", **workflow}, CONFIG_DIR)
    assert all(p.key and p.value and p.allowed and p.remedy for p in caught.value.problems)
    return {problem.key: problem for problem in caught.value.problems}


@pytest.mark.parametrize(
    ("settings", "key", "remedy"),
    [
        ("optmizer.lr=1e-6", "optmizer.lr", "did you mean 'optimizer.lr'?"),
        ("optimizer.lr.x=3", "optimizer.lr.x", "did you mean 'optimizer.lr'?"),
        ("training.num_steps=many", "training.num_steps", "give a whole number"),
        ("training.num_steps=1.5", "training.num_steps", "give a whole number"),
        ("optimizer.lr=", "optimizer.lr", "give a number"),
        ("rollout.temperature=nan", "rollout.temperature", "choose a finite number"),
        ("optimizer.lr=inf", "optimizer.lr", "choose a finite number"),
        ("rollout.fp8=3", "rollout.fp8", "give true or false"),
        ("optimizer.lr=4", "optimizer.lr", "choose more than 0 and at most 1"),
        ("engine.kind=embeded", "engine.kind", "did you mean 'embedded'?"),
        ("nodes=3", "set: nodes", "--config nodes=3"),
        ("model=glm5", "set: model", "--config model=glm5"),
        ("optimizer.lr", "set", "has no '='"),
        ("'optimizer.lr=1", "set", "No closing quotation"),
    ],
)
def test_a_wrong_setting(settings, key, remedy):
    found = problems_of(set=settings)
    assert list(found) == [key]
    assert remedy in found[key].remedy


@pytest.mark.parametrize(
    ("workflow", "key", "allowed", "remedy"),
    [
        ({"modle": "tiny"}, "modle", "model, recipe, nodes", "did you mean 'model'?"),
        ({"lr": 1}, "lr", "model, recipe, nodes", "set='lr=1'"),
        ({"model": "tyni"}, "model", "glm5, glm5.1", "did you mean 'tiny'?"),
        ({"model": None}, "model", "glm5, glm5.1", "choose one of"),
        ({"hardware": "h2000"}, "hardware", "cpu, gb300, h100, h200", "did you mean 'h200'?"),
        ({"site": "lokal"}, "site", "local", "did you mean 'local'?"),
        ({"site": "../sites/local"}, "site", "local", ""),
        ({"nodes": 0}, "nodes", "at least 1", "number of nodes"),
        ({"nodes": True}, "nodes", "at least 1", "number of nodes"),
        ({"nodes": "two"}, "nodes", "at least 1", "number of nodes"),
        ({"run": 2026_11_21}, "run", "a letter, then", "another name"),
        ({"run": "a/b"}, "run", "a letter, then", "another name"),
    ],
)
def test_a_wrong_choice(workflow, key, allowed, remedy):
    found = problems_of(**workflow)
    assert list(found) == [key]
    assert allowed in found[key].allowed
    assert remedy in found[key].remedy


def test_everything_wrong_is_told_at_once():
    settings = "optmizer.lr=1 optimizer.lr=4 rollout.fp8=3 training.num_steps=x engine.kind=embeded"
    found = problems_of(model="tyni", hardware="gpu", site="lokal", nodes=0, modle=1, run="1a", set=settings)
    choices = {"model", "hardware", "site", "nodes", "modle", "run"}
    values = {"optmizer.lr", "optimizer.lr", "rollout.fp8", "training.num_steps", "engine.kind"}
    assert set(found) == choices | values, "and not what the missing files would have set"


def test_what_is_written_is_read_back(tmp_path):
    resolved = merge({"model": "glm5", "site": "local", "set": "optimizer.lr=3e-7"}, CONFIG_DIR)
    path = tmp_path / "config.resolved.yaml"
    path.write_text(dump_resolved(resolved))
    assert load_resolved(path) == resolved.config
    assert "lr: 3e-07  # set=" in path.read_text()
