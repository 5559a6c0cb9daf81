from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.rejections import rejected

from posttrain.config.derived import (
    engine_gpus,
    engine_nodes,
    room_for_engines,
    takes_turns,
    trainer_nodes,
    world_size,
)
from posttrain.config.engine_rules import ENGINE_RULES
from posttrain.config.load import merge
from posttrain.config.rules import check_trainable
from posttrain.errors import ConfigError
from posttrain.plan.resolve import resolve

CONFIG_DIR = Path(__file__).resolve().parents[3] / "config"
PREFILL, NO_PREFILL = "engine.pd.num_prefill_engines=1", "engine.pd.num_prefill_engines=0"

# model, settings, and the key that must be named
VIOLATIONS = (
    ("glm5", "engine.gpus_per_engine=12", "engine.gpus_per_engine"),
    ("glm5", f"{NO_PREFILL} engine.gpus_per_engine=128 engine.dp_attention=false", "engine.gpus_per_engine"),
    ("glm5", "engine.mtp_steps=3 model.architecture.num_nextn_predict_layers=0", "engine.mtp_steps"),
    ("glm5", "engine.mtp_steps=3 hardware.kernels.speculative=false", "engine.mtp_steps"),
    ("tiny", "engine.mtp_steps=3", "engine.mtp_steps"),
    ("glm5", "engine.mtp_steps=3 engine.deepep=false algorithm.routing_replay=true", "algorithm.routing_replay"),
    ("tiny_qwen3", "algorithm.routing_replay=true", "algorithm.routing_replay"),
    ("glm5", "engine.deterministic=true", "engine.deterministic"),
    ("tiny", "engine.weight_transport=sharded", "engine.weight_transport"),
    ("tiny", "engine.weight_deltas=true", "engine.weight_deltas"),
    ("glm5", "engine.weight_deltas=true", "engine.weight_deltas"),
    ("tiny", PREFILL, "engine.pd.num_prefill_engines"),
    # 128 GPUs are taken by one engine that decodes and one that prefills
    ("glm5", "engine.num_engines=2", "engine.pd.num_prefill_engines"),
    ("glm5", "engine.pd.gpus_per_prefill_engine=24", "engine.pd.gpus_per_prefill_engine"),
    # behind 4 GPUs an engine of whole nodes would begin within one
    ("glm5", "engine.pd.gpus_per_prefill_engine=4", "engine.pd.num_prefill_engines"),
    ("glm5", "engine.mtp_steps=3 engine.graph_batch_size=257", "engine.graph_batch_size"),
    ("tiny", "engine.own_nodes=1", "engine.own_nodes"),
    # one CPU has one rank
    ("tiny", "engine.kind=sglang engine.gpus_per_engine=2", "engine.gpus_per_engine"),
    ("glm5", f"{NO_PREFILL} engine.gpus_per_engine=96", "engine.gpus_per_engine"),
    *(
        ("tiny", f"evaluation.addresses=[{addresses}]", "evaluation.addresses")
        for addresses in ("gpu7", "http://gpu7:1", "gpu7:0", "gpu7:65536", "gpu7:1,gpu7:1", "user@gpu7:1")
    ),
    ("glm5", "hardware.kernels.attention=flashinfer", "hardware.kernels.attention"),
)


@pytest.mark.parametrize(("model", "settings", "key"), VIOLATIONS)
def test_a_violation_names_its_key(model, settings, key):
    with pytest.raises(ConfigError) as caught:
        merge({"model": model, "site": "local", "set": settings}, CONFIG_DIR)
    assert {problem.key for problem in caught.value.problems} == {key}
    assert all(problem.allowed and problem.remedy for problem in caught.value.problems)


def test_every_rule_is_broken_once(monkeypatch):
    """A rule that no case above breaks is not tested."""
    monkeypatch.setattr("posttrain.config.load.check_consistency", lambda config: [])
    broken = set()
    for model, settings, _ in VIOLATIONS:
        config = merge({"model": model, "site": "local", "set": settings}, CONFIG_DIR).config
        broken |= {rule for rule in ENGINE_RULES if list(rule(config))}
    assert broken == set(ENGINE_RULES)


def test_the_largest_drafts_that_deepep_takes_are_allowed():
    merge({"model": "glm5", "site": "local", "set": "engine.mtp_steps=3 engine.graph_batch_size=256"}, CONFIG_DIR)


def test_routes_of_drafted_tokens_are_replayed_where_sglang_tells_them_apart():
    for words in ("", " engine.deepep=false engine.dp_attention=false"):
        settings = f"engine.mtp_steps=3 algorithm.routing_replay=true{words}"
        merge({"model": "glm5", "site": "local", "set": settings}, CONFIG_DIR)


def test_changes_alone_may_go_to_engines_that_keep_their_weights():
    keep = "engine.weight_deltas=true engine.sleep=never"
    merge({"model": "glm5", "site": "local", "set": keep}, CONFIG_DIR)
    by_rank_0 = f"{keep} engine.weight_transport=tensor"
    with rejected("deltas-need-sharded", "engine.weight_transport=sharded", key="engine.weight_deltas"):
        merge({"model": "glm5", "site": "local", "set": by_rank_0}, CONFIG_DIR)


def test_the_published_recipe_can_be_trained():
    """One engine of 64 GPUs prefills, one decodes."""
    config = merge({"model": "glm5", "nodes": 16, "site": "example_slurm"}, CONFIG_DIR).config
    assert config.engine.pd.num_prefill_engines == 1
    assert list(check_trainable(config)) == []
    assert engine_gpus(config) == world_size(config) == 128, "all GPUs serve"


APART = {"model": "tiny", "nodes": 2, "site": "example_slurm"}


@pytest.mark.parametrize(
    ("request_", "key", "allowed"),
    [
        ({"set": "engine.own_nodes=2"}, "engine.own_nodes", "less than 2 (nodes)"),
        ({"set": "engine.own_nodes=-1"}, "engine.own_nodes", "at least 0"),
        ({"set": "engine.own_nodes=1 engine.sleep=always"}, "engine.sleep", "auto or never"),
        ({"set": "engine.own_nodes=1", "recipe": "sft"}, "engine.own_nodes", "0 with training.objective=sft"),
        # two engines of 8 GPUs have one node of 8
        (
            {"model": "glm5", "nodes": 16, "set": f"engine.own_nodes=1 {PREFILL}"},
            "engine.pd.num_prefill_engines",
            "at most 8 GPUs together (1 node)",
        ),
    ],
)
def test_engines_leave_the_trainer_a_node(request_, key, allowed):
    with pytest.raises(ConfigError) as caught:
        merge(APART | request_, CONFIG_DIR)
    (problem,) = (problem for problem in caught.value.problems if problem.key == key)
    assert allowed in problem.allowed


def test_nodes_of_their_own_are_the_last():
    config = merge(APART | {"nodes": 6, "set": "engine.own_nodes=2"}, CONFIG_DIR).config
    assert (trainer_nodes(config), [*engine_nodes(config)], world_size(config)) == (4, [4, 5], 4)
    assert room_for_engines(config) == 2
    shared = merge(APART, CONFIG_DIR).config
    assert (trainer_nodes(shared), [*engine_nodes(shared)], world_size(shared)) == (2, [0, 1], 2)


def test_who_shares_no_gpu_does_not_sleep():
    on_gpus = {"model": "glm5", "nodes": 24, "site": "example_slurm"}
    asked = [takes_turns(resolve(on_gpus | {"set": words}, CONFIG_DIR).config) for words in ("", "engine.own_nodes=8")]
    assert asked == [True, False]


@pytest.mark.parametrize("name", ["linear_num_key_heads", "vision.num_heads"])
def test_heads_of_delta_nets_and_of_the_vision_tower_are_split_too(name):
    words = f"engine.gpus_per_engine=8 engine.num_engines=1 model.architecture.{name}=4"
    with rejected("engine-divides-heads", f"a divisor of 4 ({name})", key="engine.gpus_per_engine"):
        merge({"model": "qwen3.5_4b", "site": "local", "set": words}, CONFIG_DIR)
    merge({"model": "qwen3.5_4b", "site": "local", "set": words.replace("=8", "=4")}, CONFIG_DIR)
