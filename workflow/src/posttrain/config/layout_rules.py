"""Rules of parallel layouts; the planner applies them to every candidate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import chain

from posttrain.config.derived import (
    data_parallel_size,
    layers_per_stage,
    model_parallel_size,
    rollout_samples_per_step,
    stage_chunks,
    token_budget,
    world_size,
)
from posttrain.config.families import chooses_keys
from posttrain.config.schema import Config
from posttrain.errors import Problem

Problems = Iterator[Problem]
FIRST_STAGE = "parallel.num_layers_in_first_pipeline_stage"
LAST_STAGE = "parallel.num_layers_in_last_pipeline_stage"


def _ranks(config: Config) -> Problems:
    parallel, ranks, copy = config.parallel, world_size(config), model_parallel_size(config)
    if ranks % copy:
        remedy = "choose sizes whose product divides nodes x GPUs per node"
        yield Problem(
            "layout-divides-ranks", "parallel", f"TP x PP x CP = {copy}", f"a divisor of the {ranks} ranks", remedy
        )
    expert_copy = (
        parallel.expert_model_parallel_size
        * parallel.expert_tensor_parallel_size
        * parallel.pipeline_model_parallel_size
    )
    if ranks % expert_copy:
        key, allowed = "parallel.expert_model_parallel_size", f"a divisor of the {ranks} ranks"
        yield Problem("experts-divide-ranks", key, f"EP x ETP x PP = {expert_copy}", allowed, "lower EP, ETP or PP")


def _divisors(config: Config) -> Problems:
    arch, parallel = config.model.architecture, config.parallel
    for size_name, dimension_name in (
        ("tensor_model_parallel_size", "num_attention_heads"),
        ("tensor_model_parallel_size", "num_key_value_heads"),
        ("tensor_model_parallel_size", "vocab_size"),
        ("tensor_model_parallel_size", "intermediate_size"),
        ("tensor_model_parallel_size", "shared_expert_intermediate_size"),
        ("tensor_model_parallel_size", "linear_num_key_heads"),
        ("expert_model_parallel_size", "n_routed_experts"),
        ("expert_tensor_parallel_size", "moe_intermediate_size"),
    ):
        size, dimension = getattr(parallel, size_name), getattr(arch, dimension_name)
        # The size of a part that the model lacks is 0, which is divisible by every size.
        if dimension % size:
            allowed = f"a divisor of {dimension} ({dimension_name})"
            yield Problem(
                "size-divides-model", f"parallel.{size_name}", str(size), allowed, "choose one that divides it"
            )
    heads, tensor = arch.linear_num_key_heads, parallel.tensor_model_parallel_size
    if heads % tensor == 0 and heads // tensor % (ranks := parallel.context_parallel_size):
        allowed = f"a divisor of {heads // tensor}: context-parallel ranks share the heads of gated delta nets"
        remedy = "lower it, or tensor_model_parallel_size"
        yield Problem("delta-net-heads-per-rank", "parallel.context_parallel_size", str(ranks), allowed, remedy)


def _links(config: Config) -> Problems:
    # Every layer waits for collectives among these ranks, which would dominate over a network between nodes.
    hardware, parallel = config.hardware, config.parallel
    linked = hardware.linked_gpus or hardware.gpus_per_node
    if hardware.device == "cpu":
        return
    for name in ("tensor_model_parallel_size", "expert_tensor_parallel_size"):
        if (size := getattr(parallel, name)) > linked:
            joined = "hardware.linked_gpus" if hardware.linked_gpus else "hardware.gpus_per_node"
            allowed = (
                f"at most {linked}, the GPUs that fast links connect ({joined}): every layer communicates among them"
            )
            yield Problem(
                "slow-links", f"parallel.{name}", str(size), allowed, "use more pipeline, context or expert parallelism"
            )


def _context(config: Config) -> Problems:
    # Transformer Engine supports context parallelism only with fused attention, which does not exist in FP32.
    ranks, is_ours = config.parallel.context_parallel_size, config.model.architecture.index_n_heads > 0
    if ranks > 1 and config.hardware.device != "cpu" and config.trainer.params_dtype == "fp32" and not is_ours:
        allowed = "1 on GPUs with trainer.params_dtype=fp32: Transformer Engine has no attention for it"
        remedy = "set trainer.params_dtype=bf16"
        yield Problem("context-parallel-in-fp32", "parallel.context_parallel_size", str(ranks), allowed, remedy)


def _experts(config: Config) -> Problems:
    parallel, num_experts = config.parallel, config.model.architecture.n_routed_experts
    tensor, expert_tensor = parallel.tensor_model_parallel_size, parallel.expert_tensor_parallel_size
    if num_experts == 0:
        for name in ("expert_model_parallel_size", "expert_tensor_parallel_size"):
            if (size := getattr(parallel, name)) > 1:
                remedy = "leave it out"
                yield Problem(
                    "experts-of-dense-model", f"parallel.{name}", str(size), "1: the model has no experts", remedy
                )
    # With EP 1 Megatron treats experts as dense weights; with ETP below TP each tensor-parallel rank then trains its
    # copy on its own part of the sequence, and the gradients are never summed.
    elif tensor > 1 and parallel.expert_model_parallel_size == 1 and expert_tensor != tensor:
        allowed = f"{tensor} (tensor_model_parallel_size), or any with expert_model_parallel_size above 1"
        remedy = "raise expert_model_parallel_size, as the recipes do"
        yield Problem(
            "expert-tensor-without-experts", "parallel.expert_tensor_parallel_size", str(expert_tensor), allowed, remedy
        )


def _given_stage(config: Config) -> tuple[str, int]:
    """Return the key and the layers of the stage whose length is given; the last if both or none are."""
    first, last = (getattr(config.parallel, key.removeprefix("parallel.")) for key in (FIRST_STAGE, LAST_STAGE))
    return (FIRST_STAGE, first) if first and not last else (LAST_STAGE, last)


def _stages(config: Config) -> Problems:
    parallel, num_layers = config.parallel, config.model.architecture.num_hidden_layers
    key, size = _given_stage(config)
    chunks, chunks_key = parallel.virtual_pipeline_model_parallel_size, "parallel.virtual_pipeline_model_parallel_size"
    if parallel.pipeline_model_parallel_size == 1:
        if chunks > 1:
            remedy = "leave it out, or raise parallel.pipeline_model_parallel_size"
            allowed = "1 with one stage: only chunks of several stages can interleave"
            yield Problem("chunks-of-one-stage", chunks_key, str(chunks), allowed, remedy)
        both = (parallel.num_layers_in_first_pipeline_stage, parallel.num_layers_in_last_pipeline_stage)
        if sorted(both) not in ([0, 0], [0, num_layers]):
            allowed = f"0, or all {num_layers} layers, in the only stage"
            yield Problem("stage-is-only-stage", key, str(size), allowed, "leave it out, or give the number of stages")
        return
    if sum(layers_per_stage(config)) != num_layers or min(layers_per_stage(config)) < 1:
        allowed = (
            f"so that the other stages of {parallel.pipeline_model_parallel_size} share {num_layers} layers evenly"
        )
        remedy = f"change {FIRST_STAGE}, {LAST_STAGE} or the number of stages"
        yield Problem("stages-uneven", key, str(size), allowed, remedy)
        return
    if math.gcd(*layers_per_stage(config)) % chunks:
        allowed = f"a divisor of each stage's layers ({', '.join(map(str, layers_per_stage(config)))})"
        yield Problem(
            "chunks-divide-stage",
            chunks_key,
            str(chunks),
            allowed,
            "change it, the first or last stage, or the number of stages",
        )
        return
    arch, (_, *firsts) = config.model.architecture, sorted(layers.start for layers in chain(*stage_chunks(config)))
    if arch.index_topk_freq > 1 and (wrong := [layer for layer in firsts if not chooses_keys(arch, layer)]):
        allowed = "stages that begin with a layer that chooses keys: stages do not send each other chosen keys"
        found = f"{size}: stages begin with layers {', '.join(map(str, wrong))}"
        remedy = f"change {FIRST_STAGE}, {LAST_STAGE}, the number of stages or of their chunks"
        yield Problem("stage-begins-with-shared-indices", key, found, allowed, remedy)


def _batches(config: Config) -> Problems:
    key, batch = "training.global_batch_size", config.training.global_batch_size
    samples, ranks = rollout_samples_per_step(config), data_parallel_size(config)
    if samples % batch:
        remedy = "change it, rollout_batch_size or num_samples_per_prompt"
        yield Problem(
            "batch-divides-samples", key, str(batch), f"a divisor of the {samples} samples of a rollout", remedy
        )
    is_layout = world_size(config) % model_parallel_size(config) == 0  # else `_ranks` has rejected it
    if is_layout and batch % ranks:
        allowed = f"a multiple of {ranks}, the data-parallel ranks, which run equally many micro-batches"
        remedy = "raise the batch, or use more tensor or pipeline parallelism"
        yield Problem("batch-divides-ranks", key, str(batch), allowed, remedy)


def _token_budget(config: Config) -> Problems:
    rollout, budget = config.rollout, token_budget(config)
    response, prompt = rollout.max_response_tokens, rollout.max_prompt_tokens
    needed, of_what = {
        "own_row": (response, "rollout.max_response_tokens"),
        "cut": (prompt + 1, "rollout.max_prompt_tokens and a response"),
        "refuse": (prompt + response, "rollout.max_prompt_tokens and max_response_tokens together"),
    }[rollout.overlong_samples]
    if rollout.overlong_samples == "refuse" and not prompt:
        allowed = "at least 1 with rollout.overlong_samples=refuse: it limits prompt and response together"
        yield Problem(
            "prompt-limit-missing", "rollout.max_prompt_tokens", "0", allowed, "give the tokens of the longest prompt"
        )
    if budget < needed:
        allowed = f"at least {needed} per context-parallel group ({of_what})"
        remedy = "raise the budget or cut the responses"
        yield Problem(
            "token-budget-too-small",
            "trainer.max_tokens_per_gpu",
            str(config.trainer.max_tokens_per_gpu),
            allowed,
            remedy,
        )


LAYOUT_RULES: tuple[Callable[[Config], Problems], ...] = (
    _ranks,
    _divisors,
    _links,
    _context,
    _experts,
    _stages,
    _batches,
    _token_budget,
)
