"""The sections `launch` and `site.slurm`: supervision of training, and requests to SLURM."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.document import _doc


@dataclass(frozen=True)
class Launch:
    """Supervision of a training job."""

    max_idle_attempts: int = _doc(
        "Consecutive attempts without a new checkpoint or rollout after which training ends", 3, minimum=1
    )
    node_start_timeout_seconds: float = _doc(
        "Time limit for the report of every node's supervisor", 300.0, exclusive_minimum=0
    )
    node_silence_seconds: float = _doc("A node without a heartbeat for this long is lost", 30.0, exclusive_minimum=0)
    hang_timeout_seconds: float = _doc(
        "Ranks hang if they stay in a phase this long after another rank has left it, or if no rank "
        "moves for this long outside the rollout; they are named and ended",
        1800.0,
        exclusive_minimum=0,
    )
    preflight: bool = _doc(
        "Check GPUs, disks, clocks, versions and links of the nodes before they train for the first time "
        "in a job; a spare node replaces an unfit one. A single node without GPUs is not checked",
        True,
    )
    preflight_timeout_seconds: float = _doc(
        "Time limit of a node's check; then it is unfit", 120.0, exclusive_minimum=0
    )
    preflight_min_share: float = _doc(
        "A node is unfit if its disk, processor or network reaches less than this share of the median of "
        "all nodes; 0: no limit",
        0.25,
        minimum=0,
        maximum=1,
    )


@dataclass(frozen=True)
class Slurm:
    """Requests of jobs to SLURM; some keys apply to training only, as their text says. Empty: SLURM's default."""

    partition: str = _doc("Partition", "")
    account: str = _doc("Account", "")
    qos: str = _doc("Quality of service", "")
    constraint: str = _doc("Features that nodes must have", "")
    time_limit: str = _doc("Time limit of training: `7d`, `36h`, `90m`", "7d")
    gpu_option: str = _doc(
        "Option with which training requests the GPUs of each node; {gpus} is hardware.gpus_per_node. "
        "Not used on CPUs; empty if whole nodes include their GPUs",
        "--gpus-per-node={gpus}",
    )
    exclusive: bool = _doc("Training takes whole nodes", True)
    cpus_per_node: int = _doc("CPUs per node that training requests if it does not take whole nodes", 1, minimum=1)
    extra_options: list[str] = _doc("Additional options of training's sbatch: --reservation=..., --switches=1, ...", [])
    spare_nodes: int = _doc("Additional nodes of a multi-node training job, which replace lost nodes", 0, minimum=0)
    refill_spares: bool = _doc(
        "Request a new spare node through the queue when one was used; compute nodes must be allowed to submit jobs",
        True,
    )
    requeue: bool = _doc("Allow SLURM to requeue the job, under the same id, after a lost node or the time limit", True)
    signal_seconds: int = _doc(
        "Minimum time before the time limit at which training is told to save at the end of its step and "
        "is requeued; more if plan or measured steps say that a step with its save takes longer",
        600,
        minimum=60,
    )
