"""The sections `site.container` and `site.kubernetes`: what jobs start in, and what pods get."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.document import _doc


@dataclass(frozen=True)
class Container:
    """The image that jobs and the processes of a training job start in, behind `srun`."""

    runtime: str = _doc(
        "none: the environment of the nodes themselves; apptainer: `apptainer exec`; pyxis: srun's `--container-image`",
        "none",
        choices=("none", "apptainer", "pyxis"),
    )
    image: str = _doc(
        "The image as one file that every node sees: `.sif` for apptainer, `.sqsh` for pyxis. `python` on its PATH has "
        "what the trainer needs (envs/gpu)",
        "",
    )
    mounts: list[str] = _doc(
        "Further folders to show inside: `/folder`, `/outside:/inside` or `/outside:/inside:ro`. The workflow's own "
        "folders are always there",
        [],
    )
    options: list[str] = _doc("Further words for `apptainer exec`, or for srun with pyxis", [])


@dataclass(frozen=True)
class Kubernetes:
    """What a job with GPUs requests from Kubernetes (launcher: kubernetes): one JobSet, one pod per node."""

    namespace: str = _doc("Namespace of the JobSet", "default")
    queue: str = _doc("Kueue's LocalQueue; empty: the JobSet is not queued by Kueue", "")
    service_account: str = _doc("Service account of the pods; empty: the namespace's default", "")
    image: str = _doc("Image of the pods, with a tag or a digest; `python` on its PATH has what the trainer needs", "")
    image_pull_secrets: list[str] = _doc("Names of Secrets that open the registry", [])
    volumes: list[str] = _doc(
        "What is mounted where: `/folder=pvc:CLAIM`, `/folder=host:/path/on/the/node`, `/folder=empty` or "
        "`/folder=memory:SIZE` (`/dev/shm`). The folder in which Snakemake runs has to be below one of them",
        [],
    )
    gpu_resource: str = _doc("Resource that a pod asks for as often as a node has GPUs", "nvidia.com/gpu")
    resources: list[str] = _doc("What a pod asks for besides GPUs, `NAME=QUANTITY`", [])
    node_selector: list[str] = _doc("Labels that a node must have, `LABEL=VALUE`", [])
    tolerations: list[str] = _doc("Taints that do not keep pods away: `KEY=VALUE:EFFECT`, `KEY:EFFECT` or `KEY`", [])
    annotations: list[str] = _doc("Annotations of the pods, `NAME=VALUE`: networks, placement", [])
    secrets: list[str] = _doc("Environment that Secrets of the namespace hold, `VARIABLE=SECRET/KEY`", [])
    capabilities: list[str] = _doc("Linux capabilities of the pods; RDMA wants `IPC_LOCK`", [])
    host_network: bool = _doc("Pods use their node's network", False)
    max_restarts: int = _doc("Times that JobSet starts all pods again after it has lost one", 20, minimum=0)
    grace_seconds: int = _doc("A pod that has to go may finish its step and its save for so long", 600, minimum=1)
