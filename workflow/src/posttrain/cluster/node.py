"""The supervisor of one node: `python -m posttrain.cluster.node`, started by the gang's head.

It runs the preflight's measurements, prepares the node's copy of the weights, and starts engines and trainer ranks, or
only engines for an evaluation, or only calibration ranks. It reports to the head when one of them ends. It ends them
when the head sends "stop" or disconnects. One supervisor serves one attempt.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from posttrain import cli
from posttrain.cluster.calibration_ranks import run_ranks
from posttrain.cluster.channel import POLL_SECONDS
from posttrain.cluster.flight_recorder import ANSWER_SECONDS
from posttrain.cluster.handshake import SECRET_VARIABLE, join
from posttrain.cluster.head import BEAT_SECONDS, EndedByHead, Head
from posttrain.cluster.job import TrainingJob
from posttrain.cluster.node_engines import (
    RENDEZVOUS_OFFSET,
    NodeEngines,
    ended_engines,
    report,
    secret_of_engines,
    serve,
    wait_for_the_end,
)
from posttrain.cluster.node_inspection import NodeInspection
from posttrain.cluster.ranks import Ending, RankProcess, Rendezvous, running_ranks
from posttrain.config.derived import engines_load, trainer_nodes
from posttrain.config.load import load_resolved
from posttrain.config.schema import Config
from posttrain.errors import CheckpointError, ConfigError, explain
from posttrain.plan.preflight.machine import check_open_files
from posttrain.plan.preflight.report import raise_problems
from posttrain.report.logging import LOG_VARIABLE
from posttrain.report.rank_progress import ROLLOUT
from posttrain.rl.engines.ports import choose_free_ports
from posttrain.rl.engines.process import EngineProcess, started_engines
from posttrain.rl.training import graceful_shutdown

log = logging.getLogger(__name__)

# Messages that assign a node its part.
ASSIGNMENTS = ("assign", "serve", "calibrate")
# Restarts of one engine in one step.
MOST_RESTARTS = 3
# By then the phase "rollout" has reached this node: it travels from the ranks to their node, the head and here.
NEWS_SECONDS = 1.0


class NodeSupervisor:
    """One attempt on one node.

    Args:
        head: Connection to the head.
        assignment: The head's assignment: job, rank, names, addresses, folder.
        secret: The gang's secret.
    """

    def __init__(self, head: Head, assignment: dict[str, Any], secret: str):
        self._head, self._engine_secret = head, secret_of_engines(secret)
        self._job = TrainingJob.from_dict(assignment["job"])
        self._config: Config = load_resolved(self._job.config_path)
        raise_problems([check_open_files(self._config)])
        self._rank, self._names, self._addresses = int(assignment["rank"]), assignment["names"], assignment["addresses"]
        self._folder, self._first_port = Path(assignment["folder"]), int(assignment["first_port"])
        self._weights = self._job.weights_of(self._config, self._rank, self._names[self._rank])
        self._finished = int(assignment["finished"])
        # Engines can start without weights if the trainer sends all weights before the first rollout: in a resumed run,
        # and if the engines slept while the trainer loaded.
        self._starts_empty = self._finished > 0 or not engines_load(self._config)
        self._engines = NodeEngines(self._config, self._rank, self._addresses, self._first_port)
        # (engine's URL, step) -> restarts.
        self._restarts: Counter[tuple[str, int]] = Counter()

    def run(self) -> None:
        """Run this node's part of the attempt.

        Raises:
            EndedByHead: The head ended the attempt.
        """
        folder, secret = self._folder, self._engine_secret
        with (
            self._prepared_weights(),
            started_engines(self._engines.commands(self._model_folder, self._starts_empty), folder, secret) as engines,
        ):
            self._head.tell("engines", urls=self._engines.urls, rendezvous=self._rendezvous_port())
            start = self._wait_for_start(engines)
            if self._rank >= trainer_nodes(self._config):
                self._serve(engines)
            rendezvous = Rendezvous(self._addresses[0], int(start["rendezvous"]))
            command = self._rank_command(start["engines"], start["lease"])
            with running_ranks(self._config, self._rank, command, rendezvous, folder, secret) as ranks:
                self._watch(engines, ranks)

    # ---- weights ----

    @contextmanager
    def _prepared_weights(self) -> Iterator[None]:
        if self._finished:
            yield
            return
        with self._weights.in_use():
            self._weights.prepare()
            yield

    @property
    def _model_folder(self) -> Path:
        """Checkpoint folder of the engines: config, tokenizer and, unless they start empty, weights."""
        rollout = self._weights.rollout
        return rollout.folder if self._finished else self._weights.folder_of(rollout)

    # ---- engines ----

    def _wait_for_start(self, engines: Sequence[EngineProcess]) -> dict[str, Any]:
        while (message := self._head.next_message(POLL_SECONDS)) is None:
            report(self._head, ended_engines(engines))
        assert message["kind"] == "train", message
        return message

    # ---- ranks ----

    def _rendezvous_port(self) -> int:
        first = self._first_port and self._first_port + RENDEZVOUS_OFFSET
        return choose_free_ports(1, self._addresses[self._rank], first)[0]

    def _rank_command(self, engine_urls: Sequence[str], lease: dict[str, Any]) -> list[str]:
        return [
            *("--config", str(self._job.config_path)),
            *self._job.arguments,
            *("--torch-dist", str(self._weights.folder_of(self._weights.torch_dist))),
            *("--model-folder", str(self._model_folder)),
            *("--finished", str(self._finished)),
            *(word for url in engine_urls for word in ("--engine", url)),
            *("--lease-folder", lease["folder"], "--epoch", str(lease["epoch"])),
        ]

    def _serve(self, engines: Sequence[EngineProcess]) -> NoReturn:
        """Watch the engines of a node without ranks; the head sends the ranks' phase."""
        position: dict[str, Any] | None = None
        last_well = time.monotonic()
        while True:
            message = self._head.next_message(POLL_SECONDS)
            if message and message["kind"] == "phase":
                position = message["position"]
            elif message and message["kind"] == "silent":
                _end_silent(engines, message["url"])
            self._start_again(engines, {0: position})
            endings = ended_engines(engines)
            last_well = last_well if endings else time.monotonic()
            if time.monotonic() > last_well + NEWS_SECONDS:
                report(self._head, endings)

    def _watch(self, engines: Sequence[EngineProcess], ranks: Sequence[RankProcess]) -> None:
        next_report, before = 0.0, _places({})
        while any(rank.process.poll() is None for rank in ranks):
            message = self._head.next_message(POLL_SECONDS)
            if message and message["kind"] == "save":
                _ask_to_end(ranks)
            elif message and message["kind"] == "stacks":
                self._head.tell("stacks", ranks=_stacks(ranks), records=_records(ranks))
            elif message and message["kind"] == "silent":
                _end_silent(engines, message["url"])
            for url in filter(None, [rank.silent_engine() for rank in ranks]):
                self._head.tell("silent", url=url)
            positions = {rank.rank: rank.position() for rank in ranks}
            # Report a new phase at once: the first one marks the end of startup, and nodes without ranks restart
            # engines only in a rollout.
            if _places(positions) != before or time.monotonic() > next_report:
                next_report, before = time.monotonic() + BEAT_SECONDS, _places(positions)
                self._head.tell("positions", ranks=positions)
            self._start_again(engines, positions)
            report(self._head, [*ended_engines(engines), *_ended_ranks(ranks)])
        # A rank may have failed since the last poll.
        report(self._head, _ended_ranks(ranks))
        self._head.tell("done", saved=any(rank.has_saved for rank in ranks))
        wait_for_the_end(self._head)

    def _start_again(self, engines: Sequence[EngineProcess], positions: Mapping[int, dict[str, Any] | None]) -> None:
        """Restart engines that ended during a rollout, while rank 0 waits for them.

        In other phases the trainer may use their GPUs. Engines on several nodes are not restarted, because their other
        processes end with the attempt, nor are engines that were restarted `MOST_RESTARTS` times in this step.
        """
        if len(places := _places(positions)) != 1:
            return
        ((step, phase),) = places
        for engine in engines:
            num_before = self._restarts[engine.url, step]
            may_start = engine.url in self._engines.alone and num_before < MOST_RESTARTS
            if phase == ROLLOUT and engine.has_ended and may_start:
                self._restarts[engine.url, step] += 1
                log.warning("%s; it starts again", ended_engines([engine])[0].reason)
                engine.restart()


def _ask_to_end(ranks: Sequence[RankProcess]) -> None:
    """Signal rank 0, if it is on this node, to save at the end of its step and end; the other ranks follow."""
    for rank in ranks:
        if rank.rank == 0:
            rank.process.send_signal(signal.SIGUSR1)


def _places(positions: Mapping[int, dict[str, Any] | None]) -> set[tuple[int, str]]:
    """Return the (step, phase) pairs of the ranks."""
    return {(position["step"], position["phase"]) for position in positions.values() if position}


def _stacks(ranks: Sequence[RankProcess]) -> dict[int, str | None]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return dict(zip([rank.rank for rank in ranks], pool.map(RankProcess.stack, ranks), strict=True))


def _records(ranks: Sequence[RankProcess]) -> list[str]:
    """Dump the ranks' flight records, and return the files; none with gloo."""
    asked = [rank for rank in ranks if rank.ask_for_record()]
    deadline = time.monotonic() + ANSWER_SECONDS
    while not all(rank.record() for rank in asked) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return [str(path) for rank in ranks if (path := rank.record())]


def _end_silent(engines: Sequence[EngineProcess], url: str) -> None:
    """Kill the engine that does not answer, if it is on this node; its end is then handled like any other."""
    for engine in engines:
        if engine.url == url and not engine.has_ended:
            log.warning("the engine at %s does not answer any more: it is ended", url)
            engine.end_hard()


def _ended_ranks(ranks: Sequence[RankProcess]) -> list[Ending]:
    return [ending for rank in ranks if (ending := rank.ending())]


@contextmanager
def told_to(head: Head) -> Iterator[None]:
    """Report an error of this node to the head; errors of files or settings would recur in the next attempt."""
    try:
        yield
    except (CheckpointError, ConfigError, RuntimeError, OSError) as error:
        reason = explain(error) or str(error)
        log.error("%s", reason)
        head.tell("refused", reason=reason)
        wait_for_the_end(head)


def _end_at_once() -> None:
    """Kill this process, and with it its ranks and engines: they must not run without a head."""
    log.error("the head is gone")
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Connect to the head and run this node's assignment."""
    arguments = parse_arguments()
    secret = os.environ.pop(SECRET_VARIABLE)
    channel = join(arguments.head, secret, arguments.name)
    head = Head(channel, _end_at_once)
    try:
        with told_to(head):
            own_address, folder = channel.own_address, arguments.log_folder
            inspection = NodeInspection(arguments.name, own_address, folder, head.next_message, secret)
            while (message := head.next_message(POLL_SECONDS)) is None or message["kind"] not in ASSIGNMENTS:
                if message:
                    head.tell(message["kind"], **inspection.answer(message))
            if message["kind"] == "serve":
                serve(head, message, secret)
            if message["kind"] == "calibrate":
                run_ranks(head, message)
            NodeSupervisor(head, message, secret).run()
    except EndedByHead:
        channel.close()


def parse_arguments() -> argparse.Namespace:
    """Parse the command line that the head wrote."""
    return cli.command_line(
        __doc__,
        head=(str, "host:port of the head"),
        name={"default": os.environ.get("SLURMD_NODENAME", ""), "help": "this node's; SLURM's by default"},
        log_folder=(Path, "gets node-{name}.log"),
    )


if __name__ == "__main__":
    graceful_shutdown.block()  # before any other thread, which would receive the signal
    _arguments = parse_arguments()
    os.environ[LOG_VARIABLE] = str(_arguments.log_folder / f"node-{_arguments.name}.log")
    cli.run(main, role=f"node {_arguments.name}")
