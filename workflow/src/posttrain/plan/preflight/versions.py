"""A node's package versions, and whether they were tested together.

The tested sets are the pins of `envs/`: one for CPUs, one for GPUs, separately for trainer and engine. The driver has
no pin: it must be new enough for torch's CUDA release.
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
# The oldest driver for programs of CUDA 13.0: CUDA 13.0 release notes, table 2, column "Linux".
OLDEST_DRIVER = "580.65.06"
# Covers the start of an interpreter from a cold file system.
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
    """Return the versions in this machine's environments: `trainer torch` -> `2.13.0`; missing packages are omitted.

    Args:
        config: The resolved configuration, with the engine's interpreter.
    """
    trainer = {name: version for name in TRAINER_PACKAGES if (version := _version(name))}
    engine = _versions_of(config.engine.python, ENGINE_PACKAGES) if config.engine.python else {}
    found = {f"trainer {name}": version for name, version in trainer.items()}
    found |= {f"engine {name}": version for name, version in engine.items()}
    return {"python": ".".join(map(str, sys.version_info[:2])), **found}


def pinned_versions(config: Config) -> dict[str, str]:
    """Return the pins of a device's tested set, named as in `installed_versions`."""
    trainer, engine = (_pins(ENVIRONMENTS / name) for name in PINS[config.hardware.device])
    tested = {f"trainer {name}": trainer[name] for name in TRAINER_PACKAGES if name in trainer}
    return tested | {f"engine {name}": engine[name] for name in ENGINE_PACKAGES if name in engine}


def untested(installed: Mapping[str, str], tested: Mapping[str, str]) -> list[str]:
    """Return a line for each version that differs from the tested one; ignores a build's suffix (`+cpu`, `+cu130`)."""
    return [
        f"{name} {version} (tested: {tested[name]})"
        for name, version in installed.items()
        if name in tested and version.partition("+")[0] != tested[name]
    ]


def is_too_old(driver: str) -> bool:
    """Return whether an NVIDIA driver is older than torch's CUDA release requires."""
    return Version(driver) < Version(OLDEST_DRIVER)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _versions_of(python: str, names: Sequence[str]) -> dict[str, str]:
    """Return the versions of another interpreter's packages; empty if it does not start."""
    command = [python, "-c", _QUERY, *names]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return dict(line.split() for line in done.stdout.splitlines() if len(line.split()) == 2)


def _pins(path: Path) -> dict[str, str]:
    return dict(_PIN.findall(path.read_text(encoding="utf-8")))
