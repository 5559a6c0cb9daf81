"""The engines of one node, or its parts of engines on several nodes, in training and in an evaluation."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from posttrain.cluster.channel import POLL_SECONDS
from posttrain.cluster.head import Head
from posttrain.cluster.placement import engines_on_node
from posttrain.cluster.ranks import Ending
from posttrain.config.derived import uses_queue
from posttrain.config.load import load_resolved
from posttrain.config.schema import Config
from posttrain.plan.flags.sglang_flags import PREFILL, nodes_per_engine
from posttrain.rl.engines.launch_command import EngineCommand, render_engine_command
from posttrain.rl.engines.ports import choose_free_ports
from posttrain.rl.engines.process import EngineProcess, engine_ports, started_engines

# Offsets in the job's hundred ports (`slurm`): engines begin at 0, then come the rendezvous of engines on several
# nodes, the bootstrap ports of prefill engines, and the ranks' rendezvous.
MEETING_OFFSET, BOOTSTRAP_OFFSET, RENDEZVOUS_OFFSET = 60, 80, 90


class NodeEngines:
    """Builds the launch commands of a node's engines.

    Args:
        config: The resolved configuration.
        rank: The node's number in the job.
        addresses: Addresses of all nodes.
        first_port: First port of the job; 0: use free ports.
    """

    def __init__(self, config: Config, rank: int, addresses: Sequence[str], first_port: int):
        self._config, self._rank, self._addresses, self._first_port = config, rank, addresses, first_port
        # URLs of engines whose first node this is, and URLs of engines on this node only.
        self.urls: dict[int, str] = {}
        self.alone: set[str] = set()

    def commands(self, model_folder: Path, without_weights: bool = False) -> dict[int, EngineCommand]:
        """Return engine index -> launch command.

        Args:
            model_folder: Checkpoint in Hub layout.
            without_weights: See `render_engine_command`.
        """
        parts, host = engines_on_node(self._config, self._rank), self._addresses[self._rank]
        # If nodes are pods on one host, parts of an engine that serve no requests must not use its first node's port.
        shift = max((part.node_rank for part in parts), default=0) % MEETING_OFFSET
        first = self._first_port and self._first_port + shift
        ports = engine_ports(self._config, [part.index for part in parts], host, first)
        prefills = [part.index for part in parts if part.role == PREFILL and part.node_rank == 0]
        bootstraps = choose_free_ports(len(prefills), host, self._first_port and self._first_port + BOOTSTRAP_OFFSET)
        commands = {}
        for part, port in zip(parts, ports, strict=True):
            meeting = f"{self._addresses[part.first_node]}:{self._first_port + MEETING_OFFSET + part.index}"
            commands[part.index] = render_engine_command(
                self._config,
                part.index,
                model_folder,
                host,
                port,
                part.node_rank,
                meeting,
                # A queue's requests are single responses, which an engine batches as they come.
                merge_requests=uses_queue(self._config),
                role=part.role,
                gpus=part.gpus,
                without_weights=without_weights,
                bootstrap_port=dict(zip(prefills, bootstraps, strict=True)).get(part.index, 0),
            )
            if part.node_rank == 0:
                self.urls[part.index] = commands[part.index].url
            if nodes_per_engine(self._config, part.role) == 1:
                self.alone.add(commands[part.index].url)
        return commands


def secret_of_engines(secret: str) -> str:
    """Return the engines' secret, which each node derives from the gang's secret."""
    return hmac.digest(secret.encode(), b"engines", "sha256").hex()


def serve(head: Head, assignment: dict[str, Any], secret: str) -> NoReturn:
    """Run this node's engines until the head ends the attempt.

    Raises:
        EndedByHead: The head ended the attempt.
    """
    config, folder = load_resolved(Path(assignment["config_path"])), Path(assignment["folder"])
    rank, addresses = int(assignment["rank"]), assignment["addresses"]
    of_node = NodeEngines(config, rank, addresses, int(assignment["first_port"]))
    commands = of_node.commands(Path(assignment["checkpoint"]))
    # An engine on several nodes has a log on each.
    with started_engines(commands, folder / f"node{rank}", secret_of_engines(secret)) as engines:
        head.tell("engines", urls=of_node.urls)
        while True:
            head.next_message(POLL_SECONDS)
            report(head, ended_engines(engines))


def ended_engines(engines: Sequence[EngineProcess]) -> list[Ending]:
    """Return the engines that ended."""
    endings = []
    for engine in engines:
        try:
            engine.check_alive()
        except RuntimeError as error:
            endings.append(Ending("engine", str(error), Ending.ENGINE))
    return endings


def report(head: Head, endings: Sequence[Ending]) -> None:
    """Report endings to the head, and wait for it to end the attempt."""
    if endings:
        head.tell("ended", endings=[ending.as_dict() for ending in endings])
        wait_for_the_end(head)


def wait_for_the_end(head: Head) -> NoReturn:
    """Wait until the head ends this attempt."""
    while True:
        head.next_message(POLL_SECONDS)
