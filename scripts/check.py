"""Check what must be there before work starts: disks, devices, interpreters, ports, the Hub, a cluster."""

from __future__ import annotations

import argparse
from pathlib import Path

from posttrain.artifacts import Paths, write_json
from posttrain.cli import add_configuration, run
from posttrain.launch.cluster_check import check_cluster
from posttrain.preflight.checks import check_everything
from posttrain.preflight.report import print_findings, raise_problems


def main() -> None:
    """Run every check, show the findings, fail with all problems at once."""
    arguments = parse_arguments()
    paths = Paths(arguments.resolved)
    findings = [*check_everything(paths), *check_cluster(paths.resolved.config)]
    print_findings(findings)
    raise_problems(findings)
    if arguments.output:
        write_json(arguments.output, {"checks": [finding.as_dict() for finding in findings]})


def parse_arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_configuration(parser)
    parser.add_argument("--output", type=Path, help="JSON with the findings, written when all is well")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
