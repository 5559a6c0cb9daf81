from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from posttrain.config.load import Chosen, dump_resolved, load_resolved, merge
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
        # Names of other trainers.
        ("optimizer.learning_rate=1e-6", "optimizer.learning_rate", "did you mean 'optimizer.lr'?"),
        ("rollout.num_generations=8", "rollout.num_generations", "did you mean 'rollout.num_samples_per_prompt'?"),
        ("trainer.save_freq=8", "trainer.save_freq", "did you mean 'trainer.save_interval'?"),
        ("algorithm.epsilon_high=0.3", "algorithm.epsilon_high", "did you mean 'algorithm.clip_ratio_high'?"),
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


def test_a_recipe_is_for_engines_that_share_its_nodes_unless_it_says_otherwise(tmp_path):
    """The planner gets to choose for ranks on fewer nodes; the user's own recipe may be written for them."""

    def recipe_of(words: str, **more: str) -> list[str]:
        chosen = Chosen({"parallel.pipeline_model_parallel_size": 1})
        request = {"model": "tiny", "nodes": 2, "site": "example_slurm", "hardware": "eight", "set": words, **more}
        found = merge(request, tmp_path, lambda config, origins: chosen)
        return [found.origins["parallel.pipeline_model_parallel_size"]]

    shutil.copytree(CONFIG_DIR, tmp_path, dirs_exist_ok=True)
    (tmp_path / "hardware/eight.yaml").write_text(
        (tmp_path / "hardware/cpu.yaml").read_text().replace("gpus_per_node: 1", "gpus_per_node: 8")
    )
    recipe = tmp_path / "nodes/tiny_2.yaml"
    recipe.write_text("parallel: {pipeline_model_parallel_size: 2}\n")
    assert recipe_of("") == [f"{tmp_path.name}/nodes/tiny_2.yaml"]
    assert recipe_of("engine.own_nodes=1") == ["planner"]
    recipe.write_text("parallel: {pipeline_model_parallel_size: 2}\nengine: {own_nodes: 1}\n")
    assert recipe_of("") == [f"{tmp_path.name}/nodes/tiny_2.yaml"]
    assert recipe_of("engine.own_nodes=0") == ["planner"]
