"""A gang as a Kubernetes JobSet: what is written here is what is applied, and nothing else decides it.

One replicated job of N indexed pods, one pod per node, each with all GPUs of its node. A pod runs the command that the
rule would run on the machine itself, in the folder in which Snakemake runs, and finds its place among the others in
its environment:

| variable | value |
|---|---|
| `POSTTRAIN_NODE_RANK` | the pod's completion index |
| `POSTTRAIN_NUM_NODES` | N |
| `POSTTRAIN_NODE_NAME` | the node that it runs on |
| `POSTTRAIN_POD_ADDRESS` | its IP address, that of its node where it uses the node's network |

Who starts again, and who does not:

- The first pod is the gang's head. Where it ends with exit code 1 it has said why and has tried what it could: the
  JobSet fails at once. The others end with 0 when they have lost it.
- A pod that is evicted, killed for memory, or lost with its node: all pods go and start again, at most `max_restarts`
  times. The head that notices ends with exit code 75. JobSet makes the new ones only when the old ones are gone.

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
# What `posttrain.cli` ends with when it has told the user what to do: the same start would end the same way.
EXIT_OF_A_REFUSAL = 1
# Any other: all pods start again. This one is sysexits.h's for what may work later.
EXIT_TO_START_AGAIN = 75
# So long a finished JobSet and its pods' logs can be looked at.
KEPT_SECONDS = 24 * 3600
# A pod's name is `{JobSet}-nodes-0-{index}-{5 letters}`, of at most 63 characters.
_LONGEST_NAME = 63 - len(f"-{JOB}-0-9999-abcde")


def jobset_name(run_folder: Path, log_path: Path) -> str:
    """Return the name of a step's JobSet, so that one step of one run has one JobSet, whoever starts it.

    Args:
        run_folder: Tells runs of the same name apart.
        log_path: `logs/{rule}/{run}.log`, or `logs/{rule}/{run}.{part}.log`: it tells steps of a run apart.

    Example:
        `logs/train/glm5-1a2b3c4d.log` gives `glm5-1a2b3c4d-train-grpo-` and 8 digits of a digest.
    """
    former = {rule: step for step, rule in CURRENT_RULES.items()}
    step = f"{log_path.stem}-{former.get(log_path.parent.name, log_path.parent.name)}"
    digest = digest8([os.path.abspath(run_folder), step])
    words = re.sub(r"[^a-z0-9]+", "-", step.lower())
    return f"{words[: _LONGEST_NAME - 1 - len(digest)].rstrip('-')}-{digest}"


def check_mounted(folder: Path, config: Config) -> list[Problem]:
    """Return the problem of a folder that pods would not see."""
    volumes = config.site.kubernetes.volumes
    if any(folder.is_relative_to(volume.partition("=")[0]) for volume in volumes):
        return []
    remedy = "run Snakemake from a folder on a volume that the pods mount at the same path"
    return [Problem("site.kubernetes.volumes", ", ".join(volumes) or "none", f"one that holds {folder}", remedy)]


def render(config: Config, run_folder: Path, log_path: Path, command: Sequence[str], num_nodes: int) -> dict[str, Any]:
    """Return the JobSet of a step as plain types.

    Args:
        config: The resolved configuration.
        run_folder: Says whose it is.
        log_path: The rule's log; each node writes one beside it.
        command: What a pod runs, as words; its first one is found on the image's PATH.
        num_nodes: Pods.
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
        # A gang misses every pod: the first that is lost ends the job, and JobSet starts it again as a whole.
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
        # As process 1 a supervisor would not hear SIGTERM, and an evicted pod would train on until it is killed.
        "shareProcessNamespace": True,
        "containers": [
            {
                "name": CONTAINER,
                "image": kubernetes.image,
                # Kubernetes would take $(NAME) for a variable.
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
        # Kubernetes puts in the values of variables that stand above.
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
    """Return requests and limits, which are equal: a pod that competes with neighbours would slow all others down."""
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
    """Return `NAME=VALUE` texts as a mapping."""
    return {name: value for name, _, value in (item.partition("=") for item in items)}
