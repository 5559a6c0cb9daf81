"""Opens environments in worker processes: one that hangs or crashes costs its own episode, or those of its process.

An environment that awaits too long is cancelled. One that blocks its process cannot be, so the process is ended, and
the other episodes in it fail, too. A process in which memory, files or threads remain gets no new environment and ends
with its last one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from posttrain.config.own_environment import OwnEnvironment, inspect_environment, is_own
from posttrain.config.sandbox import SandboxSettings
from posttrain.config.schema import Config
from posttrain.rl.environments.answers import actions_of, observation_of, reward_of, start_of
from posttrain.rl.environments.protocol import EnvironmentFailure, EpisodeReward, Message, Observation, Start
from posttrain.rl.environments.worker_process import WorkerProcess

log = logging.getLogger(__name__)

# The module and class of each environment of ours.
BUILT_IN: Mapping[str, tuple[str, str]] = {
    "calculator": ("posttrain.rl.environments.calculator", "Calculator"),
    "python": ("posttrain.rl.environments.python_tool", "PythonTool"),
}
# Those that run programs in a sandbox, whose settings they are made with.
SANDBOXED = ("python",)


class EnvironmentPool:
    """Worker processes of one kind of environment, which are started when they are needed; used in one event loop.

    Args:
        source: What workers import, see `rl.environments.worker.main`.
        deadline_seconds: Time limit of one call.
        num_workers: Processes.
        memory_bytes: Limit on memory that a worker maps beyond that at its start.
    """

    def __init__(
        self,
        source: Mapping[str, str],
        deadline_seconds: float = 60.0,
        num_workers: int = 2,
        memory_bytes: int = 4 << 30,
    ):
        self._source, self._deadline = source, deadline_seconds
        self._num_workers, self._memory = num_workers, memory_bytes
        self._workers: list[WorkerProcess] = []
        self._numbers = itertools.count()
        self._told: set[str] = set()
        self._is_closed = False

    @classmethod
    def of(cls, config: Config) -> EnvironmentPool:
        """Return the pool for a configuration.

        Raises:
            ConfigError: The user's environment cannot be read.
            RuntimeError: It has changed since the run was planned.
        """
        settings = config.environment
        memory_bytes = int(settings.memory_gib * 2**30)
        return cls(source_of(config), settings.deadline_seconds, settings.num_workers, memory_bytes)

    def __enter__(self) -> EnvironmentPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closed = True
        for worker in self._workers:
            worker.end("the environments have ended")
        for worker in self._workers:
            worker.wait()

    async def open(self, seed: int) -> PooledEnvironment:
        """See `Environments`; the worker with the fewest environments takes it."""
        if self._is_closed:
            raise EnvironmentFailure("crash", "the environments have ended")
        worker = self._least_loaded()
        environment = PooledEnvironment(worker, next(self._numbers), self._deadline)
        try:
            await worker.start()
            await worker.call(environment.number, "open", seed, self._deadline)
        except BaseException:
            environment.abandon()
            raise
        return environment

    def _least_loaded(self) -> WorkerProcess:
        """Return the worker for the next environment; one without environments comes before a new process."""
        for worker in self._workers:
            if worker.left and worker.left not in self._told:
                self._told.add(worker.left)
                log.warning("environments left %s behind: their process is replaced", worker.left)
        self._workers = [worker for worker in self._workers if worker.is_there]
        usable = [worker for worker in self._workers if worker.takes_more]
        if len(usable) < self._num_workers and all(worker.instances for worker in usable):
            usable = [WorkerProcess(self._source, self._memory)]
            self._workers += usable
        return min(usable, key=lambda worker: len(worker.instances))


class PooledEnvironment:
    """An environment in a worker; see `OpenEnvironment`."""

    def __init__(self, worker: WorkerProcess, number: int, deadline_seconds: float):
        self.number = number
        self._worker, self._deadline = worker, deadline_seconds
        worker.instances.add(number)

    async def reset(self, row: Mapping[str, Any]) -> Start:
        """See `Environment`."""
        return start_of(await self._call("reset", row))

    async def step(self, action: Message) -> Observation:
        """See `Environment`."""
        return observation_of(await self._call("step", action))

    async def reward(self, trajectory: Mapping[str, Any]) -> EpisodeReward:
        """See `Environment`."""
        return reward_of(await self._call("reward", trajectory))

    async def perfect(self, row: Mapping[str, Any]) -> tuple[Message, ...] | None:
        """Return the messages of a perfect agent in an episode of this row; None if the environment knows none.

        Raises:
            EnvironmentFailure: It failed.
        """
        answer = await self._call("perfect", row)
        return None if answer is None else actions_of(answer)

    async def close(self) -> None:
        """See `OpenEnvironment`."""
        if self.number in self._worker.instances:
            try:
                with contextlib.suppress(EnvironmentFailure):
                    await self._call("close", None)
            finally:
                self._worker.drop(self.number)

    def abandon(self) -> None:
        """Let the worker close it, without waiting for that."""
        with contextlib.suppress(EnvironmentFailure):
            self._worker.send(self.number, "close", None)
        self._worker.drop(self.number)

    async def _call(self, method: str, argument: Any) -> Any:
        return await self._worker.call(self.number, method, argument, self._deadline)


def source_of(config: Config) -> dict[str, str]:
    """Return what workers import for `data.environment`.

    Raises:
        ConfigError: The user's environment cannot be read.
        RuntimeError: It has changed since the run was planned.
    """
    name = config.data.environment
    if not is_own(name):
        return built_in_source(name, config.environment.num_workers, config.sandbox)
    own = inspect_environment(name)
    if own.digest != config.environment.digest:
        raise RuntimeError(f"{own.path} has changed since the run was planned; run again to plan with it as it is")
    return own_source(own)


def built_in_source(name: str, num_workers: int, sandbox: SandboxSettings | None = None) -> dict[str, str]:
    """Return what workers import for an environment of ours.

    Args:
        name: A key of `BUILT_IN`.
        num_workers: Processes that share this machine's CPUs.
        sandbox: Limits of its programs; the default ones unless given.
    """
    module, made = BUILT_IN[name]
    source = {"module": module, "name": made}
    if name in SANDBOXED:
        settings = {"num_workers": num_workers, **dataclasses.asdict(sandbox or SandboxSettings())}
        source["settings"] = json.dumps(settings)
    return source


def own_source(own: OwnEnvironment) -> dict[str, str]:
    """Return what workers import for a user's environment."""
    return {"path": own.path, "name": own.name, "digest": own.digest}
