"""Bytes on disk: every checkpoint state in the store, a run's checkpoints, and each node's local copy.

Only tensors are counted: safetensors headers, indexes, tokenizers, datasets, logs and persisted rollouts are small by
comparison. Links use no space: the patched checkpoint's weights are links to the source, and so is the copy of a model
that the workflow makes itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.config.derived import engines_load
from posttrain.config.schema import Config
from posttrain.plan.sizing.assumptions import ASSUMPTIONS
from posttrain.plan.sizing.evaluation import evaluates_fp8, quantises_for_engines
from posttrain.plan.sizing.memory import BYTES
from posttrain.plan.sizing.model_size import count_parameters, model_weights, mtp_weights, saved_weights, vision_weights
from posttrain.plan.sizing.node_copy import node_copy
from posttrain.plan.sizing.routes import stored_routes_bytes

# Bytes that Megatron saves per trained parameter, besides the weight: FP32 master copy, first and second moment. The
# indexer is frozen (`glm5/indexer.py`) and has no state.
OPTIMIZER_STATE_BYTES = 12
NOT_MODELLED = (
    "storage: datasets, logs, persisted rollouts but for routes, file headers; the NVFP4 checkpoint, made on demand",
)


@dataclass(frozen=True)
class Storage:
    """Bytes on disk.

    Args:
        hf: The source checkpoint, including MTP layers.
        torch_dist: The source checkpoint in Megatron's format.
        rollout_fp8: The original model in FP8; 0 if neither initial engines nor an evaluation load it.
        rollout_start: What the trainer does not send of it, for engines that start empty: MTP layers, vision tower.
        export_fp8: The trained model in FP8; 0 if it is evaluated in the source's precision.
        trained_weights: The weights, including the frozen indexer's, in one checkpoint of the training run.
        training_checkpoint: One checkpoint of the training run: weights and optimizer state.
        num_training_checkpoints: Maximum number at any time: the kept ones and the one being written.
        hf_export: The trained model in Hub layout.
        node_local_bytes: Maximum size of staged files on each node's local disk.
        kept_routes: Routing records of rollouts; 0 if they are not kept.
    """

    hf: int
    torch_dist: int
    rollout_fp8: int
    rollout_start: int
    export_fp8: int
    trained_weights: int
    training_checkpoint: int
    num_training_checkpoints: int
    hf_export: int
    node_local_bytes: int
    kept_routes: int

    @property
    def store_bytes(self) -> int:
        """Made once per model, in `site.store`."""
        return self.hf + self.torch_dist + self.rollout_fp8 + self.rollout_start + self.export_fp8

    @property
    def run_bytes(self) -> int:
        """Made by one run, in `site.results`."""
        return self.num_training_checkpoints * self.training_checkpoint + self.hf_export + self.kept_routes

    @property
    def shared_bytes(self) -> int:
        """Total on shared storage."""
        return self.store_bytes + self.run_bytes


def starts_in_fp8(config: Config) -> bool:
    """Return whether FP8 engines start empty, with their own files."""
    return config.rollout.fp8 and not engines_load(config)


def makes_fp8(config: Config) -> bool:
    """Return whether the original model is loaded in FP8, by initial engines or by an evaluation."""
    return quantises_for_engines(config) and (engines_load(config) or evaluates_fp8(config))


def storage(config: Config) -> Storage:
    """Return the disk space of a run.

    Example:
        GLM-5: hf 1,507,728,316,928 bytes (1,487,822,475,264 of them without the MTP layer).
    """
    arch = config.model.architecture
    trained = model_weights(arch)
    saved = saved_weights(arch)
    hf = sum(weight.bf16_bytes for weight in saved)
    drafts = mtp_weights(arch) if config.engine.mtp_steps else []
    fp8, start = (sum(weight.fp8_bytes for weight in weights) for weights in (saved, [*drafts, *vision_weights(arch)]))
    num_parameters = count_parameters(trained)
    frozen = count_parameters(weight for weight in trained if weight.component == "indexer")
    trained_weights = BYTES[config.trainer.params_dtype].weight * num_parameters
    return Storage(
        hf=hf,
        torch_dist=hf,
        rollout_fp8=fp8 if makes_fp8(config) else 0,
        rollout_start=start if starts_in_fp8(config) else 0,
        export_fp8=fp8 if evaluates_fp8(config) else 0,
        trained_weights=trained_weights,
        training_checkpoint=trained_weights + OPTIMIZER_STATE_BYTES * (num_parameters - frozen),
        num_training_checkpoints=config.trainer.keep_checkpoints + 1,
        hf_export=hf,
        node_local_bytes=node_copy(config, config.stage.copy).node_bytes,
        kept_routes=stored_routes_bytes(config, ASSUMPTIONS),
    )
