"""Supervisors on nodes: started from here, heard, looked at and ended; what training and a preflight by itself share.

Which of several endings is the cause is decided here: where a node is gone, ranks on other nodes fail because of it,
and a rank that was killed takes others along.
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

# After the first bad message: what arrives in this time may be its cause.
SETTLE_SECONDS = 1.0
# Nodes have this long to end what they run: ranks, then engines, `processes.GRACE_SECONDS` each, and their families.
END_SECONDS = 25.0
NODE_LOST_ORDER = -1


class AttemptFailedError(RuntimeError):
    """An attempt ended before the training was done; another may do better.

    Args:
        reason: What happened, for people.
        suspects: Allocation that may be gone.
    """

    def __init__(self, reason: str, suspects: Sequence[str] = ()):
        super().__init__(reason)
        self._reason, self.suspects = reason, list(suspects)
        # Those of the suspects that are.
        self.lost_nodes: list[str] = []

    def __str__(self) -> str:
        return self._reason + (f"; lost: {', '.join(self.lost_nodes)}" if self.lost_nodes else "")


@dataclass
class Member:
    """A node of the gang.

    Args:
        name: Its name.
        address: Where others reach it.
        channel: To its supervisor.
        heard: When it last said something (monotonic seconds).
        messages: Its messages by kind, the last of each.
    """

    name: str
    address: str
    channel: Channel
    heard: float = field(default_factory=time.monotonic)
    messages: dict[str, dict[str, Any]] = field(default_factory=dict)

    def has_told(self, kind: str) -> bool:
        """Return whether it has sent such a message."""
        return kind in self.messages


class NodeGroup:
    """A context manager around supervisors of nodes: all that it starts ends with the block.

    Args:
        config: The resolved configuration.
        nodes: Where processes are started.
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
        # What does not end by now ends with its connection.
        for member in self._members.values():
            member.channel.close()
        self._started.end()

    def _are_gone(self) -> bool:
        return all(member.has_told("gone") for member in self._members.values())

    # ---- what all do ----

    def form_group(self) -> None:
        """Return when the supervisors of all nodes have reported.

        Raises:
            AttemptFailedError: Naming those that have not.
        """
        deadline = time.monotonic() + self._config.launch.node_start_timeout_seconds
        while missing := [name for name in self._names if name not in self._members]:
            self._take_messages()
            if not self._started.is_running() and self._inbox.empty():
                raise AttemptFailedError(f"supervisors of {', '.join(missing)} ended before they reported", missing)
            if time.monotonic() > deadline:
                raise AttemptFailedError(f"no supervisor started on {', '.join(missing)}", missing)

    def _assign(self, kind: str, **content: Any) -> list[Member]:
        """Assign each node its part; returns the nodes in the order of ranks."""
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
        """Inspect all nodes.

        Args:
            config_path: The resolved configuration, seen by all nodes.
            node_local: Where copies lie on a node's own disk, with `{node}` for its name.

        Raises:
            UnfitNodesError: Naming them.
            AttemptFailedError: A node was lost meanwhile.
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
        """Return when nodes have told something: all, or those of the names; whatever ends anywhere is noticed."""
        while not all(self._members[name].has_told(kind) for name in names or self._names):
            self._take_messages()
            meanwhile()
            self._check_members()

    def _check_members(self) -> None:
        """Raise where something has ended anywhere, a node refuses what it should do, or is not heard any more."""
        if any(member.has_told("ended") or member.has_told("gone") for member in self._members.values()):
            self._raise_cause()
        if refusal := next((m for m in self._members.values() if m.has_told("refused")), None):
            raise CheckpointError(self._with_node(refusal, refusal.messages["refused"]["reason"]))
        self._check_silence()

    # ---- what nodes say ----

    def _take_messages(self) -> None:
        """Wait a little for messages, and file them with the nodes that sent them."""
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
        # Where this process itself stood still, what was said meanwhile has yet to be taken.
        if silent and self._inbox.empty():
            raise AttemptFailedError(f"nothing was heard of {', '.join(silent)} for {limit:g} s", silent)

    def _raise_cause(self) -> None:
        """Wait for what else comes in, and raise the likeliest cause of all of it.

        Raises:
            AttemptFailedError: Another attempt may do better.
            CheckpointError: It would not.
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
            raise CheckpointError(reason)
        raise AttemptFailedError(reason, suspects)

    def _with_node(self, member: Member, reason: str) -> str:
        return reason if len(self._names) == 1 else f"on {member.name}: {reason}"

    def _listen(self, hello: dict[str, Any], channel: Channel) -> None:
        """Pass on what one node says."""
        name = hello["who"]
        self._inbox.put((name, {**hello, "channel": channel}))
        for message in channel.messages():
            self._inbox.put((name, message))
        self._inbox.put((name, {"kind": "gone"}))
