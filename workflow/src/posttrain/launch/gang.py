"""One attempt of a training job: the head starts a supervisor on every node, brings them together and listens.

A node tells the head who it is, then which engines it has started, then what has ended. The head tells a node its part,
then where everybody is, then that the attempt is over. Which of several endings is the cause is decided here: where a
node is gone, ranks on other nodes fail because of it, and a rank that was killed takes others along.
"""

from __future__ import annotations

import logging
import queue
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.artifacts.lease import Lease
from posttrain.config.schema import Config
from posttrain.errors import CheckpointError
from posttrain.launch.channel import POLL_SECONDS, TOKEN_VARIABLE, Channel
from posttrain.launch.hang import HangWatch, Position, describe_stacks
from posttrain.launch.inspection import UnfitNodesError, inspect, must_inspect
from posttrain.launch.job import TrainingJob
from posttrain.launch.nodes import Nodes
from posttrain.launch.time_to_save import TimeToSave

log = logging.getLogger(__name__)

# After the first bad news: what arrives in this time may be its cause.
SETTLE_SECONDS = 1.0
# Nodes have this long to end what they run.
END_SECONDS = 25.0
STACKS_SECONDS = 10.0
NODE_LOST_ORDER = -1


class AttemptFailedError(RuntimeError):
    """An attempt ended before the training was done; another may do better.

    Args:
        reason: What happened, for people.
        suspects: Nodes that may be gone.
    """

    def __init__(self, reason: str, suspects: Sequence[str] = ()):
        super().__init__(reason)
        self._reason, self.suspects = reason, list(suspects)
        # Those of the suspects that are.
        self.lost_nodes: list[str] = []

    def __str__(self) -> str:
        return self._reason + (f"; lost: {', '.join(self.lost_nodes)}" if self.lost_nodes else "")


class HangError(AttemptFailedError):
    """Ranks that did not move were ended."""


class EndedEarlyError(RuntimeError):
    """Training was asked to end, has saved, and has steps left."""


@dataclass
class Member:
    """A node of the gang.

    Args:
        name: Its name.
        address: Where others reach it.
        channel: To its supervisor.
        heard: When it last said something (monotonic seconds).
        news: Its messages by kind, the last of each.
    """

    name: str
    address: str
    channel: Channel
    heard: float = field(default_factory=time.monotonic)
    news: dict[str, dict[str, Any]] = field(default_factory=dict)

    def has_told(self, kind: str) -> bool:
        """Tell whether it has sent such a message."""
        return kind in self.news


class Gang:
    """A context manager around one attempt: all that it starts ends with the block.

    Args:
        job: What is trained.
        config: The resolved configuration.
        nodes: Where processes are started.
        names: The nodes of this attempt, in the order of ranks.
        folder: Logs of the attempt.
        lease: Held by this process.
        fit: Nodes that need no preflight; those that have passed it are added.
    """

    def __init__(
        self,
        job: TrainingJob,
        config: Config,
        nodes: Nodes,
        names: Sequence[str],
        folder: Path,
        lease: Lease,
        fit: set[str],
    ):
        self._job, self._config, self._nodes, self._names = job, config, nodes, list(names)
        self._folder, self._lease, self._fit = folder, lease, fit
        self._token = secrets.token_hex(16)
        self._inbox: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue()
        self._members: dict[str, Member] = {}
        self._is_ending = False
        # When the first step began; None before.
        self.first_step_unix: float | None = None
        self._hang_watch = HangWatch(config.launch.hang_timeout_seconds)
        self._time_to_save = TimeToSave(config)

    def __enter__(self) -> Gang:
        self._listener = socket.create_server((self._nodes.address, 0), backlog=len(self._names))
        threading.Thread(target=self._accept, daemon=True).start()
        address = f"{self._nodes.address}:{self._listener.getsockname()[1]}"
        module = (sys.executable, "-m", "posttrain.launch.node")
        command = [*module, "--head", address, "--log-folder", str(self._folder)]
        token = {TOKEN_VARIABLE: self._token}
        self._started = self._nodes.start(self._names, command, token, self._folder / "start.log")
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # a thread waits in accept()
        self._listener.close()
        for member in self._members.values():
            member.channel.send("stop")
        deadline = time.monotonic() + END_SECONDS
        while self._started.is_running() and not self._are_gone() and time.monotonic() < deadline:
            self._take_news()
        # What does not end by now ends with its connection.
        for member in self._members.values():
            member.channel.close()
        self._started.end()

    def _are_gone(self) -> bool:
        return all(member.has_told("gone") for member in self._members.values())

    def run(self) -> None:
        """Return when all ranks are done.

        Raises:
            AttemptFailedError: Something ended early.
            EndedEarlyError: The job's time is over; all is saved.
            UnfitNodesError: Nodes should not train.
            CheckpointError: A node refuses what it should load; another attempt would not help.
        """
        self._gather()
        if must_inspect(self._config, self._names) and not self._fit.issuperset(self._names):
            self._inspect()
            self._fit.update(self._names)
        self._assign()
        self._wait_for_all("engines")
        self._train()
        self._wait_for_all("done", self._watch)
        if any(member.news["done"]["saved"] for member in self._members.values()):
            raise EndedEarlyError("it was asked to end, and saved at the end of its step")

    # ---- the stages ----

    def _gather(self) -> None:
        deadline = time.monotonic() + self._config.launch.node_start_timeout_seconds
        while missing := [name for name in self._names if name not in self._members]:
            self._take_news()
            if not self._started.is_running() and self._inbox.empty():
                raise AttemptFailedError(f"supervisors of {', '.join(missing)} ended before they reported", missing)
            if time.monotonic() > deadline:
                raise AttemptFailedError(f"no supervisor started on {', '.join(missing)}", missing)

    def _inspect(self) -> None:
        deadline = time.monotonic() + self._config.launch.preflight_timeout_seconds

        def check_time(kind: str) -> None:
            if time.monotonic() > deadline:
                late = [name for name in self._names if not self._members[name].has_told(kind)]
                limit = f"no answer within {self._config.launch.preflight_timeout_seconds:g} s ({kind})"
                raise UnfitNodesError({name: [limit] for name in late})

        def ask(kind: str, **content: Any) -> dict[str, dict[str, Any]]:
            for member in self._members.values():
                member.channel.send(kind, names=self._names, job=self._job.as_dict(), **content)
            self._wait_for_all(kind, lambda: check_time(kind))
            return {name: self._members[name].news[kind] for name in self._names}

        inspect(ask, self._config, {name: self._members[name].address for name in self._names}, self._folder)

    def _assign(self) -> None:
        members = [self._members[name] for name in self._names]
        for rank, member in enumerate(members):
            member.channel.send(
                "assign",
                rank=rank,
                names=self._names,
                addresses=[other.address for other in members],
                job=self._job.as_dict(),
                folder=str(self._folder),
                first_port=self._nodes.first_port,
            )

    def _train(self) -> None:
        urls = {int(i): url for m in self._members.values() for i, url in m.news["engines"]["urls"].items()}
        order = {
            "engines": [urls[index] for index in sorted(urls)],
            "rendezvous": self._members[self._names[0]].news["engines"]["rendezvous"],
            "lease": {"folder": str(self._lease.folder), "epoch": self._lease.epoch},
        }
        for member in self._members.values():
            member.channel.send("train", **order)

    def _watch(self) -> None:
        self._end_in_time()
        told = [m.news["positions"]["ranks"].items() for m in self._members.values() if m.has_told("positions")]
        positions = {int(rank): Position(**where) for ranks in told for rank, where in ranks if where}
        if positions:
            self._time_to_save.look(max(position.step for position in positions.values()))
        if positions and self.first_step_unix is None:
            self.first_step_unix = time.time() - max(position.seconds for position in positions.values())
        if found := self._hang_watch.look(positions):
            raise HangError(f"training hangs: {found}; waiting: {self._ask_for_stacks()}")

    def _ask_for_stacks(self) -> str:
        """Return in which collective each rank waits, for people."""
        for member in self._members.values():
            member.channel.send("stacks")
        deadline = time.monotonic() + STACKS_SECONDS
        while not all(m.has_told("stacks") for m in self._members.values()) and time.monotonic() < deadline:
            self._take_news()
        answers = {m.name: m.news.get("stacks", {}).get("ranks", {}) for m in self._members.values()}
        stacks = {int(rank): stack for ranks in answers.values() for rank, stack in ranks.items()}
        return describe_stacks(stacks, {int(rank): name for name, ranks in answers.items() for rank in ranks})

    def _end_in_time(self) -> None:
        """Ask for a save at the step's end, once, when a node was asked to end or the scheduler is about to do it."""
        if self._is_ending:
            return
        asked = any(member.has_told("asked_to_end") for member in self._members.values())
        if asked or self._nodes.end_is_near(self._time_to_save.seconds):
            log.warning(
                "training is asked to save and end: %s", "by a signal" if asked else "the job's time is over soon"
            )
            self._is_ending = True
            self._members[self._names[0]].channel.send("save")

    def _wait_for_all(self, kind: str, meanwhile: Callable[[], None] = lambda: None) -> None:
        while not all(member.has_told(kind) for member in self._members.values()):
            self._take_news()
            meanwhile()
            if any(member.has_told("ended") or member.has_told("gone") for member in self._members.values()):
                self._raise_cause()
            if refusal := next((m for m in self._members.values() if m.has_told("refused")), None):
                raise CheckpointError(self._with_node(refusal, refusal.news["refused"]["reason"]))
            self._check_silence()

    # ---- news ----

    def _take_news(self) -> None:
        """Wait a little for messages, and file them with the nodes that sent them."""
        try:
            name, message = self._inbox.get(timeout=POLL_SECONDS)
        except queue.Empty:
            return
        if message["kind"] == "hello":
            self._members[name] = Member(name, message["address"], message["channel"])
        member = self._members[name]
        member.heard = time.monotonic()
        member.news[message["kind"]] = message

    def _check_silence(self) -> None:
        limit = self._config.launch.node_silence_seconds
        silent = [m.name for m in self._members.values() if time.monotonic() - m.heard > limit]
        # Where this process itself stood still, what was said meanwhile has yet to be taken.
        if silent and self._inbox.empty():
            raise AttemptFailedError(f"nothing was heard of {', '.join(silent)} for {limit:g} s", silent)

    def _raise_cause(self) -> None:
        """Wait for what else comes in, and raise the likeliest cause of all of it."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < deadline:
            self._take_news()
        found = []
        for member in self._members.values():
            if member.has_told("gone") and not member.has_told("done"):
                found.append((NODE_LOST_ORDER, f"the supervisor of {member.name} is gone", [member.name]))
            for ending in member.news.get("ended", {}).get("endings", []):
                found.append((ending["order"], self._with_node(member, ending["reason"]), []))
        _, reason, suspects = min(found, key=lambda item: item[0])
        raise AttemptFailedError(reason, suspects)

    def _with_node(self, member: Member, reason: str) -> str:
        return reason if len(self._names) == 1 else f"on {member.name}: {reason}"

    # ---- connections ----

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._listen, args=(Channel(connection),), daemon=True).start()

    def _listen(self, channel: Channel) -> None:
        """Pass on what one node says; who does not know the token is not listened to."""
        messages = channel.messages()
        hello = next(messages, {})
        name = hello.get("name")
        if hello.get("kind") != "hello" or hello.get("token") != self._token or name not in self._names:
            channel.close()
            return
        self._inbox.put((name, {**hello, "channel": channel}))
        for message in messages:
            self._inbox.put((name, message))
        self._inbox.put((name, {"kind": "gone"}))
