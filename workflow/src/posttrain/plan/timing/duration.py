"""Durations of the rules: file transfers, from assumed bandwidths, and training.

A transfer is limited by its slowest part: the connection to the Hub, total shared storage, the concurrent jobs, or a
node's local disk. Training and evaluation come from `step_time`. Start-up and queue times are not modelled.
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
        hub: From the Hub: a well-used 10 Gbit/s connection.
        shared_storage: Total of shared storage, reads and writes together.
        job: Throughput of one conversion, quantisation or export check, with reading, hashing and writing.
        node_disk: Writing to one node's local disk, including hashing.
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
        rates: Assumed rates of connections and disks.
        jobs_at_once: Number of concurrent parts of a rule; None means all, which also gives the duration of one part.

    Example:
        GLM-5 at 1 GB/s from the Hub: 1,507.7 s to download.
    """
    parts = config.convert.num_parts
    turns = math.ceil(parts / (jobs_at_once or parts))
    # Files from a folder are linked and hashed; no bandwidth here applies.
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
    """Return the duration of staging on all nodes concurrently, limited by shared storage or by a node's disk."""
    return max(copy.node_bytes / rates.node_disk, copy.shared_read_bytes / rates.shared_storage)


def _side_by_side(moved_bytes: int, num_jobs: int, turns: int, rates: Bandwidths) -> float:
    return max(turns * moved_bytes / (num_jobs * rates.job), moved_bytes / rates.shared_storage)
