"""The SLURM resources of jobs, for Snakemake's executor; computed in every dry run.

For the executor, a job on several nodes is an "MPI" job: its command runs once, on the first node, and starts its own
processes on the others. Topology is a resource, not a parameter: a change of it resumes the run.
"""

from __future__ import annotations

import functools
import logging
import os
import shlex
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from posttrain.cluster.slurm_query import job_is_alive, job_number
from posttrain.config.derived import nodes_with_spares
from posttrain.config.schema import Config, Site
from posttrain.plan.job_needs import job_needs
from posttrain.plan.sizing.precisions import compared_precisions, precision_config
from posttrain.store.lease import living_holder

log = logging.getLogger(__name__)


def resources_of_all_jobs(site: Site) -> dict[str, str]:
    """Return the resources of every job of a site."""
    if site.launcher != "slurm":
        return {}
    asked = {"slurm_partition": site.slurm.partition, "slurm_account": site.slurm.account, "qos": site.slurm.qos}
    return {name: value for name, value in asked.items() if value}


def resources_of_training(config: Config, lease_folder: Path | None) -> dict[str, Any]:
    """Return the resources of the training job.

    Args:
        config: The resolved configuration.
        lease_folder: The run's lease. A new job waits in the queue for a job that holds it; None: it does not wait.
    """
    slurm, needs = config.site.slurm, job_needs(config, "train")
    if config.site.launcher != "slurm":
        return needs.resources
    count = needs.nodes
    return {
        **needs.resources,
        "mem_mb": 0,  # no --mem: the site's default for whole nodes
        **({"mpi": "srun", "tasks": count} if count > 1 else {}),
        **({"constraint": slurm.constraint} if slurm.constraint else {}),
        "slurm_extra": _extra(config, lease_folder),
    }


def resources_of_serving(config: Config) -> dict[str, Any]:
    """Return the resources of a job that serves a model."""
    return _resources_of_nodes(config, "evaluate")


def resources_of_precisions(config: Config) -> dict[str, Any]:
    """Return the resources of jobs that query the engines of one precision, which their wildcard `precision` names."""
    wanted = {
        precision: _resources_of_nodes(precision_config(config, precision), "ask_precision")
        for precision in compared_precisions(config)
    }
    # Jobs on one node are not "MPI" jobs.
    otherwise = {"mpi": "", "tasks": 1}

    def asked(name: str) -> Callable[..., Any]:
        return lambda wildcards: wanted[wildcards.precision].get(name, otherwise.get(name, ""))

    names = dict.fromkeys(name for resources in wanted.values() for name in resources)
    return {name: asked(name) for name in names}


def resources_of_comparison(config: Config) -> dict[str, Any]:
    """Return the resources of a job that compares precisions."""
    return _resources_of_nodes(config, "compare_precisions")


def resources_of_export_check(config: Config) -> dict[str, Any]:
    """Return the resources of a job that loads an export: memory of one node, no GPU."""
    needs = job_needs(config, "check_export")
    if config.site.launcher != "slurm" or not needs.memory_bytes:
        return needs.resources
    return {**needs.resources, "mem_mb": -(-needs.memory_bytes // 10**6)}


def resources_of_calibration(config: Config) -> dict[str, Any]:
    """Return the resources of a calibration job."""
    return _resources_of_nodes(config, "calibrate")


def _resources_of_nodes(config: Config, rule: str) -> dict[str, Any]:
    """Return a rule's resources: whole nodes, or those of an ordinary job for a single CPU node."""
    slurm, needs = config.site.slurm, job_needs(config, rule)
    if config.site.launcher != "slurm" or (not needs.gpus and needs.nodes == 1):
        return needs.resources
    return {
        **needs.resources,
        "mem_mb": 0,  # the site's default for whole nodes
        **({"mpi": "srun", "tasks": needs.nodes} if needs.nodes > 1 else {}),
        **({"constraint": slurm.constraint} if slurm.constraint else {}),
        "slurm_extra": shlex.join(_whole_nodes(config)),
    }


def options_of_spare(config: Config, excluded: Collection[str]) -> list[str]:
    """Return sbatch's options for one more node like those of training.

    Args:
        config: The resolved configuration.
        excluded: Nodes that it must not use.
    """
    word = "--exclude="
    options = options_of_nodes(config, 1)
    # sbatch uses only the last `--exclude`, so all are merged.
    out = [option[len(word) :] for option in options if option.startswith(word)]
    kept = [option for option in options if not option.startswith(word)]
    return [*kept, f"{word}{','.join([*out, *sorted(excluded)])}"]


def options_of_nodes(config: Config, count: int) -> list[str]:
    """Return sbatch's options for nodes like those of training, with one task on each."""
    slurm = config.site.slurm
    asked = {"partition": slurm.partition, "account": slurm.account, "qos": slurm.qos, "constraint": slurm.constraint}
    return [
        *(f"--nodes={count}", f"--ntasks={count}", f"--cpus-per-task={slurm.cpus_per_node}", "--no-requeue"),
        *(f"--{name}={value}" for name, value in asked.items() if value),
        *slurm.extra_options,
        *_whole_nodes(config),
    ]


def _whole_nodes(config: Config) -> list[str]:
    """Return the options that request nodes with all their GPUs."""
    slurm = config.site.slurm
    words = ["--exclusive"] if slurm.exclusive else []
    if config.hardware.device == "cuda" and slurm.gpu_option:
        words.append(slurm.gpu_option.format(gpus=config.hardware.gpus_per_node))
    return words


def _extra(config: Config, lease_folder: Path | None) -> Callable[..., str]:
    slurm = config.site.slurm
    words = ["--requeue" if slurm.requeue else "--no-requeue"]
    # SLURM does not restart a job that survives the loss of a node, so only a job with spare nodes may survive it.
    words += ["--no-kill"] if nodes_with_spares(config) > config.nodes else []
    words += slurm.extra_options
    words += _whole_nodes(config)

    def extra(wildcards: object) -> str:
        return shlex.join([*words, *(_dependency(lease_folder) if lease_folder else ())])

    return extra


@functools.cache
def _dependency(lease_folder: Path) -> tuple[str, ...]:
    """Make a new job wait for a running job that trains this run; it then trains the remaining steps."""
    holder = living_holder(lease_folder, job_is_alive=job_is_alive)
    if holder is None or not job_is_alive(holder.job) or job_number(holder.job) == os.environ.get("SLURM_JOB_ID"):
        return ()
    log.warning("%s is being trained by %s; a new job waits for its end", lease_folder.parent, holder)
    return (f"--dependency=afterany:{job_number(holder.job)}",)
