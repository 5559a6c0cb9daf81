"""Builds a rank's model, data-parallel wrapper and optimizer.

A rank holds a list of chunks of consecutive layers: one, or several with interleaved pipeline stages.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.optimizer_config import ParamKey
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from posttrain.config.schema import Config
from posttrain.plan.flags.sparse_kernels import sparse_kernel
from posttrain.rl.megatron_backend.arguments import ddp_config, optimizer_config, transformer_config
from posttrain.rl.megatron_backend.expert_load import ExpertLoad
from posttrain.rl.megatron_backend.glm5.model import LogprobModel
from posttrain.rl.megatron_backend.layer_spec import block_spec
from posttrain.rl.megatron_backend.routing_replay import RoutingReplay

log = logging.getLogger(__name__)


@dataclass
class Policy:
    """The policy on this rank.

    Args:
        config: The resolved configuration.
        chunks: The bare model of this pipeline stage, in order; shares its parameters with `wrapped`.
        wrapped: The same in Megatron's data-parallel wrapper, for forward and backward passes.
        optimizer: Megatron's distributed optimizer; None for a policy that is only evaluated.
        expert_load: Counts the tokens of this stage's experts.
        replay: Replays the engine's expert routing; None if the routers choose.
    """

    config: Config
    chunks: list[LogprobModel]
    wrapped: list[DistributedDataParallel]
    optimizer: MegatronOptimizer | None
    expert_load: ExpertLoad
    replay: RoutingReplay | None = None

    @property
    def settings(self) -> TransformerConfig:
        """Megatron's config, shared by all chunks."""
        return self.chunks[0].config

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(self.chunks[0].parameters()).device

    @property
    def buffers(self) -> list[_ParamAndGradBuffer]:
        """Weight and gradient buffers; within each chunk, those of experts come last."""
        return [buffer for chunk in self.wrapped for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Yield the parameters of all chunks."""
        for chunk in self.chunks:
            yield from chunk.parameters()

    @contextmanager
    def at_temperature(self, temperature: float) -> Iterator[None]:
        """Use another temperature than the rollout's for log-probabilities within the block."""
        before = [chunk.temperature for chunk in self.chunks]
        try:
            for chunk in self.chunks:
                chunk.temperature = temperature
            yield
        finally:
            for chunk, own in zip(self.chunks, before, strict=True):
                chunk.temperature = own


def build_model(config: Config) -> list[LogprobModel]:
    """Return this rank's chunks of the model, uninitialised: weights come from a checkpoint."""
    settings = transformer_config(config)
    num_chunks = config.parallel.virtual_pipeline_model_parallel_size
    return [_build_chunk(config, settings, number) for number in range(num_chunks)]


def _build_chunk(config: Config, settings: TransformerConfig, number: int) -> LogprobModel:
    arch = config.model.architecture
    model = LogprobModel(
        config=settings,
        transformer_layer_spec=block_spec(settings, config.hardware.device == "cuda", number),
        vocab_size=arch.vocab_size,
        max_sequence_length=arch.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=number),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=number),
        share_embeddings_and_output_weights=arch.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_percent=arch.partial_rotary_factor or 1.0,
        rotary_base=arch.rope_theta,
        vp_stage=number,
        log_probs_chunk_size=config.trainer.log_probs_chunk_size,
        temperature=config.rollout.temperature,
    )
    if config.hardware.device == "cpu":
        _fuse_gradient_accumulation(model, "gradient_accumulation_fusion")
        return model
    _fuse_gradient_accumulation(model, "fuse_wgrad_accumulation")
    return model.cuda()


def build_policy(config: Config) -> Policy:
    """Return model, data-parallel wrapper and optimizer of this rank."""
    if config.model.architecture.index_n_heads:
        kernel = sparse_kernel(config)
        log.info("sparse attention: %s, because %s", kernel.name, kernel.reason)
    chunks = build_model(config)
    settings = chunks[0].config
    # As in Megatron's own training: communication of later chunks overlaps with nothing, so use a single bucket.
    wrapped = [
        DistributedDataParallel(
            settings,
            ddp_config(config),
            _in_precision(settings, chunk),
            disable_bucketing=number > 0,
        )
        for number, chunk in enumerate(chunks)
    ]
    # The loss is already the sum over the global batch, so gradients are summed over ranks without scaling.
    settings.finalize_model_grads_func = lambda chunks, _num_tokens, **kwargs: finalize_model_grads(
        chunks, None, **kwargs
    )
    settings.grad_scale_func = None
    # Schedules use it to delay gradient synchronisation until a chunk's last micro-batch.
    settings.no_sync_func = partial(_no_sync, wrapped)
    optimizer = get_megatron_optimizer(optimizer_config(config), wrapped, _parameter_groups(config))
    replay = RoutingReplay(config, wrapped) if config.algorithm.routing_replay else None
    return Policy(config, chunks, wrapped, optimizer, ExpertLoad(chunks), replay)


def build_for_passes(config: Config) -> Policy:
    """Return this rank's model for forward passes only: no gradients, no optimizer."""
    chunks = build_model(config)
    settings = chunks[0].config
    wrapped = [_in_precision(settings, chunk) for chunk in chunks]
    # The schedules only call the module.
    return Policy(config, chunks, cast(list[DistributedDataParallel], wrapped), None, ExpertLoad(chunks))


def _parameter_groups(config: Config) -> dict[ParamKey, Any]:
    """Return Megatron's parameter groups, and one more of the weights that stay in FP32.

    Within a group of both precisions Megatron 0.19.2 confuses their optimizer states: it stores FP32 weights first
    (`_build_model_and_main_param_groups`), and looks them up in the order of the buffers.
    """
    apart = {ParamKey(attr="stays_fp32"): {"stays_fp32": True}}
    return get_standard_config_overrides(optimizer_config(config)) | apart


def _in_precision(settings: TransformerConfig, chunk: LogprobModel) -> torch.nn.Module:
    """Return a chunk in BF16 if the run trains in BF16, except the weights that are marked to stay in FP32."""
    if not settings.bf16:
        return chunk
    wrapped = Float16Module(settings, chunk)
    for parameter in chunk.parameters():
        if getattr(parameter, "stays_fp32", False):
            parameter.data = parameter.data.float()
    return wrapped


@contextmanager
def _no_sync(wrapped: Sequence[DistributedDataParallel]) -> Iterator[None]:
    with ExitStack() as stack:
        for chunk in wrapped:
            stack.enter_context(chunk.no_sync())
        yield


def _fuse_gradient_accumulation(model: torch.nn.Module, name: str) -> None:
    """Let the weight gradient GEMMs of linear layers accumulate directly into Megatron's FP32 buffers.

    Megatron's flag for this also requires Apex's kernel for the output layer, whose GEMM is ours.

    Args:
        model: Megatron's model.
        name: Attribute of Transformer Engine's layers or of Megatron's own.
    """
    for part in model.modules():
        if hasattr(part, name):
            setattr(part, name, True)
