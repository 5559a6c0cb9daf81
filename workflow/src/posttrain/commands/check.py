"""Check what must be there before work starts: disks, devices, interpreters, ports, the Hub, a cluster."""

from __future__ import annotations

from pathlib import Path

from posttrain.cluster.cluster_check import check_cluster
from posttrain.plan.preflight.checks import check_everything
from posttrain.plan.preflight.refusals import refuse_unfit
from posttrain.plan.preflight.report import print_findings, raise_problems
from posttrain.rl.reward.address_check import check_addresses
from posttrain.store import Paths, write_json


def main(paths: Paths, output: Path | None) -> None:
    """Run every check, show the findings, fail with all problems at once; write `output` when all is well."""
    refuse_unfit(paths)
    config = paths.resolved.config
    findings = [*check_everything(paths), *check_addresses(config), *check_cluster(config)]
    print_findings(findings)
    raise_problems(findings)
    if output:
        write_json(output, {"checks": [finding.as_dict() for finding in findings]})
