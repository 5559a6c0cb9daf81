"""Requirements of a machine: devices, the engine's interpreter, a free port, and the limit of open files."""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import socket
import subprocess
import sys

from posttrain.config.derived import world_size
from posttrain.config.schema import Config
from posttrain.plan.preflight.report import Finding, failed, ok, skipped
from posttrain.plan.preflight.versions import installed_versions, pinned_versions, untested

# A first import from a cold shared file system may take minutes; a longer one would slow down every start as much.
IMPORT_TIMEOUT_SECONDS = 300.0
# A single trainer rank had 110 open files, pipes and sockets, and 8 to 12 more for each further rank: gloo connects
# all ranks of each group with each other.
RANK_FILES, FILES_PER_RANK = 128, 16


def check_devices(config: Config) -> Finding:
    """Check that this machine has the configured number of GPUs per node."""
    wanted = config.hardware.gpus_per_node
    if config.hardware.device == "cpu":
        return ok("devices", f"CPU, {os.cpu_count()} cores, {wanted} trainer ranks")
    if config.site.launcher != "local":
        return skipped("devices", f"training runs elsewhere ({config.site.launcher})")
    import torch

    found = torch.cuda.device_count()
    if found >= wanted:
        return ok("devices", f"{found} CUDA devices, first {torch.cuda.get_device_name(0)}")
    remedy = "run on a machine with GPUs, or choose hardware=cpu with a small model"
    return failed(
        "too-few-gpus", "devices", "hardware.gpus_per_node", f"{found} CUDA devices here", f"at least {wanted}", remedy
    )


def check_open_files(config: Config) -> Finding:
    """Check a trainer rank's limit of open files; raises this process's soft limit if the hard limit allows it.

    Child processes inherit the limit.
    """
    needed = RANK_FILES + FILES_PER_RANK * world_size(config) + config.rollout.rollout_batch_size
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A negative number means no limit.
    if 0 <= soft < needed and not 0 <= hard < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
        return ok("open files", f"{needed} needed, the limit was raised from {soft} to that")
    if 0 <= soft < needed:
        remedy = "have `ulimit -Hn` raised: in /etc/security/limits.conf, by LimitNOFILE= of the service, by the image"
        return failed(
            "too-few-open-files", "open files", "ulimit -n", f"{soft}, at most {hard}", f"at least {needed}", remedy
        )
    return ok("open files", f"{soft if soft >= 0 else 'any number'} allowed, {needed} needed")


def check_versions(config: Config) -> Finding:
    """Check that the versions of trainer and engine were tested together."""
    if config.site.launcher == "kubernetes" or config.site.container.runtime != "none":
        return skipped("versions", "an image has them; its nodes tell theirs before they train")
    installed = installed_versions(config)
    if others := untested(installed, pinned_versions(config)):
        remedy = "install the pins of envs/, or go on and be the one who tests this set"
        return failed(
            "versions-untested", "versions", "envs", ", ".join(others), "versions that were tested together", remedy
        )
    return ok("versions", ", ".join(f"{name} {version}" for name, version in installed.items()))


def check_engine_interpreter(config: Config) -> Finding:
    """Check that the engine's interpreter starts and imports the engine."""
    engine = config.engine
    if config.site.launcher == "kubernetes" and engine.python:
        return skipped("engine.python", f"{engine.python} is in the image of the pods")
    if config.site.container.runtime != "none":
        return skipped("engine.python", f"{engine.python or 'python'} is in {config.site.container.image}")
    if engine.kind == "embedded":
        return check_interpreter("engine.python", engine.python or sys.executable, "posttrain.rl.engines.embedded")
    return check_interpreter("engine.python", engine.python or sys.executable, "sglang")


def check_image(config: Config) -> Finding:
    """Check that the image exists; only a node can check that it starts."""
    key, container = "site.container.image", config.site.container
    if container.runtime == "none":
        return skipped(key, "the nodes' own environment is used")
    if os.path.isfile(container.image):
        return ok(key, f"{container.image}, started by {container.runtime}")
    remedy = "see envs/README.md"
    return failed("no-such-file", key, key, f"{container.image}: no such file", "a file that every node sees", remedy)


def check_interpreter(key: str, python: str, module: str) -> Finding:
    """Check that `python` starts and imports `module`, like the engine.

    Args:
        key: Config key that names the interpreter.
        python: Path, or a name on PATH.
        module: Required module.
    """
    name, found = f"{key} imports {module}", shutil.which(python)
    remedy = f"set='{key}=PATH' to the interpreter of an environment that has {module}"
    if found is None:
        return failed("interpreter-unusable", name, key, repr(python), "an interpreter that exists", remedy)
    code = f"import {module}; print(getattr({module.partition('.')[0]}, '__version__', 'no version'))"
    try:
        done = subprocess.run(
            [found, "-c", code], capture_output=True, text=True, timeout=IMPORT_TIMEOUT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return failed(
            "interpreter-unusable", name, key, f"{found}: {error}", f"an interpreter that imports {module}", remedy
        )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return failed(
            "interpreter-unusable", name, key, f"{found}: {last}", f"an interpreter that imports {module}", remedy
        )
    return ok(name, f"{found}, {module} {done.stdout.split()[-1]}")


def check_broadcast(config: Config) -> Finding:
    """Check that the library for broadcasts between nodes is installed, if it is configured."""
    if config.stage.broadcast == "none":
        return skipped("stage.broadcast", "each node reads shared storage for itself")
    if config.site.container.runtime != "none":
        return skipped("stage.broadcast", f"libtorrent is in {config.site.container.image}")
    if importlib.util.find_spec("libtorrent"):
        return ok("stage.broadcast", "libtorrent is installed")
    remedy = "pip install 'posttrain[broadcast]', or set='stage.broadcast=none'"
    allowed = "libtorrent, to broadcast"
    return failed("package-missing", "stage.broadcast", "stage.broadcast", config.stage.broadcast, allowed, remedy)


def check_ports(config: Config) -> list[Finding]:
    """Check that the engines' ports are free, if they are fixed."""
    first, count = config.engine.port, config.engine.num_engines
    if first == 0:
        return [skipped("engine.port", "free ports are chosen when the engines start")]
    return [check_port(first + index) for index in range(count)]


def check_port(port: int, host: str = "127.0.0.1") -> Finding:
    """Check that a server can listen on `port` of this machine, at one address."""
    with socket.socket() as probe:
        # Like servers: a port whose last connection has just closed counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            remedy = "end what listens there, or let a free port be chosen: set='engine.port=0'"
            return failed(
                "port-in-use", f"port {port}", "engine.port", f"{port}: {error.strerror}", "a free port", remedy
            )
    return ok(f"port {port}", "free")
