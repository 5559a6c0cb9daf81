"""Process groups, model-parallel ranks and random state of a trainer process."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from posttrain.config.schema import Config
from posttrain.megatron_backend.cpu import enable_cpu

COLLECTIVE_TIMEOUT = timedelta(minutes=30)


@contextmanager
def joined_ranks(config: Config) -> Iterator[None]:
    """Join the other ranks for the block; see `initialize`.

    After an error the process ends without taking the groups apart. A thread of its own may be in a collective that
    will never be complete, where nothing can interrupt it; groups, and Python at its own end, would wait for it.
    An error that has an `exit_code` ends it with that one.
    """
    initialize(config)
    try:
        yield
    except BaseException as error:
        atexit.register(_end_now, getattr(error, "exit_code", 1))
        raise
    shut_down()


def _end_now(exit_code: int) -> None:
    logging.shutdown()
    sys.stdout.flush()
    os._exit(exit_code)


def initialize(config: Config) -> None:
    """Join the other ranks and lay out the parallel groups.

    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT come from the environment.

    Args:
        config: The resolved configuration.

    Raises:
        RuntimeError: When the ranks do not find each other.
    """
    if config.hardware.device == "cpu":
        enable_cpu()
        if config.trainer.num_threads:
            torch.set_num_threads(config.trainer.num_threads)
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if config.hardware.device == "cpu" else "nccl", timeout=COLLECTIVE_TIMEOUT)
    parallel = config.parallel
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
    )
    model_parallel_cuda_manual_seed(config.training.seed)


def shut_down() -> None:
    """Leave the parallel groups."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
