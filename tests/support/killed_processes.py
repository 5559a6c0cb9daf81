"""A training of the product's own ranks and engines, of which any process may be killed; the test is its supervisor.

Ranks, engines and a server of environments are forked off one process that has imported everything, so a kill costs a
second. Whatever they start works in the run's folder, by which it is found.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
from tests.support.forked_programs import ONE_THREAD, ForkedProgram
from tests.support.queued_trainings import start_ranks

from posttrain.config.derived import takes_turns, uses_queue
from posttrain.config.load import load_resolved
from posttrain.report.rank_progress import read_progress
from posttrain.rl.engines.launch_command import render_engine_command
from posttrain.rl.engines.ports import LOOPBACK, choose_free_ports
from posttrain.rl.engines.secret import SECRET_VARIABLE

SECRET, RUN = "secret", "run"
RANK, ENGINE, SERVER, WORKER, GRADER, SANDBOX = TARGETS = ("rank", "engine", "server", "worker", "grader", "sandbox")
# What the command line of a process that a rank or a server has started contains.
STARTED = {WORKER: "posttrain.rl.environments.worker", GRADER: "posttrain.rl.reward.worker", SANDBOX: "bwrap"}
# Between two kills, at most.
MOST_SECONDS = 3.0
# Most kills wait for the first step of an attempt, which takes much longer to start on a busy machine.
EARLY_SHARE = 0.2
START = "start"
# A sandbox is there for a tenth of a second, between turns.
APPEAR_SECONDS = 2.0
# What asks a dead engine gives up after 1.4 seconds.
RESTART_SECONDS = 4.0
# A process that follows a dead one ends at once; a busy machine may take longer.
GONE_SECONDS = 30.0
ATTEMPT_SECONDS = 300.0


class KilledTraining:
    """One training, in as many attempts as it takes.

    Args:
        folder: From `queued_trainings.prepare`.
        chance: Decides what is killed, and when.
        targets: What may be killed.
        num_ranks: Of the trainer.
        served: Arguments of `rl.environments.serve` without a port, which is `port`; empty if nothing is served.
        port: Of the served environments.
    """

    def __init__(
        self,
        folder: Path,
        chance: random.Random,
        targets: Sequence[str],
        num_ranks: int = 1,
        served: Sequence[str] = (),
        port: int = 0,
    ):
        self.folder, self.num_attempts = folder, 0
        self.kills, self.phases = Counter[str](), Counter[str]()
        self._chance, self._targets, self._num_ranks = chance, targets, num_ranks
        self._served, self._port = served, port
        self._config = load_resolved(folder / "config.yaml")
        self._engine_ports = choose_free_ports(self._config.engine.num_engines)
        self._programs: dict[tuple[str, int], ForkedProgram] = {}
        self._restarts: dict[tuple[str, int], float] = {}

    def attempt(self, num_kills: int) -> bool:
        """Start the ranks; kill processes until no kill is left or a rank has gone.

        Args:
            num_kills: At most so many.

        Returns:
            Whether the training has come to its end.
        """
        self.num_attempts += 1
        urls, progress = [self._url(port) for port in self._engine_ports], self.folder / f"progress-{self.num_attempts}"
        ranks = start_ranks(self.folder, RUN, urls, SECRET, self._num_ranks, progress)
        began, alarm, kills_before = time.monotonic(), _Alarm(self._chance), self.kills.copy()
        while all(rank.poll() is None for rank in ranks):
            here = read_progress(progress)
            if num_kills > (self.kills - kills_before).total() and alarm.rings(here is not None):
                self._kill_one(ranks, here.phase if here else START)
                alarm = _Alarm(self._chance)
            self._restart_servers()
            assert time.monotonic() - began < ATTEMPT_SECONDS, f"the ranks hang:\n{self._end(ranks)}"
            time.sleep(0.005)
        codes = [rank.poll() for rank in ranks]
        is_finished, is_killed = 0 in codes, -signal.SIGKILL in codes
        output = "".join(rank.communicate(ATTEMPT_SECONDS)[0] for rank in ranks) if is_finished else self._end(ranks)
        if takes_turns(self._config):
            self._end([self._programs.pop((ENGINE, port)) for port in self._engine_ports])
            self._restart_servers()
        self._check_nothing_is_left()
        if not is_finished and not is_killed:
            # An engine that dies while it gets weights ends the attempt.
            assert (self.kills - kills_before)[ENGINE], output[-6000:]
            assert any("engine" in error for error in output.split(" E posttrain.cli")[1:]), output[-6000:]
        return is_finished

    @contextmanager
    def servers(self) -> Iterator[None]:
        """Start engines and, if any, the server of environments.

        They outlive ranks, but for engines that may sleep: a rank cannot know which of their parts do.
        """
        try:
            self._restart_servers()
            yield
        finally:
            self._end(self._programs.values())
            self._check_nothing_is_left()

    def _kill_one(self, ranks: Sequence[ForkedProgram], phase: str) -> None:
        """Kill a process of the target that was killed least, which may have to appear; else of another one."""
        least = min(self.kills[target] for target in self._targets)
        wanted = self._chance.choice([target for target in self._targets if self.kills[target] == least])
        until = time.monotonic() + APPEAR_SECONDS
        while wanted not in (living := self._victims(ranks)) and time.monotonic() < until:
            time.sleep(0.005)
        target = wanted if wanted in living else self._chance.choice(sorted(living))
        with contextlib.suppress(psutil.NoSuchProcess):
            self._chance.choice(living[target]).kill()
            self.kills[target] += 1
            self.phases[phase] += 1

    def _victims(self, ranks: Sequence[ForkedProgram]) -> dict[str, list[psutil.Process]]:
        """Return what may be killed now; a target without a process is left out."""
        found: dict[str, list[psutil.Process]] = {target: [] for target in self._targets}
        programs = {(RANK, number): rank for number, rank in enumerate(ranks)} | self._programs
        for (target, _), program in programs.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(program.pid)
                found.get(target, []).append(process)
                for child in process.children(recursive=True):
                    found.get(_kind(child), []).append(child)
        return {target: processes for target, processes in found.items() if processes}

    def _restart_servers(self) -> None:
        """Start what has ended, as a supervisor does; the time that an engine needs for it differs between machines."""
        wanted = {(ENGINE, port): self._start_engine for port in self._engine_ports}
        wanted |= {(SERVER, self._port): self._start_server} if self._served else {}
        for key, start in wanted.items():
            program = self._programs.get(key)
            if program and program.poll() is None:
                continue
            if program:
                due = self._restarts.setdefault(key, time.monotonic() + self._chance.uniform(0, RESTART_SECONDS))
                if time.monotonic() < due:
                    continue
                del self._restarts[key]
                assert program.returncode == -signal.SIGKILL, program.communicate(10)[0]
                if key[0] == SERVER:
                    self._wait_until_gone(self.folder)
            self._programs[key] = start(key[1])

    def _start_engine(self, port: int) -> ForkedProgram:
        number = self._engine_ports.index(port)
        is_merged = uses_queue(self._config)
        command = render_engine_command(
            self._config, number, self.folder / "hf", LOOPBACK, port, merge_requests=is_merged
        )
        words, environment = command.argv[3:], {**os.environ, **ONE_THREAD, **command.env, SECRET_VARIABLE: SECRET}
        return ForkedProgram("posttrain.rl.engines.embedded", words, environment)

    def _start_server(self, port: int) -> ForkedProgram:
        words = [*self._served, "--port", str(port)]
        environment = {**os.environ, **ONE_THREAD}
        return ForkedProgram("posttrain.rl.environments.serve", words, environment, self.folder)

    def _url(self, port: int) -> str:
        return f"http://{LOOPBACK}:{port}"

    def _end(self, programs: Collection[ForkedProgram]) -> str:
        """Kill programs; returns what they have printed."""
        for program in programs:
            program.kill()
        return "\n".join(program.communicate(60)[0] for program in programs)

    def _check_nothing_is_left(self) -> None:
        """No worker, grader or sandbox outlives its rank."""
        self._wait_until_gone(self.folder / RUN)

    def _wait_until_gone(self, folder: Path) -> None:
        until = time.monotonic() + GONE_SECONDS
        while left := processes_in(folder):
            assert time.monotonic() < until, f"left over: {left}"
            time.sleep(0.02)


class _Alarm:
    """Rings once: some time after it is set or, for most, after the first step has begun."""

    def __init__(self, chance: random.Random):
        self._seconds = chance.uniform(0, MOST_SECONDS)
        self._since = time.monotonic() if chance.random() < EARLY_SHARE else None

    def rings(self, has_begun: bool) -> bool:
        """Whether it rings now."""
        if has_begun and self._since is None:
            self._since = time.monotonic()
        return self._since is not None and time.monotonic() > self._since + self._seconds


def processes_in(folder: Path) -> Mapping[int, list[str]]:
    """Return the processes that work in a folder, with their command lines."""
    found = dict[int, list[str]]()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = process.cmdline()
    return found


def _kind(process: psutil.Process) -> str:
    """Return the target that a process is, "" for none."""
    with contextlib.suppress(psutil.NoSuchProcess):
        if kind := _started(process):
            return kind
        parent = process.parent()
        # The end of the first process inside is the sandbox's; that of others is their program's.
        return SANDBOX if parent and _started(parent) == SANDBOX else ""
    return ""


def _started(process: psutil.Process) -> str:
    line = process.cmdline()
    return next((kind for kind, word in STARTED.items() if any(part.endswith(word) for part in line[:6])), "")
