from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import pytest
from tests.support.rejections import rejected

from posttrain.config.derived import num_updates_per_step
from posttrain.config.families import FAMILIES, dimensions
from posttrain.config.fields import tables
from posttrain.config.load import Chosen, merge, read_yaml
from posttrain.config.rules import RULES, UNPINNED, check_convertible, check_trainable
from posttrain.errors import ConfigError, Problem

CONFIG_DIR = Path(__file__).resolve().parents[3] / "config"
NAMES = sorted(path.stem for path in (CONFIG_DIR / "models").glob("*.yaml"))
MODELS = {name: {"model": name, "site": "local"} for name in NAMES}
ARCH = "model.architecture"
FIRST, LAST = (f"parallel.num_layers_in_{stage}_pipeline_stage" for stage in ("first", "last"))

# model, settings, and the keys that must be named
VIOLATIONS = (
    ("tiny", "model.source.kind=hub", ["model.source.repo_id", "model.source.revision"]),
    ("tiny", "model.source.kind=folder", ["model.source.folder"]),
    ("glm5", "model.source.revision=main", ["model.source.revision"]),
    ("glm5", "data.revision=v1", ["data.revision"]),
    ("tiny", "data.kind=jsonl", ["data.train_file"]),
    ("tiny", "evaluation.serving.concurrency=[8,many]", ["evaluation.serving.concurrency"]),
    ("tiny", "evaluation.serving.concurrency=[8,8]", ["evaluation.serving.concurrency"]),
    ("tiny", "data.subset=main data.split=train", ["data.subset", "data.split"]),
    ("qwen3_0.6b", "data.train_file=", ["data.train_file"]),
    ("qwen3_0.6b", "data.duplicates=merge", ["data.duplicates"]),
    ("tiny", "data.num_train_prompts=0", ["data.num_train_prompts"]),
    ("tiny", "evaluation.suites.sums.kind=files", ["evaluation.suites.sums.file"]),
    ("tiny", "serving.format=mxfp8", ["serving.format"]),
    ("tiny", f"{ARCH}.index_n_heads=0", [f"{ARCH}.index_n_heads"]),
    ("tiny", f"{ARCH}.index_topk=0", [f"{ARCH}.index_topk"]),
    ("tiny", f"{ARCH}.index_head_dim=1", [f"{ARCH}.index_head_dim"]),
    ("qwen3_30b_a3b", f"{ARCH}.num_experts_per_tok=1", [f"{ARCH}.num_experts_per_tok"]),
    ("tiny", f"{ARCH}.num_experts_per_tok=999", [f"{ARCH}.num_experts_per_tok"]),
    ("tiny", f"{ARCH}.first_k_dense_replace=5", [f"{ARCH}.first_k_dense_replace"]),
    # What a family needs
    ("glm5", f"{ARCH}.kv_lora_rank=0", [f"{ARCH}.kv_lora_rank"]),
    ("glm5", f"{ARCH}.routed_scaling_factor=0", [f"{ARCH}.routed_scaling_factor"]),
    ("glm4.5_air", f"{ARCH}.num_key_value_heads=0", [f"{ARCH}.num_key_value_heads"]),
    ("glm4.5_air", f"{ARCH}.partial_rotary_factor=0", [f"{ARCH}.partial_rotary_factor"]),
    ("qwen3_4b", f"{ARCH}.head_dim=0", [f"{ARCH}.head_dim"]),
    (
        "qwen3_30b_a3b",
        f"{ARCH}.n_routed_experts=0",
        [f"{ARCH}.n_routed_experts", "parallel.expert_model_parallel_size"],
    ),
    # What a family does not have
    ("glm5", f"{ARCH}.num_key_value_heads=8", [f"{ARCH}.num_key_value_heads"]),
    ("glm5", f"{ARCH}.tie_word_embeddings=true", [f"{ARCH}.tie_word_embeddings"]),
    ("glm4.5_air", f"{ARCH}.index_n_heads=32", [f"{ARCH}.index_n_heads"]),
    ("qwen3_0.6b", f"{ARCH}.n_routed_experts=8", [f"{ARCH}.n_routed_experts"]),
    ("qwen3_4b", f"{ARCH}.num_nextn_predict_layers=1", [f"{ARCH}.num_nextn_predict_layers"]),
    ("qwen3_30b_a3b", f"{ARCH}.n_shared_experts=1", [f"{ARCH}.n_shared_experts"]),
    ("qwen3_30b_a3b", f"{ARCH}.routed_scaling_factor=1.0", [f"{ARCH}.routed_scaling_factor"]),
    ("glm5", f"{ARCH}.rope_scaling.factor=4", [f"{ARCH}.rope_scaling"]),
    ("glm5", f"{ARCH}.n_group=8", [f"{ARCH}.n_group"]),
    ("glm5", f"{ARCH}.q_lora_rank=0", [f"{ARCH}.q_lora_rank"]),
    ("qwen3_4b", f"{ARCH}.index_topk_freq=4", [f"{ARCH}.index_topk_freq"]),
    # What does not fit together
    ("glm5", f"{ARCH}.index_topk_freq=4", [f"{ARCH}.index_skip_topk_offset", LAST]),
    ("glm5.2", f"{ARCH}.index_skip_topk_offset=2", [LAST]),
    ("qwen3_0.6b", f"{ARCH}.num_key_value_heads=5", [f"{ARCH}.num_key_value_heads"]),
    ("glm4.5_air", f"{ARCH}.partial_rotary_factor=0.3", [f"{ARCH}.head_dim"]),
    ("qwen3_30b_a3b", "parallel.tensor_model_parallel_size=8", ["parallel.tensor_model_parallel_size"]),
    ("qwen3_4b", "parallel.expert_model_parallel_size=2", ["parallel.expert_model_parallel_size"]),
    ("qwen3_4b", "parallel.expert_tensor_parallel_size=2", ["parallel.expert_tensor_parallel_size"]),
    ("glm5", "engine.gpus_per_engine=24", ["engine.gpus_per_engine"]),
    ("glm5", "hardware.formats=[bf16]", ["rollout.fp8"]),
    ("tiny", "hardware.emulated_formats=[fp6]", ["hardware.emulated_formats"]),
    ("glm5", "parallel.tensor_model_parallel_size=3", ["parallel", "parallel.tensor_model_parallel_size"]),
    ("glm5", "parallel.expert_tensor_parallel_size=2", ["parallel.expert_model_parallel_size"]),
    ("glm5", "parallel.tensor_model_parallel_size=16", ["parallel.tensor_model_parallel_size"]),
    ("glm5", "parallel.expert_model_parallel_size=1", ["parallel.expert_tensor_parallel_size"]),
    ("glm5", f"{LAST}=17", [LAST]),
    ("glm5", f"{FIRST}=19", [LAST]),
    ("glm5", f"parallel.pipeline_model_parallel_size=1 {FIRST}=60 {LAST}=18", [LAST]),
    # 61 layers do not divide by three; stages of GLM-5.2 begin with a layer that chooses keys, unlike layer 20.
    ("glm5", f"{LAST}=0 {FIRST}=17", [FIRST]),
    ("glm5.2", f"{LAST}=0 {FIRST}=20", [FIRST]),
    # Chunks of one stage have nothing to interleave with; stages of 20 and 18 layers have none of four in common.
    (
        "qwen3_4b",
        "parallel.virtual_pipeline_model_parallel_size=2",
        ["parallel.virtual_pipeline_model_parallel_size"],
    ),
    ("glm5", "parallel.virtual_pipeline_model_parallel_size=4", ["parallel.virtual_pipeline_model_parallel_size"]),
    # A chunk of a stage would begin with a layer that takes over what another one has chosen.
    (
        "glm5.2",
        "parallel.virtual_pipeline_model_parallel_size=2",
        ["parallel.num_layers_in_last_pipeline_stage"],
    ),
    (
        "glm5",
        "parallel.virtual_pipeline_model_parallel_size=2 trainer.recompute_granularity=full"
        " trainer.recompute_num_layers=10",
        ["trainer.recompute_num_layers"],
    ),
    ("glm5", "training.global_batch_size=48", ["training.global_batch_size"]),
    # Two data-parallel ranks cannot share one sample.
    ("glm5", "training.global_batch_size=1", ["training.global_batch_size"]),
    ("glm5", "trainer.max_tokens_per_gpu=1024", ["trainer.max_tokens_per_gpu"]),
    ("glm5", "rollout.overlong_samples=refuse", ["rollout.max_prompt_tokens"]),
    ("glm5", "rollout.overlong_samples=refuse rollout.max_prompt_tokens=1", ["trainer.max_tokens_per_gpu"]),
    ("glm5", "rollout.overlong_samples=cut rollout.max_prompt_tokens=32768", ["trainer.max_tokens_per_gpu"]),
    ("tiny", "rollout.max_prompt_tokens=249", ["rollout.max_response_tokens"]),
    ("tiny", "rollout.num_samples_per_prompt=1", ["training.global_batch_size", "rollout.num_samples_per_prompt"]),
    # Given responses have no groups, and none of what belongs to sampling.
    ("tiny", "training.objective=sft", ["rollout.num_samples_per_prompt", "rollout.fp8"]),
    (
        "tiny_qwen3",
        "training.objective=sft rollout.num_samples_per_prompt=1 training.global_batch_size=16 rollout.fp8=false "
        "rollout.temperature=0.7 data.response_key=why",
        ["rollout.temperature", "data.response_key"],
    ),
    ("tiny", "model.source.kind=run", ["model.source.run"]),
    # 80 steps, of two updates each.
    ("tiny", "optimizer.lr_warmup_steps=81", ["optimizer.lr_warmup_steps"]),
    ("tiny", "logging.profile_steps=[81]", ["logging.profile_steps"]),
    ("qwen3_30b_a3b", "optimizer.router_bias_update_rate=0.001", ["optimizer.router_bias_update_rate"]),
    ("qwen3_4b", "optimizer.moe_aux_loss_coeff=0.001", ["optimizer.moe_aux_loss_coeff"]),
    ("tiny", "rollout.max_response_tokens=256", ["rollout.max_response_tokens"]),
    ("glm5", "trainer.recompute_granularity=full trainer.recompute_num_layers=19", ["trainer.recompute_num_layers"]),
    ("glm5", "trainer.recompute_granularity=selective", ["trainer.recompute_modules"]),
    ("glm5", "trainer.recompute_granularity=full trainer.recompute_modules=[moe]", ["trainer.recompute_modules"]),
    ("glm5", "trainer.recompute_granularity=selective trainer.recompute_modules=[core]", ["trainer.recompute_modules"]),
    # It has no latents; routes of engines are told once a pass; what is inside is computed again with what is around.
    (
        "qwen3_4b",
        "trainer.recompute_granularity=selective trainer.recompute_modules=[mla_up_proj]",
        ["trainer.recompute_modules"],
    ),
    (
        "glm5",
        "algorithm.routing_replay=true trainer.recompute_granularity=selective trainer.recompute_modules=[moe]",
        ["trainer.recompute_modules"],
    ),
    (
        "glm5",
        "trainer.recompute_granularity=selective trainer.recompute_modules=[moe,moe_act]",
        ["trainer.recompute_modules"],
    ),
    ("tiny", "site.name=a/b", ["site.name"]),
    ("tiny", "data.num_digits=3", ["data.num_train_prompts"]),
    ("glm5", "data.repo_id=name", ["data.repo_id"]),
    ("glm5", "parallel.pipeline_model_parallel_size=1", ["parallel.num_layers_in_last_pipeline_stage"]),
    ("tiny", "trainer.deepep=true", ["trainer.deepep"]),
    ("tiny", "trainer.optimizer_cpu_offload=true", ["trainer.optimizer_cpu_offload"]),
    ("glm5_4layer", "trainer.optimizer_cpu_offload=true trainer.params_dtype=fp32", ["trainer.params_dtype"]),
    ("qwen3.5_35b_a3b", "trainer.optimizer_cpu_offload=true", ["trainer.optimizer_cpu_offload"]),
    ("qwen3.5_4b", f"{ARCH}.full_attention_interval=64", [f"{ARCH}.full_attention_interval"]),
    ("qwen3.5_4b", f"{ARCH}.full_attention_interval=1", [f"{ARCH}.full_attention_interval"]),
    ("qwen3.5_4b", f"{ARCH}.linear_num_value_heads=24", [f"{ARCH}.linear_num_value_heads"]),
    ("qwen3.5_4b", f"{ARCH}.num_nextn_predict_layers=2", [f"{ARCH}.num_nextn_predict_layers"]),
    ("qwen3_4b", "trainer.params_dtype=fp32 parallel.context_parallel_size=2", ["parallel.context_parallel_size"]),
    ("tiny", "site.node_names=[../node0]", ["site.node_names"]),
    ("tiny", "quantize.keep_last_layers=60", ["quantize.keep_last_layers"]),
    ("glm4.5_air", "quantize.keep_first_layers=0", ["quantize.keep_first_layers"]),
    ("qwen3_4b", "model.architecture.intermediate_size=9664", ["quantize.keep_first_layers"]),
    ("tiny", "quantize.keep_modules=['indexer(']", ["quantize.keep_modules"]),
    ("tiny", "stage.copy=slices", ["stage.copy"]),
)


@pytest.mark.parametrize(
    ("revision", "is_commit"),
    [("a1" * 20, True), ("a1" * 20 + "b", False), ("a1" * 19 + "b", False), ("A1" * 20, False), ("g1" * 20, False)],
    ids=["40 digits", "41 digits", "39 digits", "capitals", "no hex"],
)
@pytest.mark.parametrize("key", ["model.source.revision", "data.revision"])
def test_a_commit_has_40_hex_digits(key, revision, is_commit):
    choice = {**MODELS["glm5"], "set": f"{key}={revision}"}
    if is_commit:
        merge(choice, CONFIG_DIR)
        return
    with pytest.raises(ConfigError) as caught:
        merge(choice, CONFIG_DIR)
    assert [(problem.key, problem.value) for problem in caught.value.problems] == [(key, repr(revision))]


def test_refusals_come_in_the_order_of_the_chain():
    """What no layout mends first, then model, data, training, engines, site, launcher: as a user goes through them."""
    broken = {
        "site.container.image": "/image.sif",
        "site.trainer_environment": "[NAME]",
        "engine.mtp_steps": 1,
        "optimizer.lr_warmup_steps": 81,
        "data.num_train_prompts": 0,
        "model.source.kind": "folder",
    }
    choice = {**MODELS["tiny"], "set": " ".join(f"{key}={value}" for key, value in broken.items())}
    chosen = Chosen({}, (Problem("some-code", "nodes", "1", "2", "take two"),))
    with pytest.raises(ConfigError) as caught:
        merge(choice, CONFIG_DIR, lambda config, origins: chosen)
    keys = ["model.source.folder" if key == "model.source.kind" else key for key in broken]
    assert [problem.key for problem in caught.value.problems] == ["nodes", *reversed(keys)]
    places = [str(caught.value).index(f"  - {key} = ") for key in ["nodes", *reversed(keys)]]
    assert places == sorted(places)


@pytest.mark.parametrize("model", MODELS)
def test_the_recipes_break_no_rule(model):
    merge(MODELS[model], CONFIG_DIR)


def test_tensor_parallelism_spans_nodes_that_links_join():
    # Source of TP 8 on GB300, whose nodes have four GPUs: radixark/miles, scripts/run_glm5_2_744b_a40b.py.
    recipe = read_yaml(CONFIG_DIR / "nodes" / "glm5_16.yaml")["parallel"]
    sizes = {**recipe, "tensor_model_parallel_size": 8, "context_parallel_size": 2, "expert_model_parallel_size": 16}
    settings = " ".join(f"parallel.{name}={size}" for name, size in sizes.items())
    on_gb300 = {**MODELS["glm5"], "hardware": "gb300"}
    merge({**on_gb300, "set": settings}, CONFIG_DIR)
    with pytest.raises(ConfigError) as caught:
        merge({**on_gb300, "set": f"{settings} hardware.linked_gpus=0"}, CONFIG_DIR)
    (problem,) = caught.value.problems
    assert (problem.code, problem.key) == ("slow-links", "parallel.tensor_model_parallel_size")
    assert problem.allowed.startswith("at most 4, ")
    assert "(hardware.gpus_per_node)" in problem.allowed


def test_every_family_has_a_model():
    used = {merge(choice, CONFIG_DIR).config.model.architecture.model_type for choice in MODELS.values()}
    assert used == FAMILIES.keys()


def test_a_model_of_another_family_is_told_all_that_is_too_much_and_all_that_lacks():
    with pytest.raises(ConfigError) as caught:
        merge({**MODELS["qwen3_4b"], "set": f"{ARCH}.model_type=deepseek_v3"}, CONFIG_DIR)
    assert {problem.key.removeprefix(f"{ARCH}.") for problem in caught.value.problems} == {
        *("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        *("moe_intermediate_size", "n_routed_experts", "num_experts_per_tok", "routed_scaling_factor"),
        *("num_key_value_heads", "head_dim", "tie_word_embeddings"),
    }


def test_a_run_is_not_named_after_dimensions_that_its_family_lacks():
    for model in MODELS:
        resolved = merge(MODELS[model], CONFIG_DIR)
        named = resolved.experiment["model"]["architecture"]
        assert named == dimensions(resolved.config.model.architecture)
        assert ("kv_lora_rank" in named) != ("num_key_value_heads" in named)


def test_deepep_of_the_trainer_is_refused_on_gb300_with_the_reason():
    merge({**MODELS["tiny"], "hardware": "gb300"}, CONFIG_DIR)
    with pytest.raises(ConfigError) as caught:
        merge({**MODELS["tiny"], "hardware": "gb300", "set": "trainer.deepep=true"}, CONFIG_DIR)
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == ("trainer.deepep", "true")
    assert "Megatron with DeepEP is known to fail" in problem.allowed
    assert "all-to-all" in problem.remedy


def test_fp8_weights_are_refused_where_nothing_computes_with_them():
    choice = {**MODELS["glm5"], "hardware": "mi300x"}
    with pytest.raises(ConfigError) as caught:
        merge(choice, CONFIG_DIR)
    assert [problem.key for problem in caught.value.problems] == ["rollout.fp8"]
    merge({**choice, "set": "rollout.fp8=false"}, CONFIG_DIR)
    with rejected("no-fp8", "set evaluation.precision=source", key="evaluation.precision") as caught:
        merge({**choice, "set": "rollout.fp8=false evaluation.precision=fp8"}, CONFIG_DIR)
    assert [problem.key for problem in caught.value.problems] == ["evaluation.precision"]
    # The embedded engine dequantises, and a CPU emulates.
    merge({**MODELS["tiny"], "hardware": "mi300x"}, CONFIG_DIR)
    merge({**MODELS["tiny"], "set": "engine.kind=sglang"}, CONFIG_DIR)


@pytest.mark.parametrize(("model", "settings", "keys"), VIOLATIONS)
def test_a_violation_names_its_key_and_nothing_else(model, settings, keys):
    with pytest.raises(ConfigError) as caught:
        merge({**MODELS[model], "set": settings}, CONFIG_DIR)
    named = [problem.key for problem in caught.value.problems]
    assert set(keys) <= set(named)
    assert {key.partition(".")[0] for key in named} == {key.partition(".")[0] for key in keys}
    assert all(p.allowed and p.remedy for p in caught.value.problems)


def test_a_warm_up_may_be_as_long_as_the_run():
    """Its last step then has the whole learning rate; both count steps, of two updates each here."""
    lengths = {"training.num_steps": 10, "optimizer.lr_warmup_steps": 10}
    choice = {**MODELS["tiny"], "set": " ".join(f"{key}={value}" for key, value in lengths.items())}
    config = merge(choice, CONFIG_DIR).config
    assert num_updates_per_step(config) == 2
    with rejected("warm-up-too-long", "at most 10", key="optimizer.lr_warmup_steps"):
        merge({**choice, "set": f"{choice['set']} optimizer.lr_warmup_steps=11"}, CONFIG_DIR)


def test_every_rule_is_broken_once():
    """A rule that no case above breaks is not tested."""
    broken = set()
    for model, settings, _ in VIOLATIONS:
        config = merge(MODELS[model], CONFIG_DIR).config
        broken |= {rule for rule in RULES if list(rule(_with(config, settings)))}
    assert broken == set(RULES)


@pytest.mark.parametrize(
    ("model", "change", "lacking"),
    [
        ("moonlight", {}, set()),
        ("deepseek_v3", {}, set()),
        # Eight experts of two groups: Megatron would rank groups by their best four.
        ("deepseek_v3", {"topk_group": 2}, {"topk_group"}),
        ("deepseek_v3.2", {}, set()),
        ("glm5.2", {}, set()),
        ("glm5.1", {}, set()),
        ("glm4.5_air", {}, set()),
        ("qwen3_0.6b", {}, set()),
        ("qwen3_4b", {}, set()),
        ("qwen3_30b_a3b", {}, set()),
    ],
)
def test_parts_that_the_trainer_lacks_are_named(model, change, lacking):
    config = merge(MODELS[model], CONFIG_DIR).config
    arch = dataclasses.replace(config.model.architecture, **change)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, architecture=arch))
    keys = {problem.key for problem in check_trainable(config)}
    assert {key.removeprefix(f"{ARCH}.") for key in keys if key.startswith(ARCH)} == lacking


def test_what_is_planned_but_not_trained():
    assert not list(check_trainable(merge(MODELS["tiny"], CONFIG_DIR).config))
    keys = [problem.key for problem in check_trainable(merge(MODELS["glm5"], CONFIG_DIR).config)]
    assert keys == ["nodes"]


@pytest.mark.parametrize("model", MODELS)
def test_what_is_planned_but_not_converted(model):
    config = merge(MODELS[model], CONFIG_DIR).config
    refused = {
        "glm5_4layer": ["model.source.revision"],
        "glm5_20layer": ["model.source.revision"],
        "moonlight": ["model.source.revision"],
        "glm5.3": ["model.source.revision"],
    }
    problems = list(check_convertible(config))
    assert [problem.key for problem in problems] == refused.get(model, [])
    assert all(problem.allowed and problem.remedy for problem in problems)
    assert set(problems) <= set(check_trainable(config)), "resolve_config, check and plan ask the latter"


def test_an_unpinned_model_is_fetched_once_its_commit_is_given():
    assert merge(MODELS["glm5_4layer"], CONFIG_DIR).config.model.source.revision == UNPINNED
    pinned = merge({**MODELS["glm5_4layer"], "set": f"model.source.revision={'a' * 40}"}, CONFIG_DIR).config
    assert not list(check_convertible(pinned))


def _with(config, settings):
    """Change values of a resolved configuration without checking them."""
    changed = copy.deepcopy(config)
    for setting in settings.split():
        key, _, text = setting.partition("=")
        *parents, leaf = key.split(".")
        section = changed
        for place, name in enumerate(parents):
            if isinstance(section, dict):
                row = tables()[".".join([*parents[:place], ""])]
                section = section.setdefault(name, row())
            else:
                section = getattr(section, name)
        kind = type(getattr(section, leaf))
        value = text == "true" if kind is bool else text.strip("[]").split(",") if kind is list else kind(text)
        object.__setattr__(section, leaf, value)
    return changed


@pytest.mark.parametrize(
    ("settings", "key", "code"),
    [
        ("quantize.strategy=channel quantize.scale=power_of_two", "quantize.scale", "power-of-two-needs-blocks"),
        ("quantize.strategy=tensor quantize.scale=power_of_two", "quantize.scale", "power-of-two-needs-blocks"),
        ("serving.format=int4 serving.calibration=[pass.json]", "serving.calibration", "calibration-unused"),
        (
            "optimizer.lr_warmup_steps=8 optimizer.lr_warmup_share=0.1",
            "optimizer.lr_warmup_share",
            "warm-up-given-twice",
        ),
        (
            "optimizer.lr_schedule=wsd optimizer.lr_decay_share=0.9 optimizer.lr_warmup_share=0.2",
            "optimizer.lr_decay_share",
            "decay-too-long",
        ),
        ("optimizer.lr_floor=0.1", "optimizer.lr_floor", "unused-value"),
        ("logging.profile_steps=[first]", "logging.profile_steps", "no-such-step"),
        ("optimizer.lr_schedule=cosine optimizer.lr_decay_share=0.2", "optimizer.lr_decay_share", "unused-value"),
    ],
)
def test_settings_that_exclude_each_other(settings, key, code):
    with rejected(code, key=key):
        merge(MODELS["tiny"] | {"set": settings}, CONFIG_DIR)
