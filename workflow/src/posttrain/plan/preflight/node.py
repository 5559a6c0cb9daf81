"""Self-check of a gang's node before training: GPUs, disks, versions.

Problems are returned as text instead of raised, because the head compares all nodes before it decides.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from posttrain.config.schema import Config
from posttrain.plan.flags.flag import as_environment
from posttrain.plan.flags.sglang_flags import environment_flags
from posttrain.plan.preflight.kv_transfer import MODULES
from posttrain.plan.preflight.sandbox import node_sandbox, sandbox_problems
from posttrain.plan.preflight.versions import installed_versions, is_too_old

NVIDIA_SMI = "nvidia-smi"
_GPU_FIELDS = ("index", "name", "driver_version", "memory.used", "ecc.errors.uncorrected.volatile.total")
# A healthy driver responds within seconds.
QUERY_SECONDS = 60.0
# A GPU with more used memory than this before the start is used by another process or has leftovers.
USED_MIB = 4096
# Small enough for a slow file system; the best of three, because others use it, too.
WRITE_BYTES, NUM_WRITES = 16 << 20, 3
DISKS = {"node-local disk": "site.node_local", "shared storage": "site.results"}


@dataclass(frozen=True)
class NodeFacts:
    """A node's report about itself.

    Args:
        problems: Reasons why it cannot train, as text; empty if it can.
        versions: Versions of packages and the driver.
        rates: MB/s of each disk.
        sandbox: What limits programs of a model; "" if none are run here.
    """

    problems: list[str]
    versions: dict[str, str]
    rates: dict[str, float]
    sandbox: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain types."""
        return asdict(self)


def inspect_node(config: Config, node_local: Path, shared: Path) -> NodeFacts:
    """Return this node's report.

    Args:
        config: The resolved configuration.
        node_local: Folder of its local copies.
        shared: Folder that all nodes share.
    """
    problems, versions, rates = [], installed_versions(config), {}
    if config.hardware.device == "cuda":
        found, driver = check_gpus(config.hardware.gpus_per_node)
        problems += found
        versions |= {"driver": driver} if driver else {}
    if config.engine.pd.num_prefill_engines:
        problems += check_transport(config)
    problems += sandbox_problems(config)
    for name, folder in zip(DISKS, (node_local, shared), strict=True):
        try:
            rates[name] = write_rate(folder)
        except OSError as error:
            problems.append(f"{name} ({DISKS[name]}): {folder}: {error.strerror or error}")
    return NodeFacts(problems, versions, rates, node_sandbox(config))


def check_transport(config: Config) -> list[str]:
    """Return why the KV cache's transport cannot be used in the engines' environment; empty if it can."""
    backend, python = config.engine.pd.transfer_backend, transport_python(config)
    command = [python, "-c", f"import {', '.join(MODULES[backend])}"]
    environment = os.environ | transport_environment(config)
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=QUERY_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    else:
        if done.returncode == 0:
            return []
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return [f"engine.pd.transfer_backend={backend}: not importable by {python} ({reason})"]


def transport_python(config: Config) -> str:
    """Return the interpreter with the KV cache's transport: the engines'."""
    return config.engine.python or sys.executable


def transport_environment(config: Config) -> dict[str, str]:
    """Return the transport's variables: the engines', and the network interface for UCX over TCP.

    With RDMA cards, UCX's device names differ from the system's interface names.
    """
    is_tcp = config.hardware.device == "cpu" and config.site.network_interface
    interface = {"UCX_NET_DEVICES": config.site.network_interface} if is_tcp else {}
    return interface | as_environment(environment_flags(config))


def check_gpus(wanted: int) -> tuple[list[str], str]:
    """Return the problems of this node's GPUs, and the driver's version.

    Args:
        wanted: Number of GPUs for training.
    """
    command = [NVIDIA_SMI, f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"{NVIDIA_SMI}: {error}"], ""
    if done.returncode:
        return [f"{NVIDIA_SMI}: {(done.stdout + done.stderr).strip()}"], ""
    rows = [[field.strip() for field in line.split(",")] for line in done.stdout.splitlines()]
    problems = [problem for row in rows for problem in _problems_of_gpu(row)]
    if len(rows) < wanted:
        problems.insert(0, f"{len(rows)} GPUs, {wanted} are used (hardware.gpus_per_node)")
    driver = rows[0][2] if rows else ""
    if driver and is_too_old(driver):
        problems.append(f"driver {driver} is too old for torch's CUDA")
    return problems, driver


def _problems_of_gpu(row: Sequence[str]) -> list[str]:
    index, name, _, used, errors = row
    problems = []
    if used.isdigit() and int(used) > USED_MIB:
        problems.append(f"GPU {index} ({name}): {used} MiB are in use by somebody else")
    if errors.isdigit() and int(errors) > 0:
        problems.append(f"GPU {index} ({name}): {errors} memory errors that could not be corrected")
    return problems


def write_rate(folder: Path) -> float:
    """Return the rate of writing and syncing a file, MB/s, the best of several writes; verifies the content.

    Raises:
        OSError: The folder cannot be written, or returns other bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    content = os.urandom(WRITE_BYTES)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".preflight-") as file:
        seconds = [_write(file, content) for _ in range(NUM_WRITES)]
        if Path(file.name).read_bytes() != content:
            raise OSError(0, "other bytes are read than were written")
    return WRITE_BYTES / 1e6 / min(seconds)


def _write(file: IO[bytes], content: bytes) -> float:
    started = time.monotonic()
    file.seek(0)
    file.truncate()
    file.write(content)
    file.flush()
    os.fsync(file.fileno())
    return time.monotonic() - started
