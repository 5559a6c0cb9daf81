"""Builds what a rank trains: model, data-parallel wrapper, optimizer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module

from posttrain.config.schema import Config
from posttrain.megatron_backend.arguments import ddp_config, optimizer_config, transformer_config
from posttrain.megatron_backend.expert_load import ExpertLoad
from posttrain.megatron_backend.glm5.model import LogprobModel
from posttrain.megatron_backend.layer_spec import block_spec


@dataclass
class Policy:
    """The policy on this rank.

    Args:
        config: The resolved configuration.
        model: The bare model of this pipeline stage; its parameters are the wrapped one's.
        wrapped: The same behind Megatron's data-parallel wrapper; this is what forward and backward run on.
        optimizer: Megatron's distributed optimizer; None for a policy that is only evaluated.
        expert_load: Counts what the experts of this stage see.
    """

    config: Config
    model: LogprobModel
    wrapped: DistributedDataParallel
    optimizer: MegatronOptimizer | None
    expert_load: ExpertLoad


def build_model(config: Config) -> LogprobModel:
    """Return this rank's stage of the model; its weights are not initialised, they come from a checkpoint."""
    settings = transformer_config(config)
    arch = config.model.architecture
    model = LogprobModel(
        config=settings,
        transformer_layer_spec=block_spec(settings, use_transformer_engine=config.hardware.device == "cuda"),
        vocab_size=arch.vocab_size,
        max_sequence_length=arch.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=arch.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_percent=arch.partial_rotary_factor or 1.0,
        rotary_base=arch.rope_theta,
        log_probs_chunk_size=config.trainer.log_probs_chunk_size,
        temperature=config.rollout.temperature,
    )
    if config.hardware.device == "cpu":
        return model
    _fuse_gradient_accumulation(model)
    return model.cuda()


def build_policy(config: Config) -> Policy:
    """Return model, data-parallel wrapper and optimizer of this rank."""
    model = build_model(config)
    settings = model.config
    inner = Float16Module(settings, model) if settings.bf16 else model
    wrapped = DistributedDataParallel(settings, ddp_config(config), inner)
    # The loss is already the sum over the global batch: gradients are added over ranks and divided by nothing.
    settings.finalize_model_grads_func = lambda chunks, _num_tokens, **kwargs: finalize_model_grads(
        chunks, None, **kwargs
    )
    settings.grad_scale_func = None
    # Schedules ask for it, to leave gradients where they are until the last micro-batch.
    settings.no_sync_func = wrapped.no_sync
    optimizer = get_megatron_optimizer(optimizer_config(config), [wrapped])
    return Policy(config, model, wrapped, optimizer, ExpertLoad(model))


def _fuse_gradient_accumulation(model: torch.nn.Module) -> None:
    """Let Transformer Engine's products of weight gradients add to Megatron's FP32 buffers themselves.

    Megatron's flag for it would ask for Apex's kernel as well, for an output layer whose product is ours.
    """
    for part in model.modules():
        if hasattr(part, "fuse_wgrad_accumulation"):
            part.fuse_wgrad_accumulation = True  # type: ignore[assignment]
