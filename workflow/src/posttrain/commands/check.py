"""Check what must be there before work starts: disks, devices, interpreters, ports, the Hub, a cluster."""

from __future__ import annotations

from pathlib import Path

from posttrain.artifacts import Paths, write_json
from posttrain.launch.cluster_check import check_cluster
from posttrain.preflight.checks import check_everything
from posttrain.preflight.refusals import refuse_unfit
from posttrain.preflight.report import print_findings, raise_problems
from posttrain.reward.address_check import check_addresses


def main(paths: Paths, output: Path | None) -> None:
    """Run every check, show the findings, fail with all problems at once; write `output` when all is well."""
    refuse_unfit(paths)
    config = paths.resolved.config
    findings = [*check_everything(paths), *check_addresses(config), *check_cluster(config)]
    print_findings(findings)
    raise_problems(findings)
    if output:
        write_json(output, {"checks": [finding.as_dict() for finding in findings]})
