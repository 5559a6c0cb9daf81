"""Renders a gang as a Kubernetes JobSet: the manifest that is applied depends on nothing else.

One replicated job of N indexed pods, one pod per node, each with all GPUs of its node. A pod runs the same command as
the rule on a single machine, in Snakemake's folder. Its environment has:

| variable | value |
|---|---|
| `POSTTRAIN_NODE_RANK` | the pod's completion index |
| `POSTTRAIN_NUM_NODES` | N |
| `POSTTRAIN_NODE_NAME` | the node that it runs on |
| `POSTTRAIN_POD_ADDRESS` | its IP address, or its node's on the host network |

Restarts:

- The first pod is the gang's head. Exit code 1 means that it reported an error that a restart would not fix: the JobSet
  fails at once. The other pods exit with 0 when they lose the head.
- After a pod is evicted, killed for memory or lost with its node, the head exits with 75, and JobSet restarts all pods,
  at most `max_restarts` times. It creates the new pods only when the old ones are gone.

Sources: JobSet's API v1alpha2 (https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/), its failure policy
(https://jobset.sigs.k8s.io/docs/tasks/failure_policy/), Kueue's queue label
(https://kueue.sigs.k8s.io/docs/tasks/run/jobsets/), the pod failure policy of a Job
(https://kubernetes.io/docs/tasks/job/pod-failure-policy/).
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.cluster.container import CODE
from posttrain.config.load import digest8
from posttrain.config.schema import Config
from posttrain.errors import Problem
from posttrain.report.logging import LOG_VARIABLE
from posttrain.store.format_versions import CURRENT_RULES

GROUP, VERSION, PLURAL = "jobset.x-k8s.io", "v1alpha2", "jobsets"
NODE_RANK, NUM_NODES = "POSTTRAIN_NODE_RANK", "POSTTRAIN_NUM_NODES"
NODE_NAME, POD_ADDRESS = "POSTTRAIN_NODE_NAME", "POSTTRAIN_POD_ADDRESS"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
OWNER_LABEL, OWNER = "app.kubernetes.io/managed-by", "posttrain"
RUN_ANNOTATION = "posttrain/run-folder"
JOB, CONTAINER = "nodes", "supervisor"
# Exit code of `posttrain.cli` after an error with a remedy: a restart would fail in the same way.
EXIT_OF_A_REFUSAL = 1
# With any other code all pods restart. This one is sysexits.h's EX_TEMPFAIL.
EXIT_TO_START_AGAIN = 75
# Kubernetes keeps a finished JobSet and its pods' logs this long.
KEPT_SECONDS = 24 * 3600
# A pod's name is `{JobSet}-nodes-0-{index}-{5 letters}`, at most 63 characters long.
_LONGEST_NAME = 63 - len(f"-{JOB}-0-9999-abcde")


def jobset_name(run_folder: Path, log_path: Path) -> str:
    """Return the name of a step's JobSet: the same for every driver that starts this step of this run.

    Args:
        run_folder: Distinguishes runs of the same name.
        log_path: `logs/{rule}/{run}.log`, or `logs/{rule}/{run}.{part}.log`: distinguishes the steps of a run.

    Example:
        `logs/train/glm5-1a2b3c4d.log` gives `glm5-1a2b3c4d-train-grpo-` and 8 digits of a digest.
    """
    former = {rule: step for step, rule in CURRENT_RULES.items()}
    step = f"{log_path.stem}-{former.get(log_path.parent.name, log_path.parent.name)}"
    digest = digest8([os.path.abspath(run_folder), step])
    words = re.sub(r"[^a-z0-9]+", "-", step.lower())
    return f"{words[: _LONGEST_NAME - 1 - len(digest)].rstrip('-')}-{digest}"


def check_mounted(folder: Path, config: Config) -> list[Problem]:
    """Return a problem if the pods do not mount a folder."""
    volumes = config.site.kubernetes.volumes
    if any(folder.is_relative_to(volume.partition("=")[0]) for volume in volumes):
        return []
    remedy = "run Snakemake from a folder on a volume that the pods mount at the same path"
    allowed = f"one that holds {folder}"
    return [Problem("folder-not-mounted", "site.kubernetes.volumes", ", ".join(volumes) or "none", allowed, remedy)]


def render(config: Config, run_folder: Path, log_path: Path, command: Sequence[str], num_nodes: int) -> dict[str, Any]:
    """Return the JobSet of a step as plain types.

    Args:
        config: The resolved configuration.
        run_folder: The run that owns the JobSet.
        log_path: The rule's log; each node writes a log in the same folder.
        command: The pod's command, as words; the first is looked up in the image's PATH.
        num_nodes: Number of pods.
    """
    kubernetes, name = config.site.kubernetes, jobset_name(run_folder, log_path)
    pod = _pod(config, command, _environment(config, log_path, num_nodes))
    labels = {OWNER_LABEL: OWNER} | ({QUEUE_LABEL: kubernetes.queue} if kubernetes.queue else {})
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "JobSet",
        "metadata": {
            "name": name,
            "namespace": kubernetes.namespace,
            "labels": labels,
            "annotations": {RUN_ANNOTATION: os.path.abspath(run_folder)},
        },
        "spec": {
            "successPolicy": {"operator": "All"},
            "ttlSecondsAfterFinished": KEPT_SECONDS,
            "failurePolicy": {
                "maxRestarts": kubernetes.max_restarts,
                "rules": [
                    {"name": "refusal", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
                ],
            },
            "replicatedJobs": [{"name": JOB, "replicas": 1, "template": {"spec": _job(config, pod, num_nodes)}}],
        },
    }


def _job(config: Config, pod: dict[str, Any], num_nodes: int) -> dict[str, Any]:
    annotations = _pairs(config.site.kubernetes.annotations)
    metadata = {"labels": {OWNER_LABEL: OWNER}} | ({"annotations": annotations} if annotations else {})
    return {
        "completionMode": "Indexed",
        "completions": num_nodes,
        "parallelism": num_nodes,
        # A gang needs every pod: losing one fails the job, and JobSet restarts all pods.
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {"action": "Count", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [EXIT_OF_A_REFUSAL]},
                },
            ]
        },
        "template": {"metadata": metadata, "spec": pod},
    }


def _pod(config: Config, command: Sequence[str], environment: list[dict[str, Any]]) -> dict[str, Any]:
    kubernetes = config.site.kubernetes
    volumes = [volume.partition("=")[::2] for volume in kubernetes.volumes]
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": kubernetes.grace_seconds,
        # Process 1 would ignore SIGTERM, so an evicted pod would train on until it is killed.
        "shareProcessNamespace": True,
        "containers": [
            {
                "name": CONTAINER,
                "image": kubernetes.image,
                # Kubernetes would expand $(NAME).
                "command": [word.replace("$(", "$$(") for word in command],
                "workingDir": os.getcwd(),
                "env": environment,
                "resources": _resources(config),
                "volumeMounts": [
                    {"name": f"volume-{index}", "mountPath": folder} for index, (folder, _) in enumerate(volumes)
                ],
            }
        ],
        "volumes": [{"name": f"volume-{index}", **_source(what)} for index, (_, what) in enumerate(volumes)],
    }
    if kubernetes.capabilities:
        pod["containers"][0]["securityContext"] = {"capabilities": {"add": kubernetes.capabilities}}
    if kubernetes.service_account:
        pod["serviceAccountName"] = kubernetes.service_account
    if kubernetes.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": secret} for secret in kubernetes.image_pull_secrets]
    if kubernetes.node_selector:
        pod["nodeSelector"] = _pairs(kubernetes.node_selector)
    if kubernetes.tolerations:
        pod["tolerations"] = [_toleration(taint) for taint in kubernetes.tolerations]
    if kubernetes.host_network:
        pod |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    return pod


def _environment(config: Config, log_path: Path, num_nodes: int) -> list[dict[str, Any]]:
    of_the_pod = {
        NODE_RANK: "metadata.annotations['batch.kubernetes.io/job-completion-index']",
        NODE_NAME: "spec.nodeName",
        POD_ADDRESS: "status.podIP",
    }
    plain = {
        NUM_NODES: str(num_nodes),
        # Kubernetes expands variables that are defined earlier in the list.
        LOG_VARIABLE: str(log_path.with_suffix(f".node$({NODE_RANK}){log_path.suffix}")),
        "PYTHONPATH": str(CODE),
    }
    secrets = [
        {"name": variable, "valueFrom": {"secretKeyRef": dict(zip(("name", "key"), secret.split("/"), strict=True))}}
        for variable, secret in _pairs(config.site.kubernetes.secrets).items()
    ]
    fields = [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in of_the_pod.items()]
    return [*fields, *({"name": variable, "value": value} for variable, value in plain.items()), *secrets]


def _resources(config: Config) -> dict[str, Any]:
    """Return requests and limits, which are equal: a pod that shares resources would slow down all others."""
    amounts = _pairs(config.site.kubernetes.resources)
    if config.hardware.device == "cuda":
        amounts = {config.site.kubernetes.gpu_resource: str(config.hardware.gpus_per_node)} | amounts
    return {"requests": amounts, "limits": dict(amounts)} if amounts else {}


def _source(what: str) -> dict[str, Any]:
    kind, _, value = what.partition(":")
    if kind == "pvc":
        return {"persistentVolumeClaim": {"claimName": value}}
    if kind == "host":
        return {"hostPath": {"path": value, "type": "DirectoryOrCreate"}}
    return {"emptyDir": {"medium": "Memory", "sizeLimit": value} if kind == "memory" else {}}


def _toleration(taint: str) -> dict[str, str]:
    match = re.fullmatch(r"([^=:]+)(?:=([^:]*))?(?::(.+))?", taint)
    assert match, taint
    key, value, effect = match.groups()
    toleration = {"key": key, "operator": "Exists"} if value is None else {"key": key, "value": value}
    return toleration | ({"effect": effect} if effect else {})


def _pairs(items: Sequence[str]) -> dict[str, str]:
    """Parse `NAME=VALUE` texts to a dict."""
    return {name: value for name, _, value in (item.partition("=") for item in items)}
