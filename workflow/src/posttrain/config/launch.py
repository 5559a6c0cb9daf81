"""The sections `launch` and `site.slurm`: how training is watched, and what a SLURM job asks for."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.document import _doc


@dataclass(frozen=True)
class Launch:
    """The watch over a training job."""

    max_idle_attempts: int = _doc(
        "Attempts in a row without a new checkpoint or rollout, then training ends", 3, minimum=1
    )
    node_start_timeout_seconds: float = _doc(
        "Every node's supervisor must report within this", 300.0, exclusive_minimum=0
    )
    node_silence_seconds: float = _doc("A node that is silent for this long counts as lost", 30.0, exclusive_minimum=0)
    hang_timeout_seconds: float = _doc(
        "Ranks that stay in one phase of a step this long after another rank has left it hang, and so does a step in "
        "which no rank moves for this long outside of the rollout: they are named and ended",
        1800.0,
        exclusive_minimum=0,
    )
    preflight: bool = _doc(
        "Before nodes train for the first time in a job, look at their GPUs, disks, clocks, versions and links: a "
        "spare node takes the place of one that is unfit. A single node without GPUs is not looked at",
        True,
    )
    preflight_timeout_seconds: float = _doc(
        "A node that has not answered after this is unfit", 120.0, exclusive_minimum=0
    )
    preflight_min_share: float = _doc(
        "A node whose disk, processor or network reaches less than this share of the median of all nodes is unfit; 0: "
        "any rate will do",
        0.25,
        minimum=0,
        maximum=1,
    )


@dataclass(frozen=True)
class Slurm:
    """What jobs ask SLURM for; training's own share of it where it says so. Empty: SLURM's default."""

    partition: str = _doc("Partition", "")
    account: str = _doc("Account", "")
    qos: str = _doc("Quality of service", "")
    constraint: str = _doc("Features that nodes must have", "")
    time_limit: str = _doc("Time limit of training: `7d`, `36h`, `90m`", "7d")
    gpu_option: str = _doc(
        "How training asks for the GPUs of each node; {gpus} is hardware.gpus_per_node. Not used on CPUs; empty where "
        "whole nodes come with their GPUs",
        "--gpus-per-node={gpus}",
    )
    exclusive: bool = _doc("Training takes whole nodes", True)
    cpus_per_node: int = _doc(
        "CPUs of each node that training asks for where it does not take whole nodes", 1, minimum=1
    )
    extra_options: list[str] = _doc("More words for training's sbatch: --reservation=..., --switches=1, ...", [])
    spare_nodes: int = _doc(
        "Nodes asked for beyond those that train on several: one of them takes a lost node's place", 0, minimum=0
    )
    refill_spares: bool = _doc(
        "Replace a spare node that was used up through the queue while training goes on; compute nodes have to be "
        "allowed to submit jobs",
        True,
    )
    requeue: bool = _doc(
        "The job may be put back into the queue, under the same id, after node loss or time limit", True
    )
    signal_seconds: int = _doc(
        "So long before the time limit at least training is told to save at the end of its step, and is requeued; "
        "sooner where the plan or the steps so far say that a step with its save takes longer",
        600,
        minimum=60,
    )
