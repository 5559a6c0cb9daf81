"""Calibration passes on the trainer's own model: forward passes over conversations, and a durable state between shards.

Every rank renders the same conversations and computes its own share of each shard. After each shard, observations are
merged over ranks and rank 0 saves them. With the same layout, a pass that was killed and resumed gives the same bits as
an undisturbed one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from safetensors.torch import save

from posttrain.checkpoint.quantization.coverage import STATE_FOLDER, coverage, describe_coverage
from posttrain.checkpoint.quantization.expert_maxima import ExpertMaxima, PassState
from posttrain.config.derived import data_parallel_size, micro_batch_multiple, token_budget
from posttrain.config.families import family_of
from posttrain.config.schema import Config
from posttrain.rl.batching.packed_batch import PackedBatch, build_packed_batch
from posttrain.rl.batching.packing import pack
from posttrain.rl.data.chat import ChatTokenizer
from posttrain.rl.megatron_backend.checkpoint import load_weights
from posttrain.rl.megatron_backend.expert_inputs import ExpertInputs
from posttrain.rl.megatron_backend.initialize import joined_ranks
from posttrain.rl.megatron_backend.model import Policy, build_for_passes
from posttrain.rl.megatron_backend.plain_data import share_plain
from posttrain.rl.megatron_backend.ranks import data_parallel_rank
from posttrain.rl.megatron_backend.train_step import compute_logprobs
from posttrain.rl.training.batch import row_multiples, sample_costs
from posttrain.rl.training.calibration_samples import Read, read_passes
from posttrain.store import COVERAGE_NAME, write_atomic, write_json
from posttrain.types import Trajectory

log = logging.getLogger(__name__)


def calibrate(
    config: Config,
    torch_dist: Path,
    model_folder: Path,
    conversations: Mapping[str, Path],
    made_from: str,
    folder: Path,
) -> None:
    """Run all passes and write their observations; collective.

    Args:
        config: The ranks' configuration (`config.derived.calibrating`).
        torch_dist: The weights: a converted checkpoint or a training checkpoint.
        model_folder: Checkpoint in Hub layout, with the tokenizer.
        conversations: Pass name -> folder written by `download_rows`.
        made_from: Digest of weights and conversations.
        folder: Output: `{pass}.safetensors` for each pass, and `coverage.json`.

    Raises:
        ConfigError: See `read_pass`.
        CheckpointError: The weights do not fit, or an activation is not finite.
    """
    tokenizer = ChatTokenizer(model_folder, config.data.chat_template_kwargs)
    read = read_passes(config, tokenizer, conversations)
    with joined_ranks(config):
        policy = build_for_passes(config)
        load_weights(policy.chunks, torch_dist)
        inputs = ExpertInputs(policy)
        seen = {name: _run_pass(policy, inputs, name, read[name], made_from, folder) for name in read}
        if dist.get_rank() == 0:
            write_results(config, folder, read, seen)


def _run_pass(
    policy: Policy, inputs: ExpertInputs, name: str, read: Read, made_from: str, folder: Path
) -> ExpertMaxima:
    """Return a pass's observations; on rank 0 they include those saved before a restart."""
    config, arch = policy.config, policy.config.model.architecture
    size = config.serving.samples_per_shard
    shards = [read.samples[start : start + size] for start in range(0, len(read.samples), size)]
    state = PassState(folder / STATE_FOLDER / f"{name}.safetensors", key_of(config, made_from, read.samples))
    finished, found = state.read() if dist.get_rank() == 0 else (0, None)
    finished = int(share_plain(finished))
    seen = found or ExpertMaxima.nothing(arch.num_hidden_layers, arch.n_routed_experts)
    if finished:
        log.info("%s: goes on behind shard %d of %d", name, finished, len(shards))
    for number, shard in enumerate(shards[finished:], start=finished + 1):
        batches, rows = _batches(config, shard)
        with inputs.watched(rows):
            compute_logprobs(policy, batches)
        seen = seen.merged(inputs.take())
        if dist.get_rank() == 0:
            state.write(number, seen)
            log.info("%s: shard %d of %d", name, number, len(shards))
    return seen


def key_of(config: Config, made_from: str, samples: Sequence[tuple[int, ...]]) -> str:
    """Return a digest of what determines a pass's bits: weights, tokens, shards, layout, precision, machine."""
    decides: dict[str, Any] = {
        "made_from": made_from,
        "samples": hashlib.sha256(json.dumps(samples).encode()).hexdigest(),
        "samples_per_shard": config.serving.samples_per_shard,
        "layout": [config.nodes, dataclasses.asdict(config.parallel)],
        "trainer": [config.trainer.params_dtype, config.trainer.max_tokens_per_gpu, config.trainer.num_threads],
        "hardware": [config.hardware.name, config.hardware.gpus_per_node, torch.__version__],
    }
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()


def _batches(config: Config, shard: Sequence[tuple[int, ...]]) -> tuple[list[PackedBatch], list[torch.Tensor]]:
    """Return this rank's micro-batches of a shard, and each one's mask of non-padding tokens [T] bool."""
    # Calibration needs no predictions: one response token per sample keeps the logits tiny.
    samples = [Trajectory.of_response(tokens[:-1], tokens[-1:], prompt_id=i) for i, tokens in enumerate(shard)]
    multiple, sequence_multiple = row_multiples(config)
    lengths = [-(-len(tokens) // sequence_multiple) * sequence_multiple for tokens in shard]
    budget, costs = token_budget(config) // multiple * multiple, sample_costs(config, lengths)
    plan = pack(lengths, costs, budget, data_parallel_size(config), micro_batch_multiple(config))
    mine = plan[data_parallel_rank()]
    batches = [build_packed_batch(samples, indices, multiple, sequence_multiple) for indices in mine]
    return batches, [real_tokens(batch, samples) for batch in batches]


def real_tokens(batch: PackedBatch, samples: Sequence[Trajectory]) -> torch.Tensor:
    """Return a mask of a row's non-padding tokens [T] bool."""
    own = [samples[index].num_tokens for index in batch.trajectory_indices]
    own += [0] * (len(batch.lengths) - len(own))
    return torch.cat([torch.arange(length) < real for length, real in zip(batch.lengths, own, strict=True)])


def write_results(config: Config, folder: Path, read: Mapping[str, Read], seen: Mapping[str, ExpertMaxima]) -> None:
    """Write each pass's maxima under Model Optimizer's names, and the number of tokens routed to each expert."""
    arch = config.model.architecture
    first, prefix = arch.first_k_dense_replace, family_of(arch).text_prefix
    passes: dict[str, Any] = {}
    for name, found in seen.items():
        content = save(found.by_module(prefix))
        write_atomic(folder / f"{name}.safetensors", partial(_put, content))
        tokens = sum(map(len, read[name].samples))
        counts = {"conversations": len(read[name].samples), "too_short": read[name].num_short, "tokens": tokens}
        passes[name] = {**counts, **coverage(found.counts.tolist(), first)}
        log.info(
            "%s: %d conversations, %d tokens; %s",
            name,
            counts["conversations"],
            tokens,
            describe_coverage(passes[name]),
        )
    together = coverage(torch.stack([found.counts for found in seen.values()]).sum(0).tolist(), first)
    log.info("all passes: %s", describe_coverage(together))
    write_json(folder / COVERAGE_NAME, {"all": together, "passes": passes})


def _put(content: bytes, file: BinaryIO) -> None:
    file.write(content)
