"""Rules of `site.container` and `site.kubernetes` that srun, Apptainer or a cluster would check much later."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath

from posttrain.config.schema import Config
from posttrain.errors import Problem

Problems = Iterator[Problem]
SUFFIX_OF = {"apptainer": ".sif", "pyxis": ".sqsh"}
BUILDER_OF = {
    "apptainer": "apptainer build gpu.sif envs/gpu/image.def",
    "pyxis": "enroot import --output gpu.sqsh docker://REGISTRY/IMAGE:TAG",
}
# No commas or colons, because they separate mounts and their parts.
_PATH = r"/[^,:\s]*"
_MOUNT = rf"{_PATH}(:{_PATH}(:ro)?)?"
_DNS_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_DNS_NAME = rf"{_DNS_LABEL}(\.{_DNS_LABEL})*"
_LABEL_NAME = rf"({_DNS_NAME}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?"
_LABEL_VALUE = r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?"
_QUANTITY = r"\d+(\.\d+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?"
_IMAGE = r"[^\s@]+(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}|@sha256:[0-9a-f]{64})"
# key of site.kubernetes -> (pattern of its value or of each list item, the pattern in words)
_FORMS = {
    "namespace": (_DNS_LABEL, "a namespace: lower-case letters, digits and '-'"),
    "queue": (_DNS_NAME, "a LocalQueue: lower-case letters, digits, '-' and '.'"),
    "service_account": (_DNS_NAME, "a service account: lower-case letters, digits, '-' and '.'"),
    "image_pull_secrets": (_DNS_NAME, "names of Secrets: lower-case letters, digits, '-' and '.'"),
    "gpu_resource": (_LABEL_NAME, "a resource, such as nvidia.com/gpu"),
    "volumes": (
        rf"{_PATH}=(pvc:{_DNS_NAME}|host:{_PATH}|empty|memory:{_QUANTITY})",
        "/folder=pvc:CLAIM, /folder=host:/path, /folder=empty or /folder=memory:SIZE",
    ),
    "resources": (rf"{_LABEL_NAME}={_QUANTITY}", "NAME=QUANTITY, such as cpu=96, memory=1500Gi or rdma/ib=8"),
    "node_selector": (rf"{_LABEL_NAME}={_LABEL_VALUE}", "LABEL=VALUE"),
    "tolerations": (
        rf"{_LABEL_NAME}(={_LABEL_VALUE})?(:(NoSchedule|PreferNoSchedule|NoExecute))?",
        "KEY=VALUE:EFFECT, KEY:EFFECT or KEY, with the effect NoSchedule, PreferNoSchedule or NoExecute",
    ),
    "annotations": (rf"{_LABEL_NAME}=.*", "NAME=VALUE"),
    "secrets": (rf"[A-Za-z_][A-Za-z0-9_]*={_DNS_NAME}/[-._A-Za-z0-9]+", "VARIABLE=SECRET/KEY, never a value"),
    "capabilities": (r"[A-Z_]+", "capabilities without CAP_, such as IPC_LOCK"),
}


def _container(config: Config) -> Problems:
    container, launcher, key = config.site.container, config.site.launcher, "site.container"
    if container.runtime == "none":
        for name in ("image", "mounts", "options"):
            if getattr(container, name):
                remedy = f"set {key}.runtime, or leave {name} out"
                allowed = "nothing without a runtime"
                yield Problem(
                    "needs-container-runtime", f"{key}.{name}", repr(getattr(container, name)), allowed, remedy
                )
        return
    if launcher in ("local", "kubernetes"):
        remedy = "pods have site.kubernetes.image" if launcher == "kubernetes" else "start Snakemake inside the image"
        allowed = f"none with site.launcher={launcher}"
        yield Problem("runtime-of-another-launcher", f"{key}.runtime", container.runtime, allowed, remedy)
    suffix = SUFFIX_OF[container.runtime]
    if not re.fullmatch(rf"{_PATH}{re.escape(suffix)}", container.image):
        allowed = f"the absolute path of one {suffix} file, which starts on many nodes without a registry"
        yield Problem(
            "not-an-image", f"{key}.image", repr(container.image), allowed, f"make it: {BUILDER_OF[container.runtime]}"
        )
    for mount in container.mounts:
        if not re.fullmatch(_MOUNT, mount):
            allowed = "/folder, /outside:/inside or /outside:/inside:ro"
            yield Problem(
                "not-a-mount", f"{key}.mounts", repr(mount), allowed, "give absolute paths without commas or spaces"
            )


def _kubernetes_forms(config: Config) -> Problems:
    for name, (pattern, allowed) in _FORMS.items():
        value = getattr(config.site.kubernetes, name)
        for item in value if isinstance(value, list) else [value] if value else []:
            if not re.fullmatch(pattern, item):
                # A token that was written in place of a Secret's name must not appear in a log.
                shown = repr(item) if name != "secrets" else _without_value(item)
                yield Problem(
                    "not-a-kubernetes-value", f"site.kubernetes.{name}", shown, allowed, "correct it in the site's file"
                )


def _without_value(item: str) -> str:
    """Return a variable without its value; "" for text without "=", which may be a bare value."""
    variable, separator, _ = item.partition("=")
    return repr(f"{variable}=...") if separator else "an item without '='"


def _kubernetes_image(config: Config) -> Problems:
    image = config.site.kubernetes.image
    if config.site.launcher == "kubernetes" and (not re.fullmatch(_IMAGE, image) or image.endswith(":latest")):
        allowed = "an image with a tag that stays what it is, or with a digest"
        remedy = "build envs/gpu/Dockerfile, push it, and give REGISTRY/IMAGE:TAG or REGISTRY/IMAGE@sha256:..."
        yield Problem("image-not-pinned", "site.kubernetes.image", repr(image), allowed, remedy)


def _kubernetes_folders(config: Config) -> Problems:
    site = config.site
    if site.launcher != "kubernetes":
        return
    mounted = [PurePosixPath(volume.partition("=")[0]) for volume in site.kubernetes.volumes]
    if len(set(mounted)) < len(mounted):
        yield Problem(
            "named-twice", "site.kubernetes.volumes", repr(site.kubernetes.volumes), "each folder once", "leave one out"
        )
    for name in ("store", "results", "node_local"):
        folder = PurePosixPath(getattr(site, name))
        # A relative store or results folder is in the workflow's folder, which the launcher checks.
        must_be_mounted = folder.is_absolute() or name == "node_local"
        if must_be_mounted and not any(folder.is_relative_to(mount) for mount in mounted):
            allowed = "a folder below one of site.kubernetes.volumes: what pods write elsewhere is lost with them"
            yield Problem("folder-not-mounted", f"site.{name}", str(folder), allowed, "mount a volume there")
    if site.node_names:
        remedy = "leave them out: each pod then copies what its node needs when the job starts"
        allowed = "none: the cluster chooses the nodes"
        yield Problem("node-names-with-kubernetes", "site.node_names", repr(site.node_names), allowed, remedy)


LAUNCH_RULES: tuple[Callable[[Config], Problems], ...] = (
    _container,
    _kubernetes_forms,
    _kubernetes_image,
    _kubernetes_folders,
)
