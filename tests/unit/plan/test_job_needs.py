import pytest

from posttrain.plan import job_needs
from posttrain.plan.forecast.plan import build_plan
from posttrain.plan.job_needs import JobNeeds, RuleNeeds, about
from posttrain.readable import counted, format_bytes


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.001, "under 1 min"),
        (59.9, "under 1 min"),
        (60, "about 1 min"),
        (1507.728, "about 25 min"),
        (5999, "about 100 min"),
        (6000, "about 1.7 h"),
        (35_999, "about 10.0 h"),
        (36_000, "about 10 h"),
        (172_799, "about 48 h"),
        (172_800, "about 2.0 days"),
        (863_999, "about 10.0 days"),
        (864_000, "about 10 days"),
        (2_619_841, "about 30 days"),
    ],
)
def test_a_duration_is_as_coarse_as_the_plan(seconds, text):
    assert about(seconds) == text


@pytest.mark.parametrize(
    ("model", "more"),
    [("glm5", {}), ("glm5", {"set": "rollout.fp8=false"}), ("tiny", {}), ("tiny", {"hardware": "h200"})],
)
def test_a_message_says_what_the_plan_says(resolved, model, more):
    configuration = resolved(model, **more)
    rules = build_plan(configuration)["rules"]
    for rule in rules:
        words = [counted(rule["nodes"], "node")]
        words += [counted(rule["gpus"], "GPU")] if rule["gpus"] else []
        words += [f"{format_bytes(rule['memory_bytes'])} of memory"] if rule["memory_bytes"] else []
        words += [about(rule["seconds"])] if rule["seconds"] is not None else []
        message = RuleNeeds(configuration.config).message(rule["name"].partition(" ")[0])
        assert message == f" ({', '.join(words)})"
    timed = {rule["name"] for rule in rules if rule["seconds"] is not None}
    assert {"convert_hf_to_torch_dist", "export_hf"} <= timed
    assert ("train" in timed) == (configuration.config.hardware.device == "cuda")


def test_the_recipe(resolved):
    needs = RuleNeeds(resolved("glm5").config)
    days = needs.seconds["train"] / 86400
    assert needs.message("train") == f" (16 nodes, 128 GPUs, about {days:.0f} days)"
    minutes = needs.seconds["evaluate after"] / 60
    assert needs.message("evaluate") == f" (1 node, 8 GPUs, about {minutes:.0f} min)"
    assert needs.message("quantize after") == needs.message("quantize")
    large = RuleNeeds(resolved("glm5", set="evaluation.precision=source").config)
    minutes = large.seconds["evaluate after"] / 60
    assert large.message("evaluate") == f" (2 nodes, 16 GPUs, about {minutes:.0f} min)"
    others = RuleNeeds(resolved("glm5", set="evaluation.addresses=[gpu7:30000]").config)
    assert others.message("evaluate") == " (1 node)", "how long others' engines take nobody knows"


@pytest.mark.parametrize(
    ("choice", "rule", "wanted"),
    [
        ({"model": "glm5", "nodes": 16}, "train", JobNeeds(16, 128)),
        ({"model": "glm5", "nodes": 16}, "evaluate", JobNeeds(1, 8)),
        ({"model": "glm5", "set": "evaluation.precision=source"}, "benchmark_serving", JobNeeds(2, 16)),
        ({"model": "glm5", "nodes": 16}, "convert_hf_to_torch_dist", JobNeeds()),
        # A spare node is held as long as the others.
        ({"model": "glm5", "nodes": 16, "site": "example_slurm"}, "train", JobNeeds(17, 136, "2d")),
        ({"model": "glm5", "nodes": 16, "site": "example_slurm"}, "preflight", JobNeeds(17, 136, "2d")),
        ({"model": "tiny"}, "train", JobNeeds(1, 0)),
    ],
)
def test_what_a_job_takes(resolved, choice, rule, wanted):
    assert job_needs.job_needs(resolved(**choice).config, rule) == wanted


def test_without_a_duration_there_is_none_in_the_message(resolved):
    needs = RuleNeeds(resolved("tiny").config)
    assert needs.message("train") == " (1 node)"
    assert needs.message("make_tiny_model") == " (1 node)"


def test_durations_are_computed_when_asked_for_and_once(resolved, monkeypatch):
    calls = []
    monkeypatch.setattr(job_needs, "durations_seconds", lambda *_: calls.append(1) or {"download_hf_checkpoint": 90.0})
    needs = RuleNeeds(resolved("glm5").config)
    assert calls == []
    assert {needs.message("download_hf_checkpoint") for _ in range(2)} == {" (1 node, about 2 min)"}
    assert calls == [1]
