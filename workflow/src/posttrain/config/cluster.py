"""The sections `site.container` and `site.kubernetes`."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.document import _doc


@dataclass(frozen=True)
class Container:
    """The image for jobs and for the processes of a training job, started by `srun`."""

    runtime: str = _doc(
        "none: the nodes' own environment; apptainer: `apptainer exec`; pyxis: srun's `--container-image`",
        "none",
        choices=("none", "apptainer", "pyxis"),
    )
    image: str = _doc(
        "Image as one file that every node can read: `.sif` for apptainer, `.sqsh` for pyxis. `python` "
        "on its PATH must have what the trainer needs (envs/gpu)",
        "",
    )
    mounts: list[str] = _doc(
        "Additional folders to mount: `/folder`, `/outside:/inside` or `/outside:/inside:ro`. The "
        "workflow's own folders are always mounted",
        [],
    )
    options: list[str] = _doc("Additional options of `apptainer exec`, or of srun with pyxis", [])


@dataclass(frozen=True)
class Kubernetes:
    """Requests of GPU jobs to Kubernetes (launcher: kubernetes): one JobSet with one pod per node."""

    namespace: str = _doc("Namespace of the JobSet", "default")
    queue: str = _doc("Kueue's LocalQueue; empty: the JobSet is not queued by Kueue", "")
    service_account: str = _doc("Service account of the pods; empty: the namespace's default", "")
    image: str = _doc(
        "Image of the pods, with a tag or a digest; `python` on its PATH must have what the trainer needs", ""
    )
    image_pull_secrets: list[str] = _doc("Names of Secrets for the image registry", [])
    volumes: list[str] = _doc(
        "Volumes: `/folder=pvc:CLAIM`, `/folder=host:/path/on/the/node`, `/folder=empty` or "
        "`/folder=memory:SIZE` (`/dev/shm`). The folder in which Snakemake runs must be below one of them",
        [],
    )
    gpu_resource: str = _doc("Resource that a pod requests once per GPU", "nvidia.com/gpu")
    resources: list[str] = _doc("Other resources that a pod requests, `NAME=QUANTITY`", [])
    node_selector: list[str] = _doc("Labels that a node must have, `LABEL=VALUE`", [])
    tolerations: list[str] = _doc("Taints that pods tolerate: `KEY=VALUE:EFFECT`, `KEY:EFFECT` or `KEY`", [])
    annotations: list[str] = _doc("Annotations of the pods, `NAME=VALUE`: networks, placement", [])
    secrets: list[str] = _doc("Environment variables from Secrets of the namespace, `VARIABLE=SECRET/KEY`", [])
    capabilities: list[str] = _doc("Linux capabilities of the pods; RDMA requires `IPC_LOCK`", [])
    host_network: bool = _doc("Pods use their node's network", False)
    max_restarts: int = _doc("How often JobSet restarts all pods after it has lost one", 20, minimum=0)
    grace_seconds: int = _doc("Time in which a pod that must stop may finish its step and its save", 600, minimum=1)
