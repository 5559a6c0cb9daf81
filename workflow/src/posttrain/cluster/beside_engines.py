"""Run a rule's command with engines on several nodes: `python -m posttrain.cluster.beside_engines ... -- python ...`.

It runs on the job's first node, starts the engines on all nodes, and passes their URLs to the command after `--` in its
environment. When the command or an engine ends, everything ends. In a pod other than the first it executes the first
pod's requests.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
from pathlib import Path

from posttrain import cli
from posttrain.cluster.oneshot_job import OneshotJob
from posttrain.cluster.site import is_waiting_pod, rendezvous_path
from posttrain.cluster.worker_pod import lend_this_pod
from posttrain.config.load import Resolved
from posttrain.plan.sizing.evaluation import serving_config
from posttrain.plan.sizing.precisions import precision_config


def main() -> None:
    """Start the engines, run the command, and exit with its code."""
    arguments = parse_arguments()
    folder = arguments.folder
    if is_waiting_pod():
        lend_this_pod(rendezvous_path(folder))
        return
    served = job_of(arguments.resolved, arguments.precision)
    # Left by an earlier attempt.
    shutil.rmtree(folder, ignore_errors=True)
    with OneshotJob.of_this_job(served, folder) as job:
        code = job.run_beside_engines(arguments.checkpoint, arguments.command)
    sys.exit(code)


def job_of(resolved: Resolved, precision: str = "") -> Resolved:
    """Return the configuration of the engines' job, which has only the engines' nodes and no spare ones.

    Args:
        resolved: The run's configuration.
        precision: Which of the compared precisions to serve; empty: the precision of evaluations.
    """
    config = serving_config(precision_config(resolved.config, precision) if precision else resolved.config)
    slurm = dataclasses.replace(config.site.slurm, spare_nodes=0)
    site = dataclasses.replace(config.site, slurm=slurm)
    return dataclasses.replace(resolved, config=dataclasses.replace(config, site=site))


def parse_arguments() -> argparse.Namespace:
    """Parse the command line that the rule writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    cli.add_option(parser, "resolved", cli.RESOLVED)
    cli.add_option(parser, "checkpoint", (Path, "checkpoint in Hub layout, seen by all nodes"))
    cli.add_option(parser, "folder", (Path, "of this job alone; gets the engines' logs"))
    cli.add_option(parser, "precision", {"default": "", "help": "that is compared; by default the one of evaluations"})
    parser.add_argument("command", nargs="+", help="what asks the engines, and is told where they are")
    return parser.parse_args()


if __name__ == "__main__":
    cli.run(main)
