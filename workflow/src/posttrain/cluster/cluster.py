"""JobSets and pods of one Kubernetes namespace, through the official client.

Transient errors (an overloaded or restarting API server, a closed connection) are retried up to a time limit, with a
line in the log. Other errors (no permission, no such resource) raise with a remedy.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Set
from typing import Any

from posttrain.cluster.jobset import CONTAINER, GROUP, PLURAL, VERSION
from posttrain.errors import ConfigError, Problem

log = logging.getLogger(__name__)

REQUEST_SECONDS = 30.0
# Time between polls of a JobSet: a run takes hours, and the API server is shared.
PAUSE_SECONDS = 5.0
# Replacing an API server takes minutes, in which the JobSet runs on without us.
TIMEOUT_SECONDS = 600.0
# Log lines of the first failed pod in the error message: its last lines name the cause.
LOG_TAIL_LINES = 15
BAD_REQUEST, NOT_FOUND, CONFLICT, TOO_MANY = 400, 404, 409, 429
JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"


class Cluster:
    """The JobSets of a namespace, and their pods.

    Args:
        namespace: The namespace.
        pause_seconds: Time between polls or retries.
        timeout_seconds: Requests to an API server that does not answer are retried this long.

    Raises:
        ConfigError: The client is not installed, or finds no cluster.
    """

    def __init__(self, namespace: str, pause_seconds: float = PAUSE_SECONDS, timeout_seconds: float = TIMEOUT_SECONDS):
        try:
            import kubernetes
        except ImportError as error:
            remedy = "pip install 'posttrain[kubernetes]'"
            raise ConfigError(
                [
                    Problem(
                        "package-missing",
                        "site.launcher",
                        "kubernetes",
                        "with the package kubernetes installed",
                        remedy,
                    )
                ]
            ) from error
        client = _connect(kubernetes)
        self.pause_seconds = pause_seconds
        self._timeout_seconds = timeout_seconds
        self._namespace = namespace
        self._jobsets = kubernetes.client.CustomObjectsApi(client)
        self._core = kubernetes.client.CoreV1Api(client)
        self._access = kubernetes.client.AuthorizationV1Api(client)
        self._api_error = kubernetes.client.ApiException
        self._where = {"group": GROUP, "version": VERSION, "namespace": namespace, "plural": PLURAL}

    def read(self, name: str) -> dict[str, Any] | None:
        """Return a JobSet; None if none has that name."""
        read = self._jobsets.get_namespaced_custom_object
        return self._ask(f"read JobSet {name}", read, {NOT_FOUND}, name=name, **self._where)

    def create(self, manifest: dict[str, Any]) -> bool:
        """Create a JobSet; return False if the name exists. Only one of several creators succeeds."""
        what = f"create JobSet {manifest['metadata']['name']}"
        create = self._jobsets.create_namespaced_custom_object
        return self._ask(what, create, {CONFLICT}, body=manifest, **self._where) is not None

    def delete(self, jobset: dict[str, Any]) -> None:
        """Delete the JobSet with this uid and its pods, and wait until it is gone; a new one of its name is kept."""
        name, uid = jobset["metadata"]["name"], jobset["metadata"]["uid"]
        # Foreground deletion frees the name only when the pods are gone.
        options = {"propagationPolicy": "Foreground", "preconditions": {"uid": uid}}
        delete = self._jobsets.delete_namespaced_custom_object
        self._ask(f"delete JobSet {name}", delete, {NOT_FOUND, CONFLICT}, name=name, body=options, **self._where)
        while (found := self.read(name)) is not None and found["metadata"]["uid"] == uid:
            time.sleep(self.pause_seconds)

    def pods(self, name: str) -> list[Any]:
        """Return the pods of a JobSet, sorted by name."""
        listed = self._ask(
            f"list the pods of JobSet {name}",
            self._core.list_namespaced_pod,
            set(),
            namespace=self._namespace,
            label_selector=f"{JOBSET_LABEL}={name}",
        )
        return sorted(listed.items, key=lambda pod: pod.metadata.name)

    def log_tail(self, pod_name: str) -> str:
        """Return the last lines of a pod's supervisor log."""
        said = self._ask(
            f"read the log of pod {pod_name}",
            self._core.read_namespaced_pod_log,
            {BAD_REQUEST, NOT_FOUND},
            name=pod_name,
            namespace=self._namespace,
            container=CONTAINER,
            tail_lines=LOG_TAIL_LINES,
        )
        return "(the node no longer has its log)" if said is None else said

    def has_jobsets(self) -> bool:
        """Return whether the cluster serves the JobSet version that we write."""
        served = self._ask(
            "list JobSet's resources", self._jobsets.get_api_resources, {NOT_FOUND}, group=GROUP, version=VERSION
        )
        return served is not None and any(resource.name == PLURAL for resource in served.resources)

    def is_allowed(self, verb: str, group: str, resource: str) -> bool:
        """Return whether the account has a right in the namespace; a subresource is written as in `pods/log`."""
        name, _, part = resource.partition("/")
        wanted = {"namespace": self._namespace, "verb": verb, "group": group, "resource": name, "subresource": part}
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
        body = review | {"spec": {"resourceAttributes": wanted}}
        said = self._ask("ask what is allowed", self._access.create_self_subject_access_review, set(), body=body)
        return bool(said.status.allowed)

    def _ask(self, what: str, request: Callable[..., Any], expected: Set[int], **arguments: Any) -> Any:
        """Return the API server's answer; None for an expected status (not found, conflict).

        Raises:
            RuntimeError: The server returns another error, or did not answer for `timeout_seconds`.
        """
        from urllib3.exceptions import HTTPError

        give_up_at = time.monotonic() + self._timeout_seconds
        while True:
            try:
                return request(_request_timeout=REQUEST_SECONDS, **arguments)
            except self._api_error as error:
                if error.status in expected:
                    return None
                if error.status != TOO_MANY and error.status < 500:
                    raise RuntimeError(
                        f"Kubernetes refuses to {what} in namespace {self._namespace}: {_told(error)}"
                    ) from error
                reason = f"{error.status} {error.reason}"
            except HTTPError as error:
                reason = str(error)
            if time.monotonic() > give_up_at:
                raise RuntimeError(
                    f"Kubernetes has not answered for {self._timeout_seconds:g} s ({what}: {reason}); what runs there "
                    "goes on: run the same command again to follow it"
                )
            log.warning("cannot %s: %s; asking again", what, reason)
            time.sleep(self.pause_seconds)


def _connect(kubernetes: Any) -> Any:
    """Return a client for KUBECONFIG's cluster or, in a pod without KUBECONFIG, for the pod's cluster."""
    settings = kubernetes.client.Configuration()
    # `_ask` retries, and logs each retry.
    settings.retries = False
    file = os.environ.get("KUBECONFIG")
    try:
        if file or "KUBERNETES_SERVICE_HOST" not in os.environ:
            kubernetes.config.load_kube_config(file, client_configuration=settings)
        else:
            kubernetes.config.load_incluster_config(client_configuration=settings)
    except kubernetes.config.ConfigException as error:
        remedy = "set KUBECONFIG, or run in a pod with a service account"
        raise ConfigError(
            [Problem("no-cluster", "KUBECONFIG", repr(file), f"a cluster to talk to ({error})", remedy)]
        ) from error
    return kubernetes.client.ApiClient(settings)


def _told(error: Any) -> str:
    """Return the API server's error without its headers, and the likely cause of common errors."""
    causes = {
        401: "; the credentials of KUBECONFIG or of the service account are not accepted",
        403: "; the account needs get, create and delete on jobsets, and get and list on pods and pods/log",
        NOT_FOUND: "; JobSet is not installed in this cluster, or the namespace is not there",
    }
    return f"{error.status} {error.reason}: {str(error.body).strip()[:500]}{causes.get(error.status, '')}"
