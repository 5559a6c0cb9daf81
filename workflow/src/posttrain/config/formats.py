"""The sections `quantize`, `serving` and `export`: number formats of engines and serving checkpoints, and exports."""

from __future__ import annotations

from dataclasses import dataclass, field

from posttrain.config.calibration import CalibrationPass
from posttrain.document import _doc

# Side of the blocks that share a scale in the Hub's FP8 checkpoints (`weight_block_size`).
FP8_BLOCK = 128
# Values per scale in NVFP4.
NVFP4_GROUP = 16


@dataclass(frozen=True)
class Quantize:
    """Quantisation to FP8, and the modules that keep their precision in every format."""

    strategy: str = _doc(
        "Unit of a scale: a block of 128x128, a channel (a row), or the whole tensor",
        choices=("block", "channel", "tensor"),
    )
    scale: str = _doc(
        "Scales: any FP32 number, or powers of two (UE8M0; blocks only)", choices=("fp32", "power_of_two")
    )
    keep_first_layers: int = _doc("Leading decoder layers that keep their precision", minimum=0)
    keep_last_layers: int = _doc("Trailing decoder layers that keep their precision", minimum=0)
    keep_modules: list[str] = _doc("Regular expressions; a module whose name matches one keeps its precision")


@dataclass(frozen=True)
class Serving:
    """A quantised checkpoint for serving, made on demand by `snakemake finalize_serving`; training does not use it."""

    format: str = _doc(
        "nvfp4: experts in 4 bits as NVIDIA Model Optimizer exports them; mxfp8; int4: experts in groups of 128",
        "nvfp4",
        choices=("nvfp4", "mxfp8", "int4"),
    )
    weights: str = _doc(
        "model: the model as it came; trained: what the run has exported, for which it is trained if it is not yet",
        "model",
        choices=("model", "trained"),
    )
    passes: dict[str, CalibrationPass] = field(
        default_factory=dict,
        metadata={"doc": "What the model reads to find the largest activations (nvfp4), by names of your own"},
    )
    samples_per_shard: int = _doc(
        "Conversations after which a calibration has a durable state, from which it goes on after a kill", 32, minimum=1
    )
    calibration: list[str] = _doc(
        "Files of largest magnitudes, one per calibration pass, merged by maximum, in the place of `passes` (nvfp4)",
        [],
    )
    uncalibrated: bool = _doc(
        "Activations are quantised by an `input_scale` of 1 that nobody has measured: no pass is read (nvfp4)", False
    )


@dataclass(frozen=True)
class Export:
    """What becomes a checkpoint in Hub layout."""

    checkpoint_folder: str = _doc(
        "A checkpoint of this model trained by slime, miles or Megatron-LM, to export instead of a run "
        "of ours; nothing is trained",
        "",
    )
    check: str = _doc(
        "Check of an export before it is evaluated: transformers loads it in FP32 on one node and must "
        "reproduce the trainer's recorded log-probabilities. auto: whole if it fits the node's host "
        "memory, else layers; whole; layers: one decoder layer in memory at a time; off: no check, as "
        "receipt and report then state",
        "auto",
        choices=("auto", "whole", "layers", "off"),
    )
