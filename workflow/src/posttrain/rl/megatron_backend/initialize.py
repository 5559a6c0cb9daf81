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

from posttrain.cluster.rendezvous import join_ranks
from posttrain.config.schema import Config
from posttrain.rl.megatron_backend.cpu import enable_cpu
from posttrain.rl.megatron_backend.messages import read_messages_by_list
from posttrain.rl.megatron_backend.packed_rotary import rotate_packed_rows_at_once
from posttrain.rl.megatron_backend.plain_data import forget_control_group, open_control_group
from posttrain.rl.megatron_backend.recomputation import mend_dropped_outputs

# torch's timeout must exceed `launch.hang_timeout_seconds`, which names the late rank; torch's names none.
MIN_COLLECTIVE_SECONDS = 1800.0
# A rollout has no fixed limit; the launcher watches its progress.
LONGEST_WAIT = timedelta(days=1)


@contextmanager
def joined_ranks(config: Config) -> Iterator[None]:
    """Join the other ranks for the block; see `initialize`.

    After an error the process exits without destroying the groups. One of its threads may be stuck in a collective that
    cannot be interrupted, and both destroying the groups and Python's exit would wait for it.
    """
    initialize(config)
    try:
        yield
    except BaseException:
        atexit.register(_end_now)
        raise
    shut_down()


def _end_now() -> None:
    logging.shutdown()
    sys.stdout.flush()
    os._exit(1)


def initialize(config: Config) -> None:
    """Join the other ranks and create the parallel groups.

    The rendezvous comes from the environment, see `join_ranks`.

    Args:
        config: The resolved configuration.

    Raises:
        RuntimeError: The rendezvous failed.
    """
    if config.hardware.device == "cpu":
        enable_cpu()
        if config.trainer.num_threads:
            torch.set_num_threads(config.trainer.num_threads)
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    read_messages_by_list()
    rotate_packed_rows_at_once()
    mend_dropped_outputs()
    seconds = max(MIN_COLLECTIVE_SECONDS, 2 * config.launch.hang_timeout_seconds)
    join_ranks("gloo" if config.hardware.device == "cpu" else "nccl", timedelta(seconds=seconds))
    if config.hardware.device == "cuda":
        open_control_group(LONGEST_WAIT)
    parallel, chunks = config.parallel, config.parallel.virtual_pipeline_model_parallel_size
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
    )
    model_parallel_cuda_manual_seed(config.training.seed)


def shut_down() -> None:
    """Destroy the parallel groups."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    forget_control_group()
