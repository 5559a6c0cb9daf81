"""Which versions a node would run, and whether they are a set that was tested together.

The tested sets are the pins of `envs/`: one for CPUs, one for GPUs, trainer and engine apart. The driver is no pin: it
has to be new enough for the CUDA release that torch was built with.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from packaging.version import Version

import posttrain
from posttrain.config.schema import Config

ENVIRONMENTS = Path(posttrain.__file__).resolve().parents[3] / "envs"
TRAINER_PACKAGES = ("torch", "megatron-core", "transformer-engine", "transformers")
ENGINE_PACKAGES = ("torch", "sglang", "transformers")
# (environment of the trainer, of the engine) by device.
PINS = {
    "cpu": ("cpu/constraints.txt", "sglang-cpu/requirements.txt"),
    "cuda": ("gpu/trainer.txt", "gpu/engine.txt"),
}
# The first driver that runs programs of CUDA 13.0: CUDA 13.0 release notes, table 2, column "Linux".
OLDEST_DRIVER = "580.65.06"
# The start of an interpreter, from a cold file system too.
QUERY_SECONDS = 60.0
_QUERY = """
import sys
from importlib import metadata
for name in sys.argv[1:]:
    try:
        print(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        pass
"""
_PIN = re.compile(r"^([A-Za-z0-9_.-]+)(?:\[[^]]*\])?==([^\s;#]+)", re.MULTILINE)


def installed_versions(config: Config) -> dict[str, str]:
    """Return the versions in this machine's environments: `trainer torch` -> `2.13.0`; missing ones are left out.

    Args:
        config: The resolved configuration, with the engine's interpreter.
    """
    trainer = {name: version for name in TRAINER_PACKAGES if (version := _version(name))}
    engine = _versions_of(config.engine.python, ENGINE_PACKAGES) if config.engine.python else {}
    found = {f"trainer {name}": version for name, version in trainer.items()}
    found |= {f"engine {name}": version for name, version in engine.items()}
    return {"python": ".".join(map(str, sys.version_info[:2])), **found}


def pinned_versions(config: Config) -> dict[str, str]:
    """Return the pins of the set that was tested for a device, as `installed_versions` names them."""
    trainer, engine = (_pins(ENVIRONMENTS / name) for name in PINS[config.hardware.device])
    tested = {f"trainer {name}": trainer[name] for name in TRAINER_PACKAGES if name in trainer}
    return tested | {f"engine {name}": engine[name] for name in ENGINE_PACKAGES if name in engine}


def untested(installed: Mapping[str, str], tested: Mapping[str, str]) -> list[str]:
    """Return a line for each version that is not the tested one; a build's suffix (`+cpu`, `+cu130`) does not count."""
    return [
        f"{name} {version} (tested: {tested[name]})"
        for name, version in installed.items()
        if name in tested and version.partition("+")[0] != tested[name]
    ]


def is_too_old(driver: str) -> bool:
    """Return whether an NVIDIA driver is older than what torch's CUDA release needs."""
    return Version(driver) < Version(OLDEST_DRIVER)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _versions_of(python: str, names: Sequence[str]) -> dict[str, str]:
    """Return the versions of another interpreter's packages; none where it does not start."""
    command = [python, "-c", _QUERY, *names]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return dict(line.split() for line in done.stdout.splitlines() if len(line.split()) == 2)


def _pins(path: Path) -> dict[str, str]:
    return dict(_PIN.findall(path.read_text(encoding="utf-8")))
