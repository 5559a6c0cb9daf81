"""Check the nodes of a training job, spare nodes included, as training does before it begins, without training."""

from __future__ import annotations

from posttrain.cluster.inspection import describe_unfit
from posttrain.cluster.preflight import look_at_nodes
from posttrain.cluster.site import find_nodes
from posttrain.config.site_rules import check_preflight
from posttrain.errors import raise_if_any
from posttrain.plan.preflight.report import print_findings
from posttrain.store import Paths


def main(paths: Paths) -> None:
    """Show and store the results; fail with the unfit nodes, their faults, and how to exclude them."""
    config = paths.resolved.config
    raise_if_any(list(check_preflight(config)))
    found = look_at_nodes(paths, find_nodes(config, paths.train))
    print_findings(found.findings())
    print(f"preflight: {paths.preflight.resolve()}", flush=True)
    if found.unfit:
        num_nodes = len(found.fit) + len(found.unfit)
        raise RuntimeError(f"{len(found.unfit)} of {num_nodes} nodes are {describe_unfit(found.unfit, config)}")
