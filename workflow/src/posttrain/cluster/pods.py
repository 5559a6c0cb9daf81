"""The head of a gang of pods: the other pods connect to it, and start its commands on their nodes.

Each pod of the JobSet runs the same command. The first is the head; the others run `worker_pod`. A process that ends is
restarted in its pod. If a pod is lost, the head exits with a code for which JobSet restarts all pods.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.cluster.channel import POLL_SECONDS, Channel
from posttrain.cluster.handshake import Reception
from posttrain.cluster.jobset import EXIT_TO_START_AGAIN, NODE_NAME, NUM_NODES, POD_ADDRESS
from posttrain.cluster.nodes import (
    FIRST_PORT,
    PROCESS_END_SECONDS,
    NodesLostError,
    NoScheduler,
    StartedHere,
    interface_address,
    start_here,
)
from posttrain.cluster.rendezvous_file import REMIND_SECONDS, RendezvousFile
from posttrain.config.schema import Config
from posttrain.plan.flags.sglang_flags import nodes_per_engine

log = logging.getLogger(__name__)

# Several heartbeats: a pod on a busy node counts as alive.
PROBE_SECONDS = 15.0


class Pod:
    """Another pod of the gang.

    Args:
        node: Name of its node.
        channel: Connection to the pod.
    """

    def __init__(self, node: str, channel: Channel):
        self.node, self.is_here, self.heard = node, True, time.monotonic()
        self._channel = channel
        self._started = self._ended = 0

    def listen(self) -> None:
        """Handle the pod's messages until it disconnects."""
        for message in self._channel.messages():
            self.heard = time.monotonic()
            if message["kind"] == "ended":
                self._ended = max(self._ended, message["number"])
        self.is_here = False

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start a command in the pod; a running command ends first."""
        self._started += 1
        self._channel.send("start", number=self._started, command=list(command), environment=dict(environment))

    @property
    def is_running(self) -> bool:
        """Whether the command that was started last is still running."""
        return self._ended < self._started

    def end(self) -> None:
        """End the pod's running command."""
        self._channel.send("end")


class StartedOnPods:
    """A command that runs in this pod and in others.

    Args:
        own: The process in this pod.
        others: The other pods.
    """

    def __init__(self, own: StartedHere, others: Sequence[Pod]):
        self._own, self._others = own, others

    def is_running(self) -> bool:
        """Return whether it runs in any pod; False once a pod is gone."""
        is_any = self._own.is_running() or any(pod.is_running for pod in self._others)
        return is_any and all(pod.is_here for pod in self._others)

    def end(self) -> None:
        """Wait briefly for the command to end, then end it."""
        self._own.end()
        deadline = time.monotonic() + PROCESS_END_SECONDS
        while self.is_running() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        for pod in self._others:
            pod.end()


class RestartedByJobSet(NoScheduler):
    """JobSet as scheduler: it restarts all pods together; pods have no time limit, and never query the API server."""

    def requeue(self, after: str = "") -> None:
        """Exit with the code for which JobSet restarts all pods.

        Args:
            after: Ignored: there are no other jobs.

        Raises:
            SystemExit: Always.
        """
        log.warning("ending with exit code %d: JobSet starts all pods again", EXIT_TO_START_AGAIN)
        sys.exit(EXIT_TO_START_AGAIN)


class Pods:
    """The pods of this JobSet; this process runs in the first.

    Args:
        config: The resolved configuration.
        rendezvous: File with the head's address for the other pods.
    """

    scheduler = RestartedByJobSet()

    def __init__(self, config: Config, rendezvous: Path):
        self.address = _own_address(config)
        # 0: use free ports. Only parts of an engine on several nodes must know a port in advance.
        self.first_port = FIRST_PORT if nodes_per_engine(config) > 1 else 0
        self._count = int(os.environ[NUM_NODES])
        self._others: dict[int, Pod] = {}
        self._node = os.environ[NODE_NAME]
        self._names: list[str] = []
        self._by_name: dict[str, Pod] = {}
        self._lost: set[str] = set()
        self._path = rendezvous
        secret = secrets.token_hex(32)
        reception = Reception(self.address, secret, self._is_awaited, self._take_in)
        self._rendezvous = RendezvousFile(reception.address, secret)

    def choose(self, count: int) -> list[str]:
        """Return the node names of the pods; the first call waits for all pods.

        Raises:
            NodesLostError: A pod is gone.
        """
        if not self._names:
            # Only the holder of the run's lease, which this process is, writes this file.
            self._rendezvous.write(self._path)
            self._wait_for_all()
            self._name_all()
        self._lost.update(name for name, pod in self._by_name.items() if not pod.is_here)
        if self._lost:
            raise NodesLostError(f"training needs all {count} pods, and has lost {', '.join(sorted(self._lost))}")
        return self._names

    def start(
        self, names: Sequence[str], command: Sequence[str], environment: Mapping[str, str], log_path: Path
    ) -> StartedOnPods:
        """Start the command in this pod and in the others."""
        others = [self._by_name[name] for name in names[1:]]
        for name, pod in zip(names[1:], others, strict=True):
            pod.start([*command, "--name", name], environment)
        return StartedOnPods(start_here([[*command, "--name", names[0]]], environment), others)

    def check(self, names: Sequence[str]) -> list[str]:
        """Return the pods that sent no heartbeat; `choose` raises from then on."""
        now, asked = time.monotonic(), {name: self._by_name[name] for name in names if name in self._by_name}
        while any(pod.is_here and pod.heard < now for pod in asked.values()) and time.monotonic() < now + PROBE_SECONDS:
            time.sleep(POLL_SECONDS)
        lost = [name for name, pod in asked.items() if not pod.is_here or pod.heard < now]
        self._lost.update(lost)
        return lost

    def leave_out(self, names: Sequence[str]) -> None:
        """Make `choose` raise from now on: there are no other nodes."""
        self._lost.update(names)

    # ---- connections ----

    def _wait_for_all(self) -> None:
        """Wait without a limit: the cluster schedules the pods, and `on_kubernetes` shows their state."""
        remind_at = time.monotonic() + REMIND_SECONDS
        while missing := [str(rank) for rank in range(1, self._count) if rank not in self._others]:
            if time.monotonic() > remind_at:
                log.info("waiting for pods %s of %d", ", ".join(missing), self._count)
                remind_at += REMIND_SECONDS
            time.sleep(POLL_SECONDS)

    def _name_all(self) -> None:
        """Name each pod after its node, whose disk it uses; append the rank if a node has several pods."""
        others = [self._others[rank] for rank in range(1, self._count)]
        nodes = [self._node, *(pod.node for pod in others)]
        names = [node if nodes.count(node) == 1 else f"{node}-{rank}" for rank, node in enumerate(nodes)]
        self._by_name = dict(zip(names[1:], others, strict=True))
        self._names = names

    def _is_awaited(self, who: str) -> bool:
        if who not in map(str, range(1, self._count)):
            return False
        return not (pod := self._others.get(int(who))) or not pod.is_here

    def _take_in(self, hello: dict[str, Any], channel: Channel) -> None:
        self._others[int(hello["who"])] = pod = Pod(str(hello.get("node")), channel)
        pod.listen()


def _own_address(config: Config) -> str:
    interface = config.site.network_interface
    return interface_address(interface) if interface else os.environ[POD_ADDRESS]
