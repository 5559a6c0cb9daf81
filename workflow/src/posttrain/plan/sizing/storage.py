"""Bytes on disk: every checkpoint state in the store, a run's checkpoints, and each node's own copy.

Counted are tensors: safetensors headers, indexes, tokenizers, datasets, logs and persisted rollouts are small
beside them. The patched checkpoint's weights are links to the source and cost nothing; so do the links to a
model that the workflow makes itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.config.derived import engines_load
from posttrain.config.schema import Config
from posttrain.plan.sizing.assumptions import ASSUMPTIONS
from posttrain.plan.sizing.evaluation import evaluates_fp8, quantises_for_engines
from posttrain.plan.sizing.memory import BYTES
from posttrain.plan.sizing.model_size import count_parameters, model_weights, mtp_weights
from posttrain.plan.sizing.node_copy import node_copy
from posttrain.plan.sizing.routes import stored_routes_bytes

# What Megatron saves per trained parameter beside the weight: FP32 master copy, first and second moment. The indexer is
# frozen (`glm5/indexer.py`) and has no state.
OPTIMIZER_STATE_BYTES = 12
NOT_MODELLED = (
    "storage: datasets, logs, persisted rollouts but for routes, file headers; the NVFP4 checkpoint, made on demand",
)


@dataclass(frozen=True)
class Storage:
    """Bytes on disk.

    Args:
        hf: The source checkpoint, MTP layers included.
        torch_dist: The same in Megatron's format.
        rollout_fp8: The model as it came in FP8; 0 where neither engines that begin nor an evaluation load it.
        rollout_start: Of these what engines that begin empty draft with.
        export_fp8: The trained model in FP8; 0 when it is evaluated in the source's precision.
        trained_weights: The weights, the frozen indexer's too, in one checkpoint of the training run.
        training_checkpoint: One checkpoint of the training run: weights and optimizer state.
        num_training_checkpoints: How many exist at the worst moment: the kept ones and the one being written.
        hf_export: The trained model in Hub layout.
        node_local_bytes: What staging puts on each node's own disk, at most.
        kept_routes: To which experts the tokens of rollouts went; 0 where nobody asks.
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
        """Made once per model, below `site.store`."""
        return self.hf + self.torch_dist + self.rollout_fp8 + self.rollout_start + self.export_fp8

    @property
    def run_bytes(self) -> int:
        """Made by one run, below `site.results`."""
        return self.num_training_checkpoints * self.training_checkpoint + self.hf_export + self.kept_routes

    @property
    def shared_bytes(self) -> int:
        """All that lies on shared storage."""
        return self.store_bytes + self.run_bytes


def starts_in_fp8(config: Config) -> bool:
    """Return whether engines in FP8 begin empty, with files of their own."""
    return config.rollout.fp8 and not engines_load(config)


def makes_fp8(config: Config) -> bool:
    """Return whether anybody loads the model as it came in FP8: engines that begin with it, or an evaluation."""
    return quantises_for_engines(config) and (engines_load(config) or evaluates_fp8(config))


def storage(config: Config) -> Storage:
    """Return the disk space of a run.

    Example:
        GLM-5: hf 1,507,728,316,928 bytes (1,487,822,475,264 of them without the MTP layer).
    """
    arch = config.model.architecture
    trained = model_weights(arch)
    saved = [*trained, *mtp_weights(arch)]
    hf = sum(weight.bf16_bytes for weight in saved)
    fp8, drafts = (sum(weight.fp8_bytes for weight in weights) for weights in (saved, mtp_weights(arch)))
    num_parameters = count_parameters(trained)
    frozen = count_parameters(weight for weight in trained if weight.component == "indexer")
    trained_weights = BYTES[config.trainer.params_dtype].weight * num_parameters
    return Storage(
        hf=hf,
        torch_dist=hf,
        rollout_fp8=fp8 if makes_fp8(config) else 0,
        rollout_start=drafts if starts_in_fp8(config) and config.engine.mtp_steps else 0,
        export_fp8=fp8 if evaluates_fp8(config) else 0,
        trained_weights=trained_weights,
        training_checkpoint=trained_weights + OPTIMIZER_STATE_BYTES * (num_parameters - frozen),
        num_training_checkpoints=config.trainer.keep_checkpoints + 1,
        hf_export=hf,
        node_local_bytes=node_copy(config, config.stage.copy).node_bytes,
        kept_routes=stored_routes_bytes(config, ASSUMPTIONS),
    )
