"""The preflight on one node: answers to the requests of `cluster.inspection`."""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from posttrain.cluster.channel import POLL_SECONDS
from posttrain.cluster.handshake import SECRET_VARIABLE
from posttrain.cluster.inspection import CLOCK, FACTS, KV_TRANSFER, LINKS, REACH
from posttrain.cluster.processes import end_processes, start_child
from posttrain.config.load import load_resolved
from posttrain.plan.flags.environment import trainer_environment
from posttrain.plan.flags.flag import as_environment
from posttrain.plan.preflight import kv_transfer
from posttrain.plan.preflight.node import inspect_node, transport_environment, transport_python
from posttrain.rl.engines.ports import choose_free_ports

# A node that drops packets would block for TCP's own timeout, two minutes. Connections are tested in parallel, so that
# a few such nodes do not delay the whole preflight.
CONNECT_SECONDS = 10.0
NUM_CONNECTORS = 16


class NodeInspection:
    """Answers the head's preflight requests.

    Args:
        name: This node's name.
        address: This node's address for other nodes.
        log_folder: Folder of the attempt, seen by all nodes.
        next_message: `Head.next_message`; raises when the attempt is over.
        secret: The gang's secret.
    """

    def __init__(
        self,
        name: str,
        address: str,
        log_folder: Path,
        next_message: Callable[[float], dict[str, Any] | None],
        secret: str,
    ):
        self._name, self._address, self._log_folder, self._next_message = name, address, log_folder, next_message
        self._secret = secret
        self._listener: socket.socket | None = None

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return the content of the answer to one request."""
        answers = {
            CLOCK: self._clock,
            FACTS: self._facts,
            REACH: self._reach,
            LINKS: self._links,
            KV_TRANSFER: self._transfer,
        }
        return answers[question["kind"]](question)

    def _clock(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"seconds": time.time()}

    def _facts(self, question: dict[str, Any]) -> dict[str, Any]:
        node_local = Path(question["node_local"].format(node=self._name))
        facts = inspect_node(load_resolved(Path(question["config_path"])), node_local, self._log_folder)
        # Connections are not accepted: peers only test that they can connect.
        self._listener = socket.create_server((self._address, 0), backlog=len(question["names"]))
        port = self._listener.getsockname()[1]
        rendezvous, transfer = choose_free_ports(2, self._address)
        return {"facts": facts.as_dict(), "port": port, "rendezvous": rendezvous, "transfer": transfer}

    def _reach(self, question: dict[str, Any]) -> dict[str, Any]:
        with ThreadPoolExecutor(NUM_CONNECTORS) as pool:
            reached = list(pool.map(_can_connect, question["places"]))
        return {"unreachable": [name for name, ok in zip(question["names"], reached, strict=True) if not ok]}

    def _links(self, question: dict[str, Any]) -> dict[str, Any]:
        """Run one process per GPU, or one process without GPUs, which suffices to measure a core's rates."""
        assert self._listener, "facts come first"
        self._listener.close()
        config, names = load_resolved(Path(question["config_path"])), question["names"]
        count = config.hardware.gpus_per_node if config.hardware.device == "cuda" else 1
        command = [sys.executable, "-m", "posttrain.plan.preflight.links", "--device", config.hardware.device]
        command += ["--num-nodes", str(len(names))]
        shared = {
            **as_environment(trainer_environment(config, len(names))),
            "WORLD_SIZE": str(count * len(names)),
            "MASTER_ADDR": question["address"],
            "MASTER_PORT": str(question["rendezvous"]),
        }
        first = names.index(self._name) * count
        own = [{"RANK": str(first + place), "LOCAL_RANK": str(place)} for place in range(count)]
        return {"results": self._run(command, [shared | variables for variables in own])}

    def _transfer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Run one process in the engines' environment."""
        config = load_resolved(Path(question["config_path"]))
        # -P keeps the script's folder off the path: some of its modules have the names of others.
        command = [transport_python(config), "-P", kv_transfer.__file__, "--device", config.hardware.device]
        command += ["--backend", config.engine.pd.transfer_backend, "--places", json.dumps(question["places"])]
        command += ["--place", str(question["names"].index(self._name))]
        (results,) = self._run(command, [transport_environment(config) | {SECRET_VARIABLE: self._secret}])
        return {"results": results}

    def _run(self, command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> list[list[dict[str, Any]]]:
        """Run one process per environment; return the JSON lines of each, also of one that failed midway."""
        with tempfile.TemporaryDirectory(prefix="preflight-") as name:
            outputs = [Path(name) / str(place) for place in range(len(environments))]
            processes = [self._start(command, *pair) for pair in zip(environments, outputs, strict=True)]
            try:
                while any(process.poll() is None for process in processes):
                    self._next_message(POLL_SECONDS)  # raises when the head's time limit is over
            finally:
                end_processes(processes, 0)
            return [_read(output) for output in outputs]

    def _start(self, command: Sequence[str], environment: Mapping[str, str], output: Path) -> psutil.Popen:
        with open(output, "wb") as results, open(self._log_folder / f"preflight-{self._name}.log", "ab") as errors:
            return start_child(command, env={**os.environ, **environment}, stdout=results, stderr=errors)


def _can_connect(place: Sequence[Any]) -> bool:
    host, port = place
    try:
        socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def _read(path: Path) -> list[dict[str, Any]]:
    """Return the JSON lines of a process's output; libraries may print other lines."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
