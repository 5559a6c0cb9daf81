"""The nodes that a site's launcher gives to training."""

from __future__ import annotations

from posttrain.config.schema import Config
from posttrain.launch.nodes import Nodes, ThisMachine
from posttrain.launch.slurm import SlurmAllocation


def find_nodes(config: Config) -> Nodes:
    """Return the nodes that this process may train on.

    Raises:
        RuntimeError: The scheduler does not know the job that this process runs in.
    """
    if config.site.launcher == "slurm":
        return SlurmAllocation.of_this_job(config)
    # Its first name where the site gives several, which are then folders of one machine.
    return ThisMachine(config.site.node_names[0] if config.site.node_names else "this_node")
