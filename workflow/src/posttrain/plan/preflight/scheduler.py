"""Requirements of the site's scheduler: its programs, its partition, enough nodes, and the executor."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess

from posttrain.config.schema import Config
from posttrain.plan.job_needs import job_needs
from posttrain.plan.preflight.report import Finding, failed, ok, skipped

PROGRAMS = ("sbatch", "srun", "squeue", "scontrol", "sinfo")
EXECUTOR = "snakemake_executor_plugin_slurm"
# A controller that does not answer for this long starts no jobs either.
QUERY_SECONDS = 60.0


def check_scheduler(config: Config) -> list[Finding]:
    """Check that training can be submitted from this machine."""
    if config.site.launcher != "slurm":
        return [skipped("site.launcher", f"{config.site.launcher}: nothing is submitted")]
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        remedy = "run on a login node of the cluster, or choose another site"
        allowed = "SLURM's programs"
        return [
            failed(
                "program-missing",
                "site.launcher",
                "site.launcher",
                f"slurm; missing: {', '.join(missing)}",
                allowed,
                remedy,
            )
        ]
    return [_check_executor(), _check_partition(config)]


def _check_executor() -> Finding:
    if importlib.util.find_spec(EXECUTOR):
        return ok("executor", f"{EXECUTOR} is installed")
    remedy = "pip install 'posttrain[slurm]'"
    return failed("package-missing", "executor", "site.launcher", "slurm", f"{EXECUTOR}, to submit jobs", remedy)


def _check_partition(config: Config) -> Finding:
    """Check that the partition exists and has enough nodes, including busy and down ones."""
    slurm, key = config.site.slurm, "site.slurm.partition"
    chosen = ["--partition", slurm.partition] if slurm.partition else []
    command = ["sinfo", "--noheader", "--format", "%R %D", *chosen]
    done = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_SECONDS, check=False)
    if done.returncode:
        return failed(
            "slurm-unreachable", key, key, done.stderr.strip(), "a SLURM that answers", "see whether `sinfo` works here"
        )
    sizes: dict[str, int] = {}
    for line in done.stdout.splitlines():
        name, _, count = line.rpartition(" ")
        sizes[name] = sizes.get(name, 0) + int(count)
    wanted, name = job_needs(config, "train").nodes, slurm.partition or "the default"
    if not sizes:
        return failed(
            "no-such-partition", key, key, repr(slurm.partition), "a partition that SLURM knows", "`sinfo` lists them"
        )
    if max(sizes.values()) < wanted:
        found = f"{max(sizes.values())} nodes in {name}"
        remedy = "fewer nodes or spare nodes, or another partition"
        return failed(
            "partition-too-small", key, key, found, f"at least {wanted} (nodes and site.slurm.spare_nodes)", remedy
        )
    return ok(key, f"{name}: {max(sizes.values())} nodes, {wanted} wanted")
