"""The rules that join several keys of the configuration. Pure arithmetic, no torch, no files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from posttrain.config.derived import (
    data_parallel_size,
    layers_per_stage,
    model_parallel_size,
    rollout_samples_per_step,
    world_size,
)
from posttrain.config.engine_rules import ENGINE_RULES, check_started_engines
from posttrain.config.schema import Config
from posttrain.errors import Problem

Problems = Iterator[Problem]
# A node's name becomes a folder's.
NODE_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"


def check_consistency(config: Config) -> list[Problem]:
    """Return every violated rule."""
    return [problem for rule in (*RULES, *ENGINE_RULES) for problem in rule(config)]


def check_trainable(config: Config) -> Problems:
    """Yield what can be planned, converted and staged but not trained by this version.

    Its launcher starts processes on one node, and its attention takes whole sequences.
    """
    for key, value in (
        ("nodes", config.nodes),
        ("parallel.context_parallel_size", config.parallel.context_parallel_size),
    ):
        if value > 1:
            yield Problem(key, str(value), "1 to train with this version", "plan it, or train a smaller model")
    yield from check_started_engines(config)


def _model_source(config: Config) -> Problems:
    source = config.model.source
    if source.kind == "hub":
        if source.repo_id.count("/") != 1:
            yield Problem("model.source.repo_id", repr(source.repo_id), "owner/name", "give the Hub repository")
        yield from _pinned("model.source.revision", source.revision)
    if source.kind == "folder" and not source.folder:
        yield Problem("model.source.folder", "''", "a folder", "give the folder of the checkpoint")


def _data_source(config: Config) -> Problems:
    data = config.data
    if data.kind == "hub":
        yield from _pinned("data.revision", data.revision)
    if data.kind == "jsonl":
        for name in ("train_file", "heldout_file"):
            if not getattr(data, name):
                yield Problem(f"data.{name}", "''", "a jsonl file", "give the path of the prompts")
    if data.kind == "sort_digits" and data.num_train_prompts < 1:
        yield Problem("data.num_train_prompts", str(data.num_train_prompts), "at least 1", "generate some")


def _pinned(key: str, revision: str) -> Problems:
    if len(revision) != 40 or not set(revision) <= set("0123456789abcdef"):
        remedy = "pin the commit that the repository's page shows, in quotes"
        yield Problem(key, repr(revision), "40 hex digits", remedy)


def _architecture(config: Config) -> Problems:
    arch, prefix = config.model.architecture, "model.architecture"
    has_indexer = arch.index_n_heads > 0
    if has_indexer != (arch.model_type == "glm_moe_dsa"):
        allowed = "at least 1 for glm_moe_dsa, 0 for deepseek_v3"
        yield Problem(f"{prefix}.index_n_heads", str(arch.index_n_heads), allowed, "match the model type")
    if has_indexer and (arch.index_topk < 1 or arch.index_head_dim < arch.qk_rope_head_dim):
        value = f"topk {arch.index_topk}, head_dim {arch.index_head_dim}"
        allowed = f"index_topk of at least 1 and index_head_dim of at least {arch.qk_rope_head_dim} (qk_rope_head_dim)"
        yield Problem(f"{prefix}.index_topk", value, allowed, "take both from config.json")
    if arch.num_experts_per_tok > arch.n_routed_experts:
        allowed = f"at most {arch.n_routed_experts} (n_routed_experts)"
        yield Problem(
            f"{prefix}.num_experts_per_tok", str(arch.num_experts_per_tok), allowed, "take both from config.json"
        )


def _ranks(config: Config) -> Problems:
    parallel, ranks, copy = config.parallel, world_size(config), model_parallel_size(config)
    if ranks % copy:
        remedy = "choose sizes whose product divides nodes x GPUs per node"
        yield Problem("parallel", f"TP x PP x CP = {copy}", f"a divisor of the {ranks} ranks", remedy)
    expert_copy = (
        parallel.expert_model_parallel_size
        * parallel.expert_tensor_parallel_size
        * parallel.pipeline_model_parallel_size
    )
    if ranks % expert_copy:
        key, allowed = "parallel.expert_model_parallel_size", f"a divisor of the {ranks} ranks"
        yield Problem(key, f"EP x ETP x PP = {expert_copy}", allowed, "lower EP, ETP or PP")


def _divisors(config: Config) -> Problems:
    arch, parallel = config.model.architecture, config.parallel
    for size_name, dimension_name in (
        ("tensor_model_parallel_size", "num_attention_heads"),
        ("tensor_model_parallel_size", "vocab_size"),
        ("tensor_model_parallel_size", "intermediate_size"),
        ("expert_model_parallel_size", "n_routed_experts"),
    ):
        size, dimension = getattr(parallel, size_name), getattr(arch, dimension_name)
        if dimension % size:
            allowed = f"a divisor of {dimension} ({dimension_name})"
            yield Problem(f"parallel.{size_name}", str(size), allowed, "choose one that divides it")


def _experts(config: Config) -> Problems:
    parallel = config.parallel
    tensor, expert_tensor = parallel.tensor_model_parallel_size, parallel.expert_tensor_parallel_size
    # With EP 1 Megatron takes experts for dense weights; with ETP below TP each tensor-parallel rank then trains its
    # copy on its own part of the sequence, and nobody adds the gradients up.
    if tensor > 1 and parallel.expert_model_parallel_size == 1 and expert_tensor != tensor:
        yield Problem(
            "parallel.expert_tensor_parallel_size",
            str(expert_tensor),
            f"{tensor} (tensor_model_parallel_size), or any with expert_model_parallel_size above 1",
            "raise expert_model_parallel_size, as the recipes do",
        )


def _stages(config: Config) -> Problems:
    parallel, num_layers = config.parallel, config.model.architecture.num_hidden_layers
    if sum(layers_per_stage(config)) != num_layers or min(layers_per_stage(config)) < 1:
        others = parallel.pipeline_model_parallel_size - 1
        yield Problem(
            "parallel.num_layers_in_last_pipeline_stage",
            str(parallel.num_layers_in_last_pipeline_stage),
            f"so that the other {others} stages share {num_layers} layers evenly",
            "change the last stage or the number of stages",
        )


def _batches(config: Config) -> Problems:
    key, batch = "training.global_batch_size", config.training.global_batch_size
    samples, ranks = rollout_samples_per_step(config), data_parallel_size(config)
    if samples % batch:
        remedy = "change it, rollout_batch_size or num_samples_per_prompt"
        yield Problem(key, str(batch), f"a divisor of the {samples} samples of a rollout", remedy)
    is_layout = world_size(config) % model_parallel_size(config) == 0  # else `_ranks` has refused it
    if is_layout and batch % ranks:
        allowed = f"a multiple of {ranks}, the data-parallel ranks, which run equally many micro-batches"
        yield Problem(key, str(batch), allowed, "raise the batch, or use more tensor or pipeline parallelism")


def _token_budget(config: Config) -> Problems:
    longest, budget = config.rollout.max_response_tokens, config.trainer.max_tokens_per_gpu
    if budget * config.parallel.context_parallel_size < longest:
        allowed = f"at least {longest} per context-parallel group (rollout.max_response_tokens)"
        yield Problem("trainer.max_tokens_per_gpu", str(budget), allowed, "raise the budget or cut the responses")


def _hardware(config: Config) -> Problems:
    hardware, trainer = config.hardware, config.trainer
    if trainer.deepep and not hardware.deepep:
        remedy = "set trainer.deepep=false; tokens then go through Megatron's all-to-all"
        yield Problem("trainer.deepep", "true", f"false on {hardware.name}", remedy)
    if hardware.device == "cpu" and trainer.optimizer_cpu_offload:
        remedy = "the state is in host memory already"
        yield Problem("trainer.optimizer_cpu_offload", "true", "false on a CPU", remedy)


def _node_names(config: Config) -> Problems:
    names = config.site.node_names
    if len(set(names)) < len(names) or not all(re.fullmatch(NODE_NAME, name) for name in names):
        allowed = "different names of letters, digits, '.', '_' and '-' that start with a letter or digit"
        yield Problem("site.node_names", repr(names), allowed, "give each node's host name once")


RULES: tuple[Callable[[Config], Problems], ...] = (
    _model_source,
    _data_source,
    _architecture,
    _ranks,
    _divisors,
    _experts,
    _stages,
    _batches,
    _token_budget,
    _hardware,
    _node_names,
)
