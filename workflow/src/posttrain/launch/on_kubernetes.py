"""Run a rule's command on the nodes of a cluster: `python -m posttrain.launch.on_kubernetes ... -- python ...`.

It applies the run's JobSet, or finds it, and ends when it ends. The rule's command stands behind `--`, and each pod
runs it as it is.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from posttrain import cli
from posttrain.config.load import load_resolved
from posttrain.errors import raise_if_any
from posttrain.launch.cluster import PAUSE_SECONDS, Cluster
from posttrain.launch.container import CLONE
from posttrain.launch.gang_of_pods import run_to_end
from posttrain.launch.jobset import check_mounted, render
from posttrain.observability.logging import LOG_VARIABLE


def main() -> None:
    """Apply the JobSet and follow it to its end."""
    arguments = parse_arguments()
    config = load_resolved(arguments.config)
    folders = {Path.cwd(), CLONE}
    raise_if_any([problem for folder in sorted(folders) for problem in check_mounted(folder, config)])
    log_path = Path(os.environ[LOG_VARIABLE])
    run_to_end(
        Cluster(config.site.kubernetes.namespace, arguments.pause_seconds),
        render(config, arguments.run_folder, arguments.command, log_path),
    )


def parse_arguments() -> argparse.Namespace:
    """Read the command line that the rule writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="config.resolved.yaml")
    parser.add_argument("--run-folder", type=Path, required=True, help="results/{run}")
    parser.add_argument("--pause-seconds", type=float, default=PAUSE_SECONDS, help="between two looks at the JobSet")
    parser.add_argument("command", nargs="+", help="what each pod runs")
    return parser.parse_args()


if __name__ == "__main__":
    cli.run(main)
