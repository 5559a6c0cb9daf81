from __future__ import annotations

import copy
from pathlib import Path

import pytest

from posttrain.config.load import resolve
from posttrain.config.rules import RULES, check_trainable
from posttrain.errors import ConfigError

CONFIG_DIR = Path(__file__).resolve().parents[3] / "config"
MODELS = {"tiny": {"model": "tiny", "site": "local"}, "glm5": {"model": "glm5", "site": "local"}}

# model, settings, and the keys that must be named
VIOLATIONS = (
    ("tiny", "model.source.kind=hub", ["model.source.repo_id", "model.source.revision"]),
    ("tiny", "model.source.kind=folder", ["model.source.folder"]),
    ("glm5", "model.source.revision=main", ["model.source.revision"]),
    ("glm5", "data.revision=v1", ["data.revision"]),
    ("tiny", "data.kind=jsonl", ["data.train_file", "data.heldout_file"]),
    ("tiny", "data.num_train_prompts=0", ["data.num_train_prompts"]),
    ("tiny", "model.architecture.index_n_heads=0", ["model.architecture.index_n_heads"]),
    ("tiny", "model.architecture.index_head_dim=1", ["model.architecture.index_topk"]),
    ("tiny", "model.architecture.num_experts_per_tok=999", ["model.architecture.num_experts_per_tok"]),
    ("glm5", "parallel.tensor_model_parallel_size=3", ["parallel", "parallel.tensor_model_parallel_size"]),
    ("glm5", "parallel.expert_tensor_parallel_size=2", ["parallel.expert_model_parallel_size"]),
    ("glm5", "parallel.expert_model_parallel_size=1", ["parallel.expert_tensor_parallel_size"]),
    ("glm5", "parallel.num_layers_in_last_pipeline_stage=17", ["parallel.num_layers_in_last_pipeline_stage"]),
    ("glm5", "training.global_batch_size=48", ["training.global_batch_size"]),
    # 64 samples divide by 2, but four data-parallel ranks cannot share two.
    ("glm5", "training.global_batch_size=2", ["training.global_batch_size"]),
    ("glm5", "trainer.max_tokens_per_gpu=1024", ["trainer.max_tokens_per_gpu"]),
    ("tiny", "trainer.deepep=true", ["trainer.deepep"]),
    ("tiny", "trainer.optimizer_cpu_offload=true", ["trainer.optimizer_cpu_offload"]),
    ("tiny", "site.node_names=[../node0]", ["site.node_names"]),
)


@pytest.mark.parametrize("model", MODELS)
def test_the_recipes_break_no_rule(model):
    resolve(MODELS[model], CONFIG_DIR)


@pytest.mark.parametrize(("model", "settings", "keys"), VIOLATIONS)
def test_a_violation_names_its_key_and_nothing_else(model, settings, keys):
    with pytest.raises(ConfigError) as caught:
        resolve({**MODELS[model], "set": settings}, CONFIG_DIR)
    named = [problem.key for problem in caught.value.problems]
    assert set(keys) <= set(named)
    assert {key.partition(".")[0] for key in named} == {key.partition(".")[0] for key in keys}
    assert all(p.allowed and p.remedy for p in caught.value.problems)


def test_every_rule_is_broken_once():
    """A rule that no case above breaks is not tested."""
    broken = set()
    for model, settings, _ in VIOLATIONS:
        config = resolve(MODELS[model], CONFIG_DIR).config
        broken |= {rule for rule in RULES if list(rule(_with(config, settings)))}
    assert broken == set(RULES)


def test_what_is_planned_but_not_trained():
    assert not list(check_trainable(resolve(MODELS["tiny"], CONFIG_DIR).config))
    keys = [problem.key for problem in check_trainable(resolve(MODELS["glm5"], CONFIG_DIR).config)]
    assert keys == ["nodes", "parallel.context_parallel_size"]


def _with(config, settings):
    """Change one value of a resolved configuration without checking it."""
    key, _, text = settings.partition("=")
    changed = copy.deepcopy(config)
    *parents, leaf = key.split(".")
    section = changed
    for name in parents:
        section = getattr(section, name)
    kind = type(getattr(section, leaf))
    object.__setattr__(section, leaf, text == "true" if kind is bool else kind(text))
    return changed
