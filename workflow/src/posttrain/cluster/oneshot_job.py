"""A job that its nodes run once together: calibration ranks, or engines for one command.

Nothing is retried inside the job. Each node sends the head its engines' URLs or a port for the ranks' rendezvous, and
later what has ended.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from posttrain.cluster.node_engines import secret_of_engines
from posttrain.cluster.node_group import SETTLE_SECONDS, AttemptFailedError, NodeGroup
from posttrain.cluster.processes import end_processes, start_child
from posttrain.cluster.site import find_nodes
from posttrain.config.load import Resolved, dump_resolved
from posttrain.rl.engines.secret import variables_of
from posttrain.store import write_text

log = logging.getLogger(__name__)


def config_path_of(folder: Path) -> Path:
    """Return the path of a gang's configuration, which all nodes see."""
    return folder / "config.resolved.yaml"


class OneshotJob(NodeGroup):
    """A context manager around the supervisors of nodes; see `NodeGroup`."""

    @classmethod
    @contextmanager
    def of_this_job(cls, resolved: Resolved, folder: Path) -> Iterator[Self]:
        """Start supervisors on the configured number of the job's nodes, and end them with the block.

        Args:
            resolved: The configuration of the nodes' work.
            folder: This job's own folder, seen by all nodes; gets the logs.

        Raises:
            AttemptFailedError: A node, engine or rank ended; `lost_nodes` names the lost nodes.
        """
        config = resolved.config
        write_text(config_path_of(folder), dump_resolved(resolved))
        nodes = find_nodes(config, folder)
        try:
            with cls(config, nodes, nodes.choose(config.nodes), folder) as job:
                yield job
        except AttemptFailedError as failure:
            failure.lost_nodes = nodes.check(failure.suspects)
            if failure.lost_nodes and config.site.launcher == "kubernetes":
                nodes.scheduler.requeue()
            raise

    def run_ranks(self, command: Sequence[str]) -> None:
        """Run calibration ranks until all are done.

        Args:
            command: Arguments of a rank, except the configuration.

        Raises:
            AttemptFailedError: A rank or a node ended, or a node is silent.
            CheckpointError: A rank rejects its input.
        """
        self.form_group()
        config_path = str(config_path_of(self._folder))
        members = self._assign("calibrate", config_path=config_path, command=["--config", config_path, *command])
        self._wait_for_all("meeting")
        for member in members:
            member.channel.send("meet", port=members[0].messages["meeting"]["port"])
        self._wait_for_all("done")

    def run_beside_engines(self, checkpoint: Path, command: Sequence[str]) -> int:
        """Start engines, run a command that queries them, and return its exit code.

        Args:
            checkpoint: The engines' checkpoint in Hub layout, seen by all nodes.
            command: Program and arguments.

        Raises:
            AttemptFailedError: An engine or a node ended, or a node is silent.
            CheckpointError: A node rejects the checkpoint or settings.
        """
        self.form_group()
        process = start_child(command, env={**os.environ, **self._start_engines(checkpoint)})
        try:
            while process.poll() is None:
                self._take_messages()
                self._check_members()
            deadline = time.monotonic() + SETTLE_SECONDS
            # A lost engine makes the command fail, too; the engine's end is the cause.
            while process.returncode and time.monotonic() < deadline:
                self._take_messages()
                self._check_members()
        finally:
            end_processes([process])
        return int(process.returncode)

    def _start_engines(self, checkpoint: Path) -> Mapping[str, str]:
        """Start the engines without waiting until they are ready; return their URLs as environment variables."""
        members = self._assign("serve", config_path=str(config_path_of(self._folder)), checkpoint=str(checkpoint))
        self._wait_for_all("engines")
        urls = {int(index): url for member in members for index, url in member.messages["engines"]["urls"].items()}
        log.info("engines start on %s: %s", ", ".join(self._names), ", ".join(urls.values()))
        return variables_of([urls[index] for index in sorted(urls)], secret_of_engines(self._secret))
