"""Engines over the nodes of a job, for one command: all are brought together, and end with it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from posttrain.config.schema import Config
from posttrain.engines.secret import variables_of
from posttrain.launch.gathering import SETTLE_SECONDS, Gathering
from posttrain.launch.node_engines import secret_of_engines
from posttrain.launch.nodes import Nodes
from posttrain.processes import end_processes, start_child

log = logging.getLogger(__name__)


class ServingGang(Gathering):
    """A context manager around engines: all that it starts ends with the block.

    Args:
        config: Of the engines (`serving_config`).
        nodes: Where processes are started.
        names: The nodes, in the order of ranks.
        folder: Gets the logs.
        config_path: That configuration, seen by all nodes.
        checkpoint: In Hub layout, seen by all nodes.
    """

    def __init__(
        self, config: Config, nodes: Nodes, names: Sequence[str], folder: Path, config_path: Path, checkpoint: Path
    ):
        super().__init__(config, nodes, names, folder)
        self._config_path, self._checkpoint = config_path, checkpoint

    def run(self, command: Sequence[str]) -> int:
        """Start the engines, run a command that asks them, and return its exit code.

        Raises:
            AttemptFailedError: An engine or a node ended, or a node was not heard.
            CheckpointError: A node refuses what it should start.
        """
        self.gather()
        process = start_child(command, env={**os.environ, **self._start_engines()})
        try:
            while process.poll() is None:
                self._take_messages()
                self._check_members()
            deadline = time.monotonic() + SETTLE_SECONDS
            # Who asks an engine that is gone ends, too: what has ended there is the cause.
            while process.returncode and time.monotonic() < deadline:
                self._take_messages()
                self._check_members()
        finally:
            end_processes([process])
        return int(process.returncode)

    def _start_engines(self) -> Mapping[str, str]:
        """Start them, not ready yet; return what tells a process where they are."""
        members = [self._members[name] for name in self._names]
        for rank, member in enumerate(members):
            member.channel.send(
                "serve",
                rank=rank,
                addresses=[other.address for other in members],
                config_path=str(self._config_path),
                checkpoint=str(self._checkpoint),
                folder=str(self._folder),
                first_port=self._nodes.first_port,
            )
        self._wait_for_all("engines")
        urls = {int(index): url for member in members for index, url in member.messages["engines"]["urls"].items()}
        log.info("engines start on %s: %s", ", ".join(self._names), ", ".join(urls.values()))
        return variables_of([urls[index] for index in sorted(urls)], secret_of_engines(self._secret))
