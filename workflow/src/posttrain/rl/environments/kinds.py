"""Opens what `data.environment` names: worker processes, or a service."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial

from posttrain.config.own_environment import is_address
from posttrain.config.schema import Config
from posttrain.rl.environments.nemo_gym import NemoGymEnvironment
from posttrain.rl.environments.openenv import OpenEnvEnvironment
from posttrain.rl.environments.pool import EnvironmentPool
from posttrain.rl.environments.protocol import Environments, OpenEnvironment
from posttrain.rl.environments.service import ServiceEnvironment

# Connects with a service: its address, the time limit of a call, and the episode's seed. By the beginning of the
# address, before a "+".
SERVICES: Mapping[str, Callable[[str, float, int], OpenEnvironment]] = {
    "": ServiceEnvironment,
    "nemo_gym": NemoGymEnvironment,
    "openenv": OpenEnvEnvironment,
}


class RemoteEnvironments:
    """Environments of a service; each opens its own connection in `reset`.

    Args:
        connect: Returns one, from its seed.
    """

    def __init__(self, connect: Callable[[int], OpenEnvironment]):
        self._connect = connect

    async def open(self, seed: int) -> OpenEnvironment:
        """See `Environments`."""
        return self._connect(seed)


def environments_of(config: Config) -> contextlib.AbstractContextManager[Environments]:
    """Return the environments of a configuration, a context manager.

    Raises:
        ConfigError: The user's environment cannot be read.
        RuntimeError: It has changed since the run was planned.
    """
    name = config.data.environment
    if is_address(name):
        scheme, _, rest = name.partition("://")
        kind, _, transport = scheme.rpartition("+")
        address, seconds = f"{transport}://{rest}", config.environment.deadline_seconds
        return contextlib.nullcontext(RemoteEnvironments(partial(SERVICES[kind], address, seconds)))
    return EnvironmentPool.of(config)
