"""Opens what `data.environment` names: worker processes, or a service."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

from posttrain.config.own_environment import is_address
from posttrain.config.schema import Config
from posttrain.rl.environments.nemo_gym import NemoGymEnvironments
from posttrain.rl.environments.openenv import OpenEnvEnvironments
from posttrain.rl.environments.pool import EnvironmentPool
from posttrain.rl.environments.protocol import Environments
from posttrain.rl.environments.service import ServiceEnvironments

# By the beginning of the address, before a "+".
SERVICES: Mapping[str, Callable[[str, float], contextlib.AbstractContextManager[Environments]]] = {
    "": ServiceEnvironments,
    "nemo_gym": NemoGymEnvironments,
    "openenv": OpenEnvEnvironments,
}


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
        return SERVICES[kind](f"{transport}://{rest}", config.environment.deadline_seconds)
    return EnvironmentPool.of(config)
