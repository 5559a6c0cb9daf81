"""The nodes that a site's launcher gives to training."""

from __future__ import annotations

import os
from pathlib import Path

from posttrain.cluster.jobset import NODE_RANK, NUM_NODES
from posttrain.cluster.nodes import Allocation, ThisMachine
from posttrain.cluster.pods import Pods
from posttrain.cluster.slurm import SlurmAllocation
from posttrain.config.schema import Config


def find_nodes(config: Config, run_folder: Path) -> Allocation:
    """Return the nodes that this process may train on.

    Args:
        config: The resolved configuration.
        run_folder: `train/` of the run.

    Raises:
        RuntimeError: The scheduler does not know the job that this process runs in, or the job has other nodes than the
            configuration.
    """
    if config.site.launcher == "slurm":
        return SlurmAllocation.of_this_job(config, run_folder)
    if config.site.launcher == "kubernetes":
        _check_num_pods(config)
        if config.nodes > 1:
            return Pods(config, rendezvous_path(run_folder))
    # Its first name where the site gives several, which are then folders of one machine.
    return ThisMachine(config.site.node_names[0] if config.site.node_names else "this_node")


def is_waiting_pod() -> bool:
    """Return whether this process runs in a pod of a gang that is not its head."""
    return int(os.environ.get(NODE_RANK, "0")) > 0


def rendezvous_path(run_folder: Path) -> Path:
    """Return where the head of a gang of pods says how to reach it."""
    return run_folder / "lease" / "rendezvous.json"


def _check_num_pods(config: Config) -> None:
    """Raise where the configuration was changed under a JobSet that lives on."""
    pods = os.environ.get(NUM_NODES, "no")
    if pods != str(config.nodes):
        raise RuntimeError(
            f"nodes={config.nodes}, but this gang has {pods} pods; delete its JobSet, then run the same command again"
        )
