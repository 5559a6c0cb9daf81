"""One rank of Megatron in the test process itself, and several in processes of their own.

Megatron's parallel state and the CPU stand-ins belong to a process, so the single rank is made once per test session.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import torch
from tests.support.forked_programs import ONE_THREAD, ForkedProgram

from posttrain.cluster.rendezvous import FILE_VARIABLE
from posttrain.config.schema import Architecture, Config
from posttrain.plan.resolve import resolve
from posttrain.report.logging import LOG_VARIABLE
from posttrain.rl.engines.ports import choose_free_ports

CONFIG_DIR = Path(__file__).parents[2] / "config"


def test_config(architecture: Architecture, **parallel: int) -> Config:
    """Return the tiny model's configuration with other dimensions and another layout."""
    config = resolve({"model": "tiny", "site": "local"}, CONFIG_DIR).config
    model = dataclasses.replace(config.model, architecture=architecture)
    # The demo keeps its activations; what runs on GPUs recomputes them.
    trainer = dataclasses.replace(config.trainer, num_threads=1, recompute_granularity="full")
    layout = dataclasses.replace(config.parallel, **parallel)
    return dataclasses.replace(config, model=model, trainer=trainer, parallel=layout)


test_config.__test__ = False


def accumulate_gradients_apart(model: torch.nn.Module) -> None:
    """Switch off fused gradient accumulation, which needs Megatron's buffers and weights that keep their attributes.

    A model that is not wrapped has no buffers, and hooks on saved tensors hand out weights without attributes.
    """
    for module in model.modules():
        if hasattr(module, "gradient_accumulation_fusion"):
            module.gradient_accumulation_fusion = False


def free_port() -> int:
    return choose_free_ports(1)[0]


def initialize_single_rank(config: Config) -> None:
    """Make this process rank 0 of 1, once."""
    import torch.distributed as dist

    from posttrain.rl.megatron_backend.initialize import initialize

    if dist.is_initialized():
        return
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    initialize(config)
    torch.set_num_threads(1)


@contextmanager
def started_ranks(
    script: Path,
    num_ranks: int,
    *arguments: str,
    logs: Path | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[list[subprocess.Popen[str]] | list[ForkedProgram]]:
    """Run a script once per rank over gloo, for the block.

    Args:
        script: A program.
        num_ranks: How often it runs.
        arguments: Of each.
        logs: Gets `{rank}.log`.
        environment: Variables of theirs.
    """
    shared = {**os.environ, "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(free_port()), **ONE_THREAD, **environment}
    start = ForkedProgram if is_forkable(environment) else start_interpreter
    processes = []
    for rank in range(num_ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} | ({LOG_VARIABLE: str(logs / f"{rank}.log")} if logs else {})
        processes.append(start(script, arguments, shared | own))
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()


def is_forkable(environment: Mapping[str, str]) -> bool:
    """Tell whether a fork does: libraries read variables when they are loaded, and CUDA wants new processes."""
    return not environment and not torch.cuda.is_available()


def start_interpreter(
    program: Path | str, arguments: Sequence[str], environment: Mapping[str, str]
) -> subprocess.Popen[str]:
    """Start a script or module; its output is one."""
    words = [str(program)] if isinstance(program, Path) else ["-m", program]
    return subprocess.Popen(
        [sys.executable, *words, *arguments],
        cwd=CONFIG_DIR.parent,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_ranks(
    script: Path,
    num_ranks: int,
    *arguments: str,
    timeout: float = 240,
    exit_code: int = 0,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """Run a script once per rank, return what each printed; fails with the log of what ends otherwise."""
    with started_ranks(script, num_ranks, *arguments, environment=environment) as processes:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    for rank, (process, output) in enumerate(zip(processes, outputs, strict=True)):
        ended = f"rank {rank} of {num_ranks} ended with {process.returncode}:\n{output[-4000:]}"
        assert process.returncode == exit_code, ended
    return outputs


def run_gangs(
    program: str, order: dict[str, object], timeout: float = 600, environment: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Run a program of `tests/support` that forks gangs of ranks; returns what it printed.

    Args:
        program: Its module's name.
        order: Its only argument, as JSON.
        timeout: Seconds for all gangs.
        environment: Variables of theirs.
    """
    start = ForkedProgram if is_forkable(environment) else start_interpreter
    process = start(f"tests.support.{program}", [json.dumps(order)], {**os.environ, **ONE_THREAD, **environment})
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        process.kill()
    assert process.returncode == 0, f"{program} ended with {process.returncode}:\n{output[-6000:]}"
    return output


def run_forked(num_ranks: int, meeting: Path, work: Callable[[], object]) -> None:
    """Fork ranks and wait for their good end; see `fork_ranks`."""
    endings = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in fork_ranks(num_ranks, meeting, work)]
    assert not any(endings), f"{num_ranks} ranks ended with {endings}"


def fork_ranks(num_ranks: int, meeting: Path, work: Callable[[], object]) -> list[int]:
    """Fork ranks off a process that has no thread, and imports what they need; returns their process ids.

    Args:
        num_ranks: How many.
        meeting: A file that does not exist, where they meet.
        work: What each does; an error ends it with 1.
    """
    importlib.import_module("posttrain.rl.training.assembly")
    return [_fork_rank(rank, num_ranks, meeting, work) for rank in range(num_ranks)]


def _fork_rank(rank: int, num_ranks: int, meeting: Path, work: Callable[[], object]) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
        os.environ[FILE_VARIABLE] = str(meeting)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
