"""One rank of Megatron in the test process itself, and several in processes of their own.

Megatron's parallel state and the CPU stand-ins belong to a process, so the single rank is made once per test session.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import torch

from posttrain.config.load import resolve
from posttrain.config.schema import Architecture, Config
from posttrain.engines.ports import choose_free_ports

CONFIG_DIR = Path(__file__).parents[1] / "config"


def test_config(architecture: Architecture, **parallel: int) -> Config:
    """Return the tiny model's configuration with other dimensions and another layout."""
    config = resolve({"model": "tiny", "site": "local"}, CONFIG_DIR).config
    model = dataclasses.replace(config.model, architecture=architecture)
    trainer = dataclasses.replace(config.trainer, num_threads=1)
    layout = dataclasses.replace(config.parallel, **parallel)
    return dataclasses.replace(config, model=model, trainer=trainer, parallel=layout)


test_config.__test__ = False


def free_port() -> int:
    return choose_free_ports(1)[0]


def initialize_single_rank(config: Config) -> None:
    """Make this process rank 0 of 1, once."""
    import torch.distributed as dist

    from posttrain.megatron_backend.initialize import initialize

    if dist.is_initialized():
        return
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    initialize(config)
    torch.set_num_threads(1)


def run_ranks(script: Path, num_ranks: int, *arguments: str, timeout: float = 240) -> list[str]:
    """Run a script once per rank over gloo and return what each printed; fails with the first failure's log."""
    environment = {**os.environ, "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1"}
    environment |= {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), *arguments],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, (process, output) in enumerate(zip(processes, outputs, strict=True)):
        assert process.returncode == 0, f"rank {rank} of {num_ranks} ended with {process.returncode}:\n{output[-4000:]}"
    return outputs
