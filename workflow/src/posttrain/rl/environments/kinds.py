"""Opens what `data.environment` names: worker processes, or a service."""

from __future__ import annotations

import contextlib

from posttrain.config.own_environment import is_address
from posttrain.config.schema import Config
from posttrain.rl.environments.pool import EnvironmentPool
from posttrain.rl.environments.protocol import Environments
from posttrain.rl.environments.service import ServiceEnvironments


def environments_of(config: Config) -> contextlib.AbstractContextManager[Environments]:
    """Return the environments of a configuration, a context manager.

    Raises:
        ConfigError: The user's environment cannot be read.
        RuntimeError: It has changed since the run was planned.
    """
    name = config.data.environment
    if is_address(name):
        return ServiceEnvironments(name, config.environment.deadline_seconds)
    return EnvironmentPool.of(config)
