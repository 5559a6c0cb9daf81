"""A Kubernetes API server on loopback with a JobSet controller and a node that runs pods as processes of this machine.

    with KubernetesServer(folder) as server:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))

It speaks the part of the API that the launcher uses, so that the official client talks to it as to a cluster. A pod's
command runs with the pod's environment in its working directory; images, volumes and namespaces of the kernel are not
there.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import yaml
from tests.support.jobset_schema import check_jobset

JOBSETS = re.compile(r"/apis/jobset\.x-k8s\.io/v1alpha2/namespaces/([^/]+)/jobsets(?:/([^/]+))?")
PODS = re.compile(r"/api/v1/namespaces/([^/]+)/pods(?:/([^/]+)/log)?")
API = "/apis/jobset.x-k8s.io/v1alpha2"
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
CUT = -1


class KubernetesServer(ThreadingHTTPServer):
    """The server, its objects, and what it ran.

    Args:
        folder: For kubeconfig and the pods' logs.

    Attributes:
        jobsets: Name -> object.
        pods: Name -> object.
        secrets: (Secret, key) -> value.
        answers: Statuses of the next answers, whatever is asked for; after CUT what was asked is done, and nobody told.
        is_admitting: Off: Kueue keeps new JobSets in their queue.
        has_jobset: Off: nobody has installed it.
        denied: (verb, resource) that the account may not.
    """

    daemon_threads = True

    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.lock = folder, threading.RLock()
        self.jobsets: dict[str, dict[str, Any]] = {}
        self.pods: dict[str, dict[str, Any]] = {}
        self.secrets: dict[tuple[str, str], str] = {}
        self.answers: list[int] = []
        self.is_admitting = True
        self.has_jobset = True
        self.denied: set[tuple[str, str]] = set()
        self.created: list[dict[str, Any]] = []
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._uids = count(1)
        self.kubeconfig = folder / "kubeconfig.yaml"
        self.kubeconfig.write_text(yaml.safe_dump(self._kubeconfig()))

    def __enter__(self) -> KubernetesServer:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()
        for name, jobset in list(self.jobsets.items()):
            if "conditions" not in jobset["status"]:
                self.delete(name, None)
        for name in list(self._processes):
            self.kill_pod(name)

    def handle_error(self, *_: object) -> None:
        """Say nothing of clients that went away: tests kill them."""

    def create(self, namespace: str, manifest: dict[str, Any]) -> tuple[int, Any]:
        """Take in a JobSet, as the API server and the controller's webhook would."""
        with self.lock:
            name = manifest["metadata"]["name"]
            try:
                check_jobset(manifest)
            except Exception as error:
                return 422, {"message": str(error)}
            if name in self.jobsets:
                return 409, {"message": "AlreadyExists"}
            made = {**manifest, "status": {"restarts": 0}}
            made["metadata"] = {**manifest["metadata"], "namespace": namespace, "uid": f"uid-{next(self._uids)}"}
            made["spec"] = {**manifest["spec"], "suspend": not self.is_admitting}
            self.jobsets[name] = made
            self.created.append(made)
            threading.Thread(target=self._control, args=(made,), daemon=True).start()
            return 201, made

    def delete(self, name: str, uid: str | None) -> tuple[int, Any]:
        """Delete a JobSet as `propagationPolicy: Foreground` does: its pods go first."""
        with self.lock:
            found = self.jobsets.get(name)
            if found is None:
                return 404, {"message": "NotFound"}
            if uid not in (None, found["metadata"]["uid"]):
                return 409, {"message": "the UID in the precondition does not match"}
            found["metadata"]["deletionTimestamp"] = _now()
        return 200, found

    def resources(self) -> tuple[int, Any]:
        """Say what JobSet's API group serves."""
        served = {"name": "jobsets", "singularName": "jobset", "namespaced": True, "kind": "JobSet", "verbs": ["get"]}
        found = {"kind": "APIResourceList", "groupVersion": "jobset.x-k8s.io/v1alpha2", "resources": [served]}
        return (200, found) if self.has_jobset else (404, {"message": "NotFound"})

    def review(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Say whether the account may do what it asks about."""
        wanted = asked["spec"]["resourceAttributes"]
        resource = "/".join(part for part in (wanted["resource"], wanted.get("subresource")) if part)
        return {**asked, "status": {"allowed": (wanted["verb"], resource) not in self.denied}}

    def kill_pod(self, name: str, with_signal: int = signal.SIGKILL) -> None:
        """End a pod's process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._processes[name].pid, with_signal)

    def _control(self, jobset: dict[str, Any]) -> None:
        """Run the pods of a JobSet to its end, and remove all of it when it is deleted."""
        while not self.is_admitting and not _is_deleted(jobset):
            time.sleep(0.02)
        jobset["spec"]["suspend"] = False
        while not _is_deleted(jobset):
            if "conditions" in jobset["status"]:
                time.sleep(0.02)
            else:
                self._attempt(jobset)
        with self.lock:
            self._remove_pods(jobset)
            del self.jobsets[jobset["metadata"]["name"]]

    def _attempt(self, jobset: dict[str, Any]) -> None:
        """Run the pods once; then the JobSet has ended, or they are to start again."""
        codes = set(self._wait_for(jobset, self._start_pods(jobset)))
        if codes == {0}:
            _finish(jobset, "Completed", "jobset completed successfully")
        elif _refusals(jobset) & codes:
            _finish(jobset, "Failed", "jobset failed due to one or more job failures")
        elif jobset["status"]["restarts"] == jobset["spec"]["failurePolicy"]["maxRestarts"]:
            _finish(jobset, "Failed", "jobset failed due to reaching max number of restarts")
        else:
            self._remove_pods(jobset)
            jobset["status"]["restarts"] += 1

    def _remove_pods(self, jobset: dict[str, Any]) -> None:
        prefix = f"{jobset['metadata']['name']}-"
        with self.lock:
            self.pods = {name: pod for name, pod in self.pods.items() if not name.startswith(prefix)}

    def _start_pods(self, jobset: dict[str, Any]) -> list[str]:
        job = jobset["spec"]["replicatedJobs"][0]
        name, names = jobset["metadata"]["name"], []
        (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
        for index in range(job["template"]["spec"]["completions"]):
            pod_name = f"{name}-{job['name']}-0-{index}-{jobset['status']['restarts']:05d}"
            with open(self.folder / f"{pod_name}.log", "wb") as sink:
                self._processes[pod_name] = subprocess.Popen(
                    [word.replace("$$(", "$(") for word in container["command"]],
                    cwd=container["workingDir"],
                    env={**_inherited(), **self._environment(container["env"], index)},
                    stdout=sink,
                    stderr=sink,
                    start_new_session=True,
                )
            self.pods[pod_name] = _pod(pod_name, name, index, container, {"running": {"startedAt": _now()}})
            names.append(pod_name)
        return names

    def _wait_for(self, jobset: dict[str, Any], names: list[str]) -> list[int]:
        """Return how the pods ended; the first that fails, or a deletion, ends the others."""
        while True:
            codes = [self._processes[name].poll() for name in names]
            if _is_deleted(jobset) or any(code not in (None, 0) for code in codes):
                for name in names:
                    self.kill_pod(name)
            for name, code in zip(names, codes, strict=True):
                if code is not None and "running" in _state(self.pods[name]):
                    exit_code = code if code >= 0 else 128 - code
                    ended = {"exitCode": exit_code, "reason": "Error" if code else "Completed", "finishedAt": _now()}
                    _state(self.pods[name]).pop("running")
                    _state(self.pods[name])["terminated"] = ended
                    self.pods[name]["status"]["phase"] = "Failed" if code else "Succeeded"
            if None not in codes:
                return [code if code >= 0 else 128 - code for code in codes if code is not None]
            time.sleep(0.02)

    def _environment(self, variables: list[dict[str, Any]], index: int) -> dict[str, str]:
        environment: dict[str, str] = {}
        for variable in variables:
            source = variable.get("valueFrom", {})
            if "fieldRef" in source:
                value = _fields(index)[source["fieldRef"]["fieldPath"]]
            elif "secretKeyRef" in source:
                value = self.secrets[source["secretKeyRef"]["name"], source["secretKeyRef"]["key"]]
            else:
                value = variable["value"]
                for name, known in environment.items():
                    value = value.replace(f"$({name})", known)
            environment[variable["name"]] = value
        return environment

    def _kubeconfig(self) -> dict[str, Any]:
        server = f"http://127.0.0.1:{self.server_address[1]}"
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": {"server": server}}],
            "users": [{"name": "test", "user": {}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "current-context": "test",
        }


class _Handler(BaseHTTPRequestHandler):
    server: KubernetesServer

    def do_GET(self) -> None:
        path, query = urlparse(self.path).path, parse_qs(urlparse(self.path).query)
        if self._is_refused():
            return
        if path == API:
            return self._answer(*self.server.resources())
        with self.server.lock:
            if (match := JOBSETS.fullmatch(path)) and match[2]:
                found = self.server.jobsets.get(match[2])
                return self._answer(*((200, found) if found else (404, {"message": "NotFound"})))
            if (match := PODS.fullmatch(path)) and match[2]:
                lines = (self.server.folder / f"{match[2]}.log").read_text().splitlines()
                return self._answer(200, "\n".join(lines[-int(query["tailLines"][0]) :]))
            label, _, value = query["labelSelector"][0].partition("=")
            items = [pod for pod in self.server.pods.values() if pod["metadata"]["labels"].get(label) == value]
            self._answer(200, {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items})

    def do_POST(self) -> None:
        if self._is_refused():
            return
        body = self._body()
        if urlparse(self.path).path == REVIEWS:
            return self._answer(201, self.server.review(body))
        match = JOBSETS.fullmatch(urlparse(self.path).path)
        assert match
        self._answer(*self.server.create(match[1], body))

    def do_DELETE(self) -> None:
        if self._is_refused():
            return
        match = JOBSETS.fullmatch(urlparse(self.path).path)
        assert match
        assert match[2]
        self._answer(*self.server.delete(match[2], self._body().get("preconditions", {}).get("uid")))

    def _body(self) -> dict[str, Any]:
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def _is_refused(self) -> bool:
        with self.server.lock:
            if not self.server.answers or self.server.answers[0] == CUT:
                return False
            status = self.server.answers.pop(0)
        self._answer(status, {"message": "as the test asked"})
        return True

    def _answer(self, status: int, content: Any) -> None:
        if self.server.answers[:1] == [CUT]:
            self.server.answers.pop(0)
            self.close_connection = True
            return
        body = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain" if isinstance(content, str) else "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing on the test's stderr."""


def _finish(jobset: dict[str, Any], kind: str, message: str) -> None:
    jobset["status"]["conditions"] = [{"type": kind, "status": "True", "reason": kind, "message": message}]


def _refusals(jobset: dict[str, Any]) -> set[int]:
    rules = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    return {code for rule in rules if rule["action"] == "FailJob" for code in rule["onExitCodes"]["values"]}


def _is_deleted(jobset: dict[str, Any]) -> bool:
    return "deletionTimestamp" in jobset["metadata"]


def _fields(index: int) -> dict[str, str]:
    """Return what a pod may learn of itself: each has a node of its own, and all share one network."""
    return {
        "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(index),
        "spec.nodeName": f"node-{index}",
        "status.podIP": "127.0.0.1",
    }


def _pod(name: str, jobset: str, index: int, container: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    about = {"name": container["name"], "image": container["image"], "imageID": "", "ready": True, "restartCount": 0}
    return {
        "metadata": {"name": name, "labels": {"jobset.sigs.k8s.io/jobset-name": jobset}},
        "spec": {"nodeName": _fields(index)["spec.nodeName"], "containers": [{"name": container["name"]}]},
        "status": {"phase": "Running", "containerStatuses": [{**about, "state": state}]},
    }


def _state(pod: dict[str, Any]) -> dict[str, Any]:
    return pod["status"]["containerStatuses"][0]["state"]


def _inherited() -> dict[str, str]:
    """Return what stands for the image's own environment: `python` on its PATH is the one that runs the tests."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    return {"PATH": path, "HOME": os.environ["HOME"], "OMP_WAIT_POLICY": "PASSIVE"}


def _now() -> str:
    return datetime.now(UTC).isoformat()
