"""How long the rules take: those that move bytes, from bandwidths that are stated and can be doubted, and training.

A rule that moves bytes is as slow as its slowest lane: the line to the Hub, shared storage as a whole, the jobs that
work side by side, a node's own disk. Training and evaluation come from `step_time`. Start-up times and queues are not
modelled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from posttrain.config.schema import Config
from posttrain.plan.sizing.export_check import export_check_way
from posttrain.plan.sizing.node_copy import NodeCopy, node_copy
from posttrain.plan.sizing.storage import Storage
from posttrain.plan.timing import step_time
from posttrain.plan.timing.calibration import calibration_seconds

NOT_MODELLED = (
    "durations: start of engines and trainer, waiting in a queue",
    *step_time.NOT_MODELLED,
)


@dataclass(frozen=True)
class Bandwidths:
    """Assumed rates, bytes per second.

    Args:
        hub: From the Hub: a 10 Gbit/s line, well used.
        shared_storage: Shared storage as a whole, reads and writes together.
        job: Throughput of one conversion, quantisation or check of an export, with reading, hashing and writing.
        node_disk: Writing to one node's own disk, hashing included.
    """

    hub: float = 1.0e9
    shared_storage: float = 20e9
    job: float = 0.7e9
    node_disk: float = 2.0e9


def durations_seconds(
    config: Config, needed: Storage, rates: Bandwidths, jobs_at_once: int | None = None
) -> dict[str, float]:
    """Return rule -> seconds, and with GPUs "step" and "step_{phase}" -> seconds of a training step.

    Args:
        config: The resolved configuration.
        needed: Bytes on disk.
        rates: What is assumed of lines and disks.
        jobs_at_once: Parts of a rule that run side by side; None: all, which is also how long one part takes.

    Example:
        GLM-5 at 1 GB/s from the Hub: 1,507.7 s to download.
    """
    parts = config.convert.num_parts
    turns = math.ceil(parts / (jobs_at_once or parts))
    # Files of a folder are linked and hashed, which no bandwidth here tells.
    seconds = {"download_hf_checkpoint": needed.hf / rates.hub} if config.model.source.kind == "hub" else {}
    seconds |= {
        "convert_hf_to_torch_dist": _side_by_side(needed.hf + needed.torch_dist, parts, turns, rates),
        "export_hf": _side_by_side(needed.trained_weights + needed.hf_export, parts, turns, rates),
    }
    if export_check_way(config) != "off":
        seconds["check_export"] = needed.hf_export / rates.job
    if config.stage.copy != "nothing":
        seconds["stage_to_node_local"] = stage_seconds(node_copy(config, config.stage.copy), rates)
    for name, size in {"quantize": needed.rollout_fp8, "quantize after": needed.export_fp8}.items():
        if size:
            seconds[name] = _side_by_side(needed.hf + size, parts, turns, rates)
    if needed.rollout_start:  # about half of the layers that are read
        seconds["quantize start"] = 3 * needed.rollout_start / rates.job
    if calibrates := calibration_seconds(config, rates.shared_storage):
        seconds["calibrate"] = calibrates
    moved = {rule: round(value, 3) for rule, value in seconds.items()}
    return {**moved, **step_time.step_durations(config, rates.shared_storage)}


def stage_seconds(copy: NodeCopy, rates: Bandwidths) -> float:
    """Return how long all nodes take side by side: as long as shared storage gives, or a node's disk takes."""
    return max(copy.node_bytes / rates.node_disk, copy.shared_read_bytes / rates.shared_storage)


def _side_by_side(moved_bytes: int, num_jobs: int, turns: int, rates: Bandwidths) -> float:
    return max(turns * moved_bytes / (num_jobs * rates.job), moved_bytes / rates.shared_storage)
