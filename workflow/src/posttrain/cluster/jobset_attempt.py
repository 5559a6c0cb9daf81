"""Creates a step's JobSet, or attaches to it, and follows it to its end; never touches any other JobSet.

The name identifies the step and the run. A driver that finds the JobSet running follows it, so a restarted or second
driver never starts a second training. A driver that dies leaves the JobSet running; Ctrl-C deletes it.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from posttrain.cluster.cluster import Cluster
from posttrain.cluster.jobset import CONTAINER, OWNER, OWNER_LABEL, QUEUE_LABEL, RUN_ANNOTATION

log = logging.getLogger(__name__)

COMPLETED, FAILED = "Completed", "Failed"


def run_to_end(cluster: Cluster, manifest: dict[str, Any]) -> None:
    """Create the JobSet, or attach to the running one, and wait until it ends.

    Args:
        cluster: Client of the JobSet's namespace.
        manifest: From `jobset.render`.

    Raises:
        RuntimeError: The JobSet failed (with the first failed pod and its log's end), was deleted, runs with other
            settings, or has an owner other than this run.
    """
    name = manifest["metadata"]["name"]
    try:
        _start(cluster, manifest)
        _follow(cluster, name)
    except KeyboardInterrupt:
        found = cluster.read(name)
        if found is not None:
            # Ctrl-C may come before the owner is checked.
            _check_ours(found, manifest)
            log.warning("deleting JobSet %s", name)
            cluster.delete(found)
        raise


def _start(cluster: Cluster, manifest: dict[str, Any]) -> None:
    """Create the JobSet unless one of this name is running; delete one that has ended."""
    name, found = manifest["metadata"]["name"], cluster.read(manifest["metadata"]["name"])
    if found is not None:
        _check_ours(found, manifest)
        if _end(found) is None and "deletionTimestamp" not in found["metadata"]:
            if (_command(found), _num_nodes(found)) != (_command(manifest), _num_nodes(manifest)):
                raise RuntimeError(
                    f"JobSet {name} runs with other settings than these; let the command that started it follow it to "
                    f"its end, or delete it: kubectl delete jobset {name}"
                )
            log.info("JobSet %s runs already, with %d nodes; following it", name, _num_nodes(found))
            return
        log.info("removing JobSet %s, which has ended", name)
        cluster.delete(found)
    if cluster.create(manifest):
        log.info("created JobSet %s with %d nodes", name, _num_nodes(manifest))
    else:
        _check_ours(cluster.read(name) or manifest, manifest)
        log.info("another driver was faster and created JobSet %s; following it", name)


def _follow(cluster: Cluster, name: str) -> None:
    told = ""
    while True:
        found = cluster.read(name)
        if found is None:
            raise RuntimeError(f"JobSet {name} was deleted; run again to resume from the newest checkpoint")
        end = _end(found)
        if end == COMPLETED:
            return
        pods = cluster.pods(name)
        if end == FAILED:
            raise RuntimeError(_describe_failure(cluster, found, pods))
        state = _describe(found, pods)
        if state != told:
            log.info("JobSet %s: %s", name, state)
            told = state
        time.sleep(cluster.pause_seconds)


def _check_ours(found: dict[str, Any], manifest: dict[str, Any]) -> None:
    metadata, mine = found["metadata"], manifest["metadata"]
    owner, run = metadata.get("labels", {}).get(OWNER_LABEL), metadata.get("annotations", {}).get(RUN_ANNOTATION)
    if (owner, run) != (OWNER, mine["annotations"][RUN_ANNOTATION]):
        raise RuntimeError(
            f"JobSet {mine['name']} in namespace {mine['namespace']} belongs to {owner or 'somebody else'} "
            f"({run or 'no run of ours'}), not to {mine['annotations'][RUN_ANNOTATION]}; it is left alone"
        )


def _end(jobset: dict[str, Any]) -> str | None:
    """Return how a JobSet ended, None if it has not."""
    conditions = jobset.get("status", {}).get("conditions", [])
    ended = [one["type"] for one in conditions if one["type"] in (COMPLETED, FAILED) and one["status"] == "True"]
    return ended[0] if ended else None


def _num_nodes(jobset: dict[str, Any]) -> int:
    return jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["completions"]


def _command(jobset: dict[str, Any]) -> list[str]:
    return jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]["command"]


def _describe(jobset: dict[str, Any], pods: list[Any]) -> str:
    """Return a short description of a JobSet's state."""
    if jobset["spec"].get("suspend"):
        queue = jobset["metadata"].get("labels", {}).get(QUEUE_LABEL)
        return f"waits in Kueue's queue {queue}" if queue else "is suspended"
    running = sum(pod.status.phase == "Running" for pod in pods)
    restarts = jobset.get("status", {}).get("restarts", 0)
    parts = [f"{running} of {_num_nodes(jobset)} pods run", *([f"restarted {restarts} times"] if restarts else [])]
    return "; ".join([*parts, *[why for pod in pods if (why := _waits_for(pod))][:1]])


def _waits_for(pod: Any) -> str | None:
    """Return Kubernetes' reason why a pod does not run yet, if it gives one."""
    for container in pod.status.container_statuses or []:
        if container.state.waiting and container.state.waiting.reason != "ContainerCreating":
            waiting = container.state.waiting
            return f"{pod.metadata.name}: {waiting.reason}{f' ({waiting.message})' if waiting.message else ''}"
    for condition in pod.status.conditions or []:
        if condition.type == "PodScheduled" and condition.status == "False":
            return f"{pod.metadata.name}: {condition.reason} ({condition.message})"
    return None


def _describe_failure(cluster: Cluster, jobset: dict[str, Any], pods: list[Any]) -> str:
    """Return why a JobSet failed: its message, the first failed pod, and the end of that pod's log."""
    name = jobset["metadata"]["name"]
    said = next(one.get("message", "") for one in jobset["status"]["conditions"] if one["type"] == FAILED)
    failed = sorted((found for pod in pods if (found := _exit_of(pod))), key=lambda pair: pair[0].finished_at)
    if not failed:
        return f"JobSet {name} failed: {said}; no pod is left that says why"
    how, pod = failed[0]
    others = f" ({len(failed) - 1} more pods failed after it)" if len(failed) > 1 else ""
    return (
        f"JobSet {name} failed: {said}\n  pod {pod.metadata.name} on node {pod.spec.node_name} ended with exit code "
        f"{how.exit_code} ({how.reason}){others}; its log ends with:\n{cluster.log_tail(pod.metadata.name)}"
    )


def _exit_of(pod: Any) -> tuple[Any, Any] | None:
    """Return (supervisor's terminated state, pod) of a failed pod, else None."""
    for container in pod.status.container_statuses or []:
        state = container.state.terminated
        if container.name == CONTAINER and state is not None and state.exit_code != 0:
            return state, pod
    return None
