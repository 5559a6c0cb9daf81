from pathlib import Path

import pytest

from posttrain.plan.resolve import resolve
from posttrain.plan.rule_chain import rule_chain

REPOSITORY = Path(__file__).resolve().parents[3]


def chain_of(model, overrides="", **more):
    config = resolve({"model": model, "site": "local", "set": overrides}, REPOSITORY / "config").config
    return rule_chain(config, **more)


@pytest.mark.parametrize(
    "overrides", ["", "rollout.fp8=false", "site.node_names=[]", "rollout.fp8=false site.node_names=[]"]
)
@pytest.mark.parametrize("model", ["tiny", "glm5"])
def test_every_rule_waits_for_rules_before_it(model, overrides):
    seen = set()
    for rule in chain_of(model, overrides):
        assert set(rule.after) <= seen, rule
        assert rule.name not in seen
        seen.add(rule.name)


def test_what_the_configuration_leaves_out_is_not_in_the_chain():
    names = {rule.name for rule in chain_of("glm5", "rollout.fp8=false site.node_names=[]")}
    assert not names & {
        "make_tiny_model",
        "quantize",
        "finalize_quantized",
        "stage_to_node_local",
    }
    assert {"make_tiny_model", "quantize", "stage_to_node_local"} <= {rule.name for rule in chain_of("tiny")}


def test_training_waits_for_what_its_engines_begin_with():
    waits = {
        words: {name for name in chain["train"].after if name.startswith("finalize_quantized")}
        for words in ("", "engine.sleep=never engine.weight_transport=tensor", "rollout.fp8=false")
        for chain in [{rule.name: rule for rule in chain_of("glm5", words)}]
    }
    assert list(waits.values()) == [{"finalize_quantized start"}, {"finalize_quantized"}, set()]
    source = {rule.name for rule in chain_of("glm5", "evaluation.precision=source")}
    assert not source & {"quantize", "finalize_quantized", "quantize start"}
    assert "quantize start" in {rule.name for rule in chain_of("glm5", "engine.mtp_steps=2")}
    # Its vision tower is not trained, so engines that begin empty need it.
    assert "quantize start" in {rule.name for rule in chain_of("qwen3.5_4b")}


def test_a_fork_trains_from_another_runs_state():
    config = resolve({"model": "tiny", "site": "local"}, REPOSITORY / "config").config
    rules = {rule.name: rule for rule in rule_chain(config, is_fork=True)}
    assert "fork_checkpoint" in rules["train"].after
    assert rules.keys() - {rule.name for rule in rule_chain(config)} == {"fork_checkpoint"}


def test_a_rule_in_parts_has_a_job_for_each():
    rules = {rule.name: rule for rule in chain_of("glm5")}
    assert rules["convert_hf_to_torch_dist"].num_jobs == 16
    assert rules["evaluate after"].rule == "evaluate"


def test_each_rule_has_a_script_of_its_name():
    scripts = {path.stem for path in (REPOSITORY / "scripts").glob("*.py")}
    missing = {rule.rule for rule in chain_of("tiny")} - scripts
    assert not missing
