"""What a configuration does not say itself and follows from files and packages of this machine."""

from __future__ import annotations

import dataclasses

from posttrain.config.model_files import model_digests
from posttrain.config.own_environment import inspect_environment, is_own
from posttrain.config.own_reward import own_digests, trained_rewards
from posttrain.config.schema import Config
from posttrain.config.suites import suite_rewards
from posttrain.config.tasks import installed_version
from posttrain.errors import raise_if_any

# Origins of what follows from the content of files, and from packages.
FILES, MODEL_FILES, INSTALLED = "the files that rewards name", "the files that model names", "the installed package"
ENVIRONMENT_FILES = "the file that data.environment names"


def filled_in(config: Config, origins: dict[str, str]) -> Config:
    """Return a configuration with what is found out, and add where that comes from.

    Raises:
        ConfigError: A file or a package is missing, or is not what it should be.
    """
    for find in (_with_own_digests, _with_environment_digest, _with_model_digests, _with_installed):
        config = find(config, origins)
    return config


def _with_own_digests(config: Config, origins: dict[str, str]) -> Config:
    """Return the configuration with the digests of the user's files that rewards name."""
    for section, rewards in (("reward", trained_rewards(config)), ("evaluation", suite_rewards(config))):
        digests, problems = own_digests(config, rewards)
        raise_if_any(problems)
        if digests:
            named = dataclasses.replace(getattr(config, section), own_digests=digests)
            config = dataclasses.replace(config, **{section: named})
            origins[f"{section}.own_digests"] = FILES
    return config


def _with_environment_digest(config: Config, origins: dict[str, str]) -> Config:
    """Return the configuration with the digest of the user's environment."""
    if not is_own(config.data.environment):
        return config
    digest = inspect_environment(config.data.environment).digest
    origins["environment.digest"] = ENVIRONMENT_FILES
    return dataclasses.replace(config, environment=dataclasses.replace(config.environment, digest=digest))


def _with_model_digests(config: Config, origins: dict[str, str]) -> Config:
    """Return the configuration with the digests of the user's tokenizer and chat template."""
    digests, problems = model_digests(config.model)
    raise_if_any(problems)
    if not digests:
        return config
    origins["model.own_digests"] = MODEL_FILES
    return dataclasses.replace(config, model=dataclasses.replace(config.model, own_digests=digests))


def _with_installed(config: Config, origins: dict[str, str]) -> Config:
    """Return the configuration with the version of the package that makes its rows, if one does."""
    version, problems = installed_version(config.data)
    raise_if_any(problems)
    if not version:
        return config
    origins["data.reasoning_gym"] = INSTALLED
    return dataclasses.replace(config, data=dataclasses.replace(config.data, reasoning_gym=version))
