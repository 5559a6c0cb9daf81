"""Run a rule's command on the nodes of a cluster: `python -m posttrain.cluster.on_kubernetes ... -- python ...`.

It creates the step's JobSet, or attaches to it, and ends when the JobSet ends. Each pod runs the rule's command, the
words after `--`, unchanged.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from posttrain import cli
from posttrain.cluster.cluster import PAUSE_SECONDS, Cluster
from posttrain.cluster.container import CLONE
from posttrain.cluster.jobset import check_mounted, render
from posttrain.cluster.jobset_attempt import run_to_end
from posttrain.errors import raise_if_any
from posttrain.report.logging import LOG_VARIABLE
from posttrain.store import Paths


def main() -> None:
    """Apply the JobSet and follow it to its end."""
    arguments = parse_arguments()
    resolved = arguments.resolved
    config, run_folder = resolved.config, Paths(resolved).run
    raise_if_any([problem for folder in sorted({Path.cwd(), CLONE}) for problem in check_mounted(folder, config)])
    manifest = render(config, run_folder, Path(os.environ[LOG_VARIABLE]), arguments.command, arguments.num_nodes)
    run_to_end(Cluster(config.site.kubernetes.namespace, arguments.pause_seconds), manifest)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line that the rule writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    cli.add_option(parser, "resolved", cli.RESOLVED)
    parser.add_argument("--num-nodes", type=int, required=True, help="pods")
    parser.add_argument("--pause-seconds", type=float, default=PAUSE_SECONDS, help="between two looks at the JobSet")
    parser.add_argument("command", nargs="+", help="what each pod runs")
    return parser.parse_args()


if __name__ == "__main__":
    cli.run(main)
