"""Wrong requests of every kind, each refused before anything starts, with key, value, what is allowed and a remedy.

All are refused by the functions that the Snakefile calls while it is read; four go through a real `snakemake -n`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.support.branches import CONFIG_DIR, dry_run

from posttrain.errors import ConfigError, Problem
from posttrain.plan.problems import find_problems
from posttrain.plan.resolve import resolve

ARCH = "model.architecture"
TENSOR, PIPELINE, LAST, CONTEXT, EXPERT, EXPERT_TENSOR = (
    f"parallel.{name}"
    for name in (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "num_layers_in_last_pipeline_stage",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
    )
)
BATCH, BUDGET, LONGEST = "training.global_batch_size", "trainer.max_tokens_per_gpu", "rollout.max_response_tokens"
COMMIT = "a" * 40


def glm5(text: str, **more: Any) -> dict[str, Any]:
    """Return the recipe of GLM-5 with changes."""
    return {"model": "glm5", "set": text, **more}


# What is asked for, and every key that the report must name.
MISTAKES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    # Names
    "choice misspelled": ({"modle": "glm5"}, ("modle",)),
    "section misspelled": ({"set": "optmizer.lr=1e-6"}, ("optmizer.lr",)),
    "key misspelled": ({"set": "optimizer.lrr=1e-6"}, ("optimizer.lrr",)),
    "key two levels down misspelled": (glm5(f"{ARCH}.num_layer=78"), (f"{ARCH}.num_layer",)),
    "key of a subsection misspelled": (glm5("engine.pd.num_prefil_engines=1"), ("engine.pd.num_prefil_engines",)),
    "key of the hardware misspelled": (glm5("hardware.kernels.dsa=x"), ("hardware.kernels.dsa",)),
    "value for a section": ({"set": "optimizer=1"}, ("optimizer",)),
    "key outside of set": ({"lr": 1}, ("lr",)),
    "unknown model": ({"model": "glm6"}, ("model",)),
    "unknown recipe": ({"recipe": "prodction"}, ("recipe",)),
    "unknown hardware": ({"hardware": "h2000"}, ("hardware",)),
    "unknown site": ({"site": "lokal"}, ("site",)),
    # The form of a request
    "no value in set": ({"set": "optimizer.lr"}, ("set",)),
    "no key in set": ({"set": "=5"}, ("set",)),
    "open quote in set": ({"set": "optimizer.lr='1e-6"}, ("set",)),
    "node count in set": ({"set": "nodes=2"}, ("set: nodes",)),
    "model in set": ({"set": "model=glm5"}, ("set: model",)),
    "hardware in set": ({"set": "hardware=h200"}, ("set: hardware",)),
    "recipe in set": ({"set": "recipe=production"}, ("set: recipe",)),
    "no nodes": ({"nodes": 0}, ("nodes",)),
    "nodes in words": ({"nodes": "many"}, ("nodes",)),
    "half a node": ({"nodes": 1.5}, ("nodes",)),
    "run that is a path": ({"run": "mine/too"}, ("run",)),
    "run that is a number": ({"run": 20261121}, ("run",)),
    "run too long for a folder": ({"run": "a" * 300}, ("run",)),
    # Types
    "text for a whole number": ({"set": "training.num_steps=many"}, ("training.num_steps",)),
    "half a step": ({"set": "training.num_steps=1.5"}, ("training.num_steps",)),
    "text for a number": ({"set": "optimizer.lr=fast"}, ("optimizer.lr",)),
    "nothing for a number": ({"set": "optimizer.lr="}, ("optimizer.lr",)),
    "number for a switch": ({"set": "rollout.fp8=5"}, ("rollout.fp8",)),
    "switch for a number": ({"set": "training.num_steps=true"}, ("training.num_steps",)),
    # Ranges
    "not a number": ({"set": "rollout.temperature=nan"}, ("rollout.temperature",)),
    "infinite": ({"set": "algorithm.clip_ratio_high=inf"}, ("algorithm.clip_ratio_high",)),
    "capacity that is not a number": ({"set": "site.shared_disk_gb=nan"}, ("site.shared_disk_gb",)),
    "learning rate above 1": ({"set": "optimizer.lr=2"}, ("optimizer.lr",)),
    "moment that never decays": ({"set": "optimizer.beta1=1"}, ("optimizer.beta1",)),
    "negative clip": ({"set": "algorithm.clip_ratio_low=-0.1"}, ("algorithm.clip_ratio_low",)),
    "temperature of 0": ({"set": "rollout.temperature=0"}, ("rollout.temperature",)),
    "sampling that is not there": ({"set": "rollout.top_p=0.9"}, ("rollout.top_p",)),
    "loss that is not there": ({"set": "algorithm.kl_coef=0.1"}, ("algorithm.kl_coef",)),
    "algorithm that is not there": ({"set": "algorithm.preset=gpro"}, ("algorithm.preset",)),
    "number that no part uses": ({"set": "algorithm.correction_level=token"}, ("algorithm.correction_level",)),
    "more memory than there is": (glm5("engine.mem_fraction_static=1.2"), ("engine.mem_fraction_static",)),
    "port above the last": (glm5("engine.port=70000"), ("engine.port",)),
    "no size": (glm5(f"{TENSOR}=0"), (TENSOR,)),
    "never saved": ({"set": "trainer.save_interval=0"}, ("trainer.save_interval",)),
    # Choices
    "estimator that is not there": ({"set": "algorithm.advantage_estimator=gae"}, ("algorithm.advantage_estimator",)),
    "engine that is not there": ({"set": "engine.kind=vllm"}, ("engine.kind",)),
    "precision that is not there": ({"set": "trainer.params_dtype=fp16"}, ("trainer.params_dtype",)),
    "launcher that is not there": ({"set": "site.launcher=pbs"}, ("site.launcher",)),
    # The model
    "model type that is not there": (glm5(f"{ARCH}.model_type=glm5"), (f"{ARCH}.model_type",)),
    "part of another family": (glm5(f"{ARCH}.head_dim=128"), (f"{ARCH}.head_dim",)),
    "part that the family needs": (glm5(f"{ARCH}.index_topk=0"), (f"{ARCH}.index_topk",)),
    "another family": (
        {"model": "qwen3_30b_a3b", "set": f"{ARCH}.model_type=qwen3"},
        (f"{ARCH}.moe_intermediate_size", f"{ARCH}.n_routed_experts", f"{ARCH}.num_experts_per_tok"),
    ),
    "too few groups for the experts": (
        {"model": "deepseek_v3", "set": f"{ARCH}.num_experts_per_tok=129"},
        (f"{ARCH}.topk_group",),
    ),
    "more experts than there are": (glm5(f"{ARCH}.num_experts_per_tok=257"), (f"{ARCH}.num_experts_per_tok",)),
    "half a pair of positions": (glm5(f"{ARCH}.qk_rope_head_dim=63"), (f"{ARCH}.qk_rope_head_dim",)),
    "branch for a revision": (glm5("model.source.revision=main"), ("model.source.revision",)),
    "repository without owner": (glm5("model.source.repo_id=GLM-5"), ("model.source.repo_id",)),
    "repository without name": (glm5("model.source.repo_id=zai-org/"), ("model.source.repo_id",)),
    "folder that is not given": ({"set": "model.source.kind=folder"}, ("model.source.folder",)),
    "GLM-5 made here": (glm5("model.source.kind=made"), ("model.source.kind",)),
    "another family made here": (
        {"model": "glm4.5_air", "set": "model.source.kind=made"},
        (f"{ARCH}.model_type", "model.source.kind"),
    ),
    "vocabulary smaller than the made one": ({"set": f"{ARCH}.vocab_size=32"}, (f"{ARCH}.vocab_size",)),
    "name that is a path": ({"set": "model.name=../tiny"}, ("model.name",)),
    # The layout
    "EP that does not divide 256": (glm5(f"{EXPERT}=24"), (EXPERT,)),
    "EP larger than the cluster": (glm5(f"{EXPERT}=256"), (EXPERT,)),
    "experts for a dense model": ({"model": "qwen3_0.6b", "set": f"{EXPERT}=2"}, ("nodes", EXPERT)),
    "ETP that does not divide": (glm5(f"{EXPERT_TENSOR}=3"), (EXPERT, EXPERT_TENSOR)),
    "TP without EP": (glm5(f"{EXPERT}=1"), (EXPERT_TENSOR,)),
    "last stage that leaves a rest": (glm5(f"{LAST}=17"), (LAST,)),
    "even stages that leave a rest": (glm5(f"{LAST}=0"), (LAST,)),
    "last stage with all layers": (glm5(f"{LAST}=78"), (LAST,)),
    "last stage of one": (glm5(f"{PIPELINE}=1"), (LAST,)),
    "PP that does not divide the ranks": (glm5(f"{PIPELINE}=5 {LAST}=18"), ("parallel", EXPERT)),
    "TP that does not divide heads": (glm5(f"{TENSOR}=128 {PIPELINE}=1 {LAST}=0 {CONTEXT}=1"), (BUDGET, TENSOR)),
    "TP that does not divide the vocabulary": (glm5(f"{ARCH}.vocab_size=154881"), (TENSOR,)),
    "TP that does not divide key-value heads": (
        {"model": "qwen3_30b_a3b", "set": f"{TENSOR}=8"},
        (TENSOR,),
    ),
    "TP over nodes": (glm5(f"{TENSOR}=16 {CONTEXT}=2 {BUDGET}=16384"), (TENSOR,)),
    "ETP over nodes": (glm5(f"{EXPERT}=2 {EXPERT_TENSOR}=16"), (EXPERT_TENSOR,)),
    "recomputed chunk longer than a stage": (
        glm5("trainer.recompute_num_layers=30"),
        ("trainer.recompute_num_layers",),
    ),
    "nodes that divide nothing": ({"nodes": 5}, ("nodes", BATCH)),
    "too few GPUs for the weights": ({"model": "glm5", "nodes": 2}, ("nodes",)),
    # Batches and lengths
    "batch that does not divide the rollout": ({"set": f"{BATCH}=48"}, (BATCH,)),
    "batch larger than the rollout": (glm5(f"{BATCH}=128"), (BATCH,)),
    "batch that ranks cannot share": (glm5(f"{BATCH}=1"), (BATCH,)),
    "group of one": (
        glm5(f"rollout.num_samples_per_prompt=1 {BATCH}=8"),
        ("rollout.num_samples_per_prompt",),
    ),
    "cap below the longest sample": (glm5(f"{BUDGET}=4096"), (BUDGET,)),
    "cap too small without CP": (glm5(f"{CONTEXT}=1"), (BUDGET,)),
    "response longer than the cap": (glm5(f"{LONGEST}=65536"), (BUDGET,)),
    "response longer than the model": (glm5(f"{LONGEST}=202752 {BUDGET}=202752"), (LONGEST,)),
    "warm-up longer than the run": ({"set": "optimizer.lr_warmup_steps=1000"}, ("optimizer.lr_warmup_steps",)),
    # Data and evaluation
    "files that are not given": ({"set": "data.kind=jsonl"}, ("data.train_file",)),
    "a repository without files": (
        {"set": f"data.kind=hub data.repo_id=owner/name data.revision={COMMIT}"},
        ("data.train_file",),
    ),
    "evaluation without prompts": ({"set": "data.num_heldout_prompts=0"}, ("data.num_heldout_prompts",)),
    "evaluation of nothing": (
        {"set": "evaluation.num_samples_per_prompt=0"},
        ("evaluation.num_samples_per_prompt",),
    ),
    "dataset without owner": (glm5("data.repo_id=dapo-math-17k"), ("data.repo_id",)),
    "dataset without a pinned revision": (glm5("data.revision=main"), ("data.revision",)),
    "nothing to train on": ({"set": "data.num_train_prompts=0"}, ("data.num_train_prompts",)),
    "more prompts than numbers": ({"set": "data.num_heldout_prompts=100000"}, ("data.num_train_prompts",)),
    "grader that is not there": ({"set": "data.reward=judge"}, ("data.reward",)),
    # The hardware
    "FP8 engines on MI300X": ({"model": "glm5", "hardware": "mi300x"}, ("rollout.fp8",)),
    "format that is not there": (glm5("hardware.formats=[bf16,fp8,fp6]"), ("hardware.formats",)),
    "trainer's DeepEP on GB300": (glm5("trainer.deepep=true", hardware="gb300", nodes=32), ("trainer.deepep",)),
    "DeepEP on a CPU": ({"set": "trainer.deepep=true"}, ("trainer.deepep",)),
    "offload on a CPU": ({"set": "trainer.optimizer_cpu_offload=true"}, ("trainer.optimizer_cpu_offload",)),
    "speculation on a CPU": ({"set": "engine.mtp_steps=3"}, ("engine.mtp_steps",)),
    "speculation without MTP layer": ({"model": "qwen3_4b", "set": "engine.mtp_steps=3"}, ("engine.mtp_steps",)),
    "speculation on MI300X": (
        glm5("rollout.fp8=false engine.mtp_steps=3", hardware="mi300x"),
        ("engine.mtp_steps",),
    ),
    "engine of one and a half nodes": (glm5("engine.gpus_per_engine=12"), ("engine.gpus_per_engine",)),
    "engine that cannot share experts": (glm5("engine.gpus_per_engine=48"), ("engine.gpus_per_engine",)),
    "prefill beside full engines": (glm5("engine.num_engines=2"), ("engine.pd.num_prefill_engines",)),
    "graphs larger than DeepEP's buffers": (glm5("engine.graph_batch_size=2048"), ("engine.graph_batch_size",)),
    # The site
    "too little shared disk": (glm5("site.shared_disk_gb=10000"), ("site.shared_disk_gb",)),
    "too little local disk": (glm5("site.local_disk_gb=1000"), ("site.local_disk_gb",)),
    "too little host memory": (glm5("site.host_memory_gib=512"), ("site.host_memory_gib",)),
    "one node twice": ({"set": "site.node_names=[a,a]"}, ("site.node_names",)),
    "node that is a path": ({"set": "site.node_names=[../a]"}, ("site.node_names",)),
    # What holds together, but not in this memory or on so few GPUs
    "more engines than GPUs": (
        glm5("engine.num_engines=3 engine.pd.num_prefill_engines=0"),
        ("engine.num_engines",),
    ),
    "engine too small for the weights": (
        glm5("engine.gpus_per_engine=2 engine.num_engines=32"),
        ("engine.gpus_per_engine",),
    ),
    "engines that leave the trainer no room": (
        glm5("engine.mem_fraction_static=0.95"),
        ("engine.mem_fraction_static",),
    ),
    "time limit shorter than a step with its checkpoint": (
        {**glm5("site.slurm.time_limit=20m site.slurm.signal_seconds=60"), "site": "example_slurm"},
        ("site.slurm.time_limit",),
    ),
    "layout that does not fit": (glm5(f"{PIPELINE}=1 {LAST}=0"), ("parallel",)),
}

# Mistakes of several kinds at once: everything that can be known together stands in one report.
SEVERAL: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "before the values are held against each other": (
        {
            "model": "glm6",
            "recipe": "prodction",
            "site": "lokal",
            "nodes": 0,
            "set": "optmizer.lr=1 training.num_steps=x",
        },
        ("model", "recipe", "site", "nodes", "optmizer.lr", "training.num_steps"),
    ),
    "values that do not go together": (
        glm5(f"{EXPERT}=24 {LAST}=17 {BATCH}=48 {BUDGET}=1024 data.revision=main engine.gpus_per_engine=48"),
        (EXPERT, LAST, BATCH, BUDGET, "data.revision", "engine.gpus_per_engine"),
    ),
    "capacities": (
        glm5("site.shared_disk_gb=1 site.local_disk_gb=1 site.host_memory_gib=1"),
        ("site.shared_disk_gb", "site.local_disk_gb", "site.host_memory_gib", "export.check"),
    ),
}
BY_SNAKEMAKE = (
    "EP that does not divide 256",
    "trainer's DeepEP on GB300",
    "too little shared disk",
    "layout that does not fit",
)


def refusals(request: dict[str, Any]) -> tuple[Problem, ...]:
    """Return what the functions that the Snakefile calls refuse."""
    try:
        resolved = resolve({"model": "tiny", "site": "local", **request}, CONFIG_DIR)
    except ConfigError as error:
        return error.problems
    return tuple(find_problems(resolved.config))


def check_problems(problems: tuple[Problem, ...], keys: tuple[str, ...]) -> None:
    assert {problem.key for problem in problems} == set(keys), problems
    for problem in problems:
        assert all(text.strip() for text in problem.as_dict().values()), problem


def test_there_are_sixty() -> None:
    requests = [str(sorted(request.items())) for request, _ in MISTAKES.values()]
    assert len(set(requests)) == len(requests) >= 60


@pytest.mark.parametrize("model", ["tiny", "glm5", "qwen3_4b", "qwen3_30b_a3b"])
def test_what_the_mistakes_are_made_in_is_right(model: str) -> None:
    assert refusals({"model": model}) == ()


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused_with_a_remedy(name: str) -> None:
    request, keys = MISTAKES[name]
    check_problems(refusals(request), keys)


@pytest.mark.parametrize("name", SEVERAL)
def test_several_mistakes_stand_in_one_report(name: str) -> None:
    request, keys = SEVERAL[name]
    check_problems(refusals(request), keys)


def test_a_site_that_declares_enough_is_planned() -> None:
    enough = "site.shared_disk_gb=100000 site.local_disk_gb=10000 site.host_memory_gib=4000"
    assert refusals(glm5(enough)) == ()


@pytest.mark.parametrize("name", BY_SNAKEMAKE)
def test_the_dry_run_ends_with_the_report(name: str, tmp_path: Path) -> None:
    request, keys = MISTAKES[name]
    code, output = dry_run(tmp_path, request)
    assert code == 1
    assert "Traceback" not in output
    problems = re.findall(r"^  - (.*?) = .+\n      allowed: .+\n      remedy:  .+$", output, re.MULTILINE)
    assert set(problems) == set(keys), output
    assert {path.name for path in tmp_path.iterdir()} <= {".snakemake", "logs"}, "but for what was resolved"
