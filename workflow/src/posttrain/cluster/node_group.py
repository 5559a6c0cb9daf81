"""Starts, monitors and ends the supervisors of nodes; the base of training attempts, preflights and one-shot jobs.

It also decides which of several endings is the cause: a lost node makes ranks on other nodes fail, and so does a killed
rank.
"""

from __future__ import annotations

import queue
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from posttrain.cluster.channel import POLL_SECONDS, Channel
from posttrain.cluster.handshake import SECRET_VARIABLE, Reception
from posttrain.cluster.inspection import UnfitNodesError, inspect
from posttrain.cluster.nodes import Allocation
from posttrain.cluster.ranks import Ending
from posttrain.config.schema import Config
from posttrain.errors import CheckpointError

# Time to wait for further messages after the first failure, because a later one may be its cause.
SETTLE_SECONDS = 1.0
# Time in which nodes end ranks, then engines (`processes.GRACE_SECONDS` each) and their child processes.
END_SECONDS = 25.0
NODE_LOST_ORDER = -1


class AttemptFailedError(RuntimeError):
    """An attempt ended before training was done; another attempt may succeed.

    Args:
        reason: Why it ended.
        suspects: Nodes that may be lost.
    """

    def __init__(self, reason: str, suspects: Sequence[str] = ()):
        super().__init__(reason)
        self._reason, self.suspects = reason, list(suspects)
        # The suspects that are lost.
        self.lost_nodes: list[str] = []

    def __str__(self) -> str:
        return self._reason + (f"; lost: {', '.join(self.lost_nodes)}" if self.lost_nodes else "")


@dataclass
class Member:
    """A node of the gang.

    Args:
        name: The node's name.
        address: The node's address for other nodes.
        channel: Connection to the node's supervisor.
        heard: Time of the node's last message (monotonic seconds).
        messages: The last message of each kind.
    """

    name: str
    address: str
    channel: Channel
    heard: float = field(default_factory=time.monotonic)
    messages: dict[str, dict[str, Any]] = field(default_factory=dict)

    def has_told(self, kind: str) -> bool:
        """Return whether the node has sent a message of this kind."""
        return kind in self.messages


class NodeGroup:
    """A context manager around supervisors of nodes; their processes end with the block.

    Args:
        config: The resolved configuration.
        nodes: The allocation that starts processes.
        names: The nodes, in the order of ranks.
        folder: Gets the logs.
    """

    def __init__(self, config: Config, nodes: Allocation, names: Sequence[str], folder: Path):
        self._config, self._nodes, self._names, self._folder = config, nodes, list(names), folder
        self._secret = secrets.token_hex(32)
        self._inbox: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue()
        self._members: dict[str, Member] = {}

    def __enter__(self) -> Self:
        self._reception = Reception(self._nodes.address, self._secret, self._names.__contains__, self._listen)
        module = (sys.executable, "-m", "posttrain.cluster.node")
        command = [*module, "--head", self._reception.address, "--log-folder", str(self._folder)]
        secret = {SECRET_VARIABLE: self._secret}
        self._started = self._nodes.start(self._names, command, secret, self._folder / "start.log")
        return self

    def __exit__(self, *_: object) -> None:
        self._reception.close()
        for member in self._members.values():
            member.channel.send("stop")
        deadline = time.monotonic() + END_SECONDS
        while self._started.is_running() and not self._are_gone() and time.monotonic() < deadline:
            self._take_messages()
        # Supervisors that still run end when their connection closes.
        for member in self._members.values():
            member.channel.close()
        self._started.end()

    def _are_gone(self) -> bool:
        return all(member.has_told("gone") for member in self._members.values())

    # ---- requests to all nodes ----

    def form_group(self) -> None:
        """Wait until the supervisors of all nodes have connected.

        Raises:
            AttemptFailedError: A supervisor did not connect; the message names its node.
        """
        deadline = time.monotonic() + self._config.launch.node_start_timeout_seconds
        while missing := [name for name in self._names if name not in self._members]:
            self._take_messages()
            if not self._started.is_running() and self._inbox.empty():
                raise AttemptFailedError(f"supervisors of {', '.join(missing)} ended before they reported", missing)
            if time.monotonic() > deadline:
                raise AttemptFailedError(f"no supervisor started on {', '.join(missing)}", missing)

    def _assign(self, kind: str, **content: Any) -> list[Member]:
        """Send each node its assignment; return the members in the order of ranks."""
        members = [self._members[name] for name in self._names]
        same = {
            "addresses": [member.address for member in members],
            "folder": str(self._folder),
            "first_port": self._nodes.first_port,
        }
        for rank, member in enumerate(members):
            member.channel.send(kind, rank=rank, **same, **content)
        return members

    def inspect(self, config_path: Path, node_local: Path) -> None:
        """Run the preflight on all nodes.

        Args:
            config_path: The resolved configuration, seen by all nodes.
            node_local: Folder of copies on a node's own disk, with `{node}` for the node's name.

        Raises:
            UnfitNodesError: Some nodes are unfit.
            AttemptFailedError: A node was lost during the preflight.
        """
        job = {"config_path": str(config_path), "node_local": str(node_local)}
        deadline = time.monotonic() + self._config.launch.preflight_timeout_seconds

        def check_time(kind: str) -> None:
            if time.monotonic() > deadline:
                late = [name for name in self._names if not self._members[name].has_told(kind)]
                limit = f"no answer within {self._config.launch.preflight_timeout_seconds:g} s ({kind})"
                raise UnfitNodesError({name: [limit] for name in late})

        def ask(kind: str, **content: Any) -> dict[str, dict[str, Any]]:
            for member in self._members.values():
                member.channel.send(kind, names=self._names, **job, **content)
            self._wait_for_all(kind, lambda: check_time(kind))
            return {name: self._members[name].messages[kind] for name in self._names}

        inspect(ask, self._config, {name: self._members[name].address for name in self._names}, self._folder)

    def _wait_for_all(
        self, kind: str, meanwhile: Callable[[], None] = lambda: None, names: Sequence[str] | None = None
    ) -> None:
        """Wait until all nodes, or the given ones, have sent a message; raise if anything ends on any node."""
        while not all(self._members[name].has_told(kind) for name in names or self._names):
            self._take_messages()
            meanwhile()
            self._check_members()

    def _check_members(self) -> None:
        """Raise if anything ended, or if a node rejected its assignment or is silent."""
        if any(member.has_told("ended") or member.has_told("gone") for member in self._members.values()):
            self._raise_cause()
        if refusal := next((m for m in self._members.values() if m.has_told("refused")), None):
            raise CheckpointError("node-refused", self._with_node(refusal, refusal.messages["refused"]["reason"]))
        self._check_silence()

    # ---- messages from nodes ----

    def _take_messages(self) -> None:
        """Wait at most one poll interval for a message, and store it with its sender."""
        try:
            name, message = self._inbox.get(timeout=POLL_SECONDS)
        except queue.Empty:
            return
        if message["kind"] == "hello":
            self._members[name] = Member(name, message["address"], message["channel"])
        member = self._members[name]
        member.heard = time.monotonic()
        member.messages[message["kind"]] = message

    def _check_silence(self) -> None:
        limit = self._config.launch.node_silence_seconds
        silent = [m.name for m in self._members.values() if time.monotonic() - m.heard > limit]
        # If this process itself was suspended, messages may wait in the inbox.
        if silent and self._inbox.empty():
            raise AttemptFailedError(f"nothing was heard of {', '.join(silent)} for {limit:g} s", silent)

    def _raise_cause(self) -> None:
        """Wait for further messages, then raise the likeliest cause.

        Raises:
            AttemptFailedError: Another attempt may succeed.
            CheckpointError: Another attempt would fail, too.
        """
        deadline = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < deadline:
            self._take_messages()
        found = []
        for member in self._members.values():
            if member.has_told("gone") and not member.has_told("done"):
                found.append((NODE_LOST_ORDER, f"the supervisor of {member.name} is gone", [member.name]))
            for ending in member.messages.get("ended", {}).get("endings", []):
                found.append((ending["order"], self._with_node(member, ending["reason"]), []))
        order, reason, suspects = min(found, key=lambda item: item[0])
        if order == Ending.REFUSED:
            raise CheckpointError("node-refused", reason)
        raise AttemptFailedError(reason, suspects)

    def _with_node(self, member: Member, reason: str) -> str:
        return reason if len(self._names) == 1 else f"on {member.name}: {reason}"

    def _listen(self, hello: dict[str, Any], channel: Channel) -> None:
        """Put one node's messages into the inbox."""
        name = hello["who"]
        self._inbox.put((name, {**hello, "channel": channel}))
        for message in channel.messages():
            self._inbox.put((name, message))
        self._inbox.put((name, {"kind": "gone"}))
