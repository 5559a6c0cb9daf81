"""Checks of a Kubernetes cluster before a gang is queued there."""

from __future__ import annotations

from pathlib import Path

from posttrain.cluster.cluster import Cluster
from posttrain.cluster.container import CLONE
from posttrain.cluster.jobset import GROUP, PLURAL, VERSION, check_mounted
from posttrain.config.schema import Config
from posttrain.errors import ConfigError
from posttrain.plan.preflight.report import Finding, failed, ok, skipped

# (verb, API group, resource): the rights that following a gang requires.
RIGHTS = (
    *((verb, GROUP, PLURAL) for verb in ("get", "create", "delete")),
    ("list", "", "pods"),
    ("get", "", "pods/log"),
)


def check_cluster(config: Config, timeout_seconds: float = 30.0) -> list[Finding]:
    """Check that the cluster is reachable, serves JobSets, and lets us create them; skipped for other launchers.

    Args:
        config: The resolved configuration.
        timeout_seconds: A cluster that does not answer for this long is unreachable.
    """
    if config.site.launcher != "kubernetes":
        return [skipped("cluster", f"site.launcher is {config.site.launcher}")]
    folders = [problem for folder in sorted({Path.cwd(), CLONE}) for problem in check_mounted(folder, config)]
    findings = [Finding("volumes", problem.value, problem) for problem in folders]
    try:
        cluster = Cluster(config.site.kubernetes.namespace, timeout_seconds=timeout_seconds)
        return [*findings, _check_jobsets(cluster), _check_rights(cluster, config.site.kubernetes.namespace)]
    except ConfigError as error:
        return [*findings, *(Finding("cluster", problem.value, problem) for problem in error.problems)]
    except RuntimeError as error:
        remedy = "check KUBECONFIG and the network"
        return [*findings, failed("no-cluster", "cluster", "KUBECONFIG", str(error), "a cluster that answers", remedy)]


def _check_jobsets(cluster: Cluster) -> Finding:
    if cluster.has_jobsets():
        return ok("JobSet", f"{GROUP}/{VERSION} is served")
    remedy = "let an administrator install it: https://jobset.sigs.k8s.io/docs/installation/"
    allowed = f"a cluster with {GROUP}/{VERSION}"
    return failed("jobset-missing", "JobSet", "site.launcher", "kubernetes without JobSet", allowed, remedy)


def _check_rights(cluster: Cluster, namespace: str) -> Finding:
    missing = [
        f"{verb} {resource}" for verb, group, resource in RIGHTS if not cluster.is_allowed(verb, group, resource)
    ]
    if not missing:
        return ok("rights", f"JobSets and pods of namespace {namespace}")
    remedy = "docs/cluster.md has the role that is needed"
    found = f"{namespace}: no right to {', '.join(missing)}"
    return failed(
        "no-rights", "rights", "site.kubernetes.namespace", found, "get, create, delete and follow JobSets", remedy
    )
