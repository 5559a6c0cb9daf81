"""Chooses the allocation that belongs to a site's launcher."""

from __future__ import annotations

import os
from pathlib import Path

from posttrain.cluster.jobset import NODE_RANK, NUM_NODES
from posttrain.cluster.nodes import Allocation, ThisMachine
from posttrain.cluster.pods import Pods
from posttrain.cluster.slurm import SlurmAllocation
from posttrain.config.schema import Config


def find_nodes(config: Config, run_folder: Path) -> Allocation:
    """Return the allocation of nodes on which this process may train.

    Args:
        config: The resolved configuration.
        run_folder: `train/` of the run.

    Raises:
        RuntimeError: The scheduler does not know this process's job, or the job's number of nodes differs from the
            configuration's.
    """
    if config.site.launcher == "slurm":
        return SlurmAllocation.of_this_job(config, run_folder)
    if config.site.launcher == "kubernetes":
        _check_num_pods(config)
        if config.nodes > 1:
            return Pods(config, rendezvous_path(run_folder))
    # A site with several names runs on one machine, with a folder for each.
    return ThisMachine(config.site.node_names[0] if config.site.node_names else "this_node")


def is_waiting_pod() -> bool:
    """Return whether this process runs in a pod of a gang other than the head's."""
    return int(os.environ.get(NODE_RANK, "0")) > 0


def rendezvous_path(run_folder: Path) -> Path:
    """Return the path of the file with the head's address."""
    return run_folder / "lease" / "rendezvous.json"


def _check_num_pods(config: Config) -> None:
    """Raise if the JobSet was created with another number of nodes."""
    pods = os.environ.get(NUM_NODES, "no")
    if pods != str(config.nodes):
        raise RuntimeError(
            f"nodes={config.nodes}, but this gang has {pods} pods; delete its JobSet, then run the same command again"
        )
