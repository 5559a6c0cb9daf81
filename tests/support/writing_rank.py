"""One of two ranks that write a checkpoint of the tiny model, in one of several circumstances."""

from __future__ import annotations

import json
import resource
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist

SMALLER_THAN_A_SHARD = 20_000


def main() -> None:
    request = json.loads(sys.argv[1])
    sys.path.insert(0, request["root"])
    from tests.support.megatron_layouts import small_batches
    from tests.support.megatron_single import test_config
    from tests.support.tiny_checkpoint import TINY

    from posttrain.rl.megatron_backend.initialize import joined_ranks
    from posttrain.rl.megatron_backend.model import build_policy
    from posttrain.rl.megatron_backend.optimizer_state import allocate_state

    config = small_batches(test_config(TINY), ranks=2)
    with joined_ranks(config):
        policy = build_policy(config)
        allocate_state(policy.optimizer)
        print(json.dumps(CIRCUMSTANCES[request["circumstance"]](policy, Path(request["folder"]))))


def open_writer(policy, folder: Path, may_commit, forgotten: list[int]):
    from posttrain.rl.training.checkpoint_writer import CheckpointWriter
    from posttrain.rl.training.checkpoints import CheckpointFolder

    return CheckpointWriter(policy, CheckpointFolder(folder, 2, may_commit), 5 << 30, forgotten.append)


def write_while_others_work(policy, folder: Path) -> dict[str, object]:
    """Rank 0 commits when both ranks have talked to each other in their main threads."""
    from posttrain.rl.megatron_backend.checkpoint import load_training_state
    from posttrain.rl.training.checkpoints import CheckpointFolder

    go_on, forgotten = threading.Event(), []
    writer = open_writer(policy, folder, go_on.wait, forgotten)
    seen = {"before": writer.is_writing}
    writer.begin(1)
    count = torch.zeros(1)
    for _ in range(50):
        count += 1
        dist.all_reduce(count, dist.ReduceOp.MAX)
    seen |= {"meanwhile": writer.is_writing, "names": sorted(path.name for path in folder.iterdir())}
    dist.barrier()
    go_on.set()
    writer.finish()
    seen |= {"after": writer.is_writing, "committed": sorted(path.name for path in folder.iterdir())}
    dist.barrier()
    writer.begin(2)
    writer.finish()
    checkpoints = CheckpointFolder(folder, 2)
    checkpoints.check_content(2, dist.get_rank(), 2)
    return {**seen, "forgotten": forgotten, "loaded": load_training_state(policy, checkpoints.path(2))}


def run_out_of_space(policy, folder: Path) -> dict[str, object]:
    """Rank 1 may write no more than a few kilobytes into a file."""
    from posttrain.errors import explain

    writer = open_writer(policy, folder, lambda: None, [])
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (SMALLER_THAN_A_SHARD, resource.RLIM_INFINITY))
    writer.begin(1)
    try:
        writer.finish()
    except OSError as error:
        return {"told": explain(error), "names": [path.name for path in folder.iterdir()]}
    raise AssertionError("the shard is smaller than thought")


def lose_the_lease(policy, folder: Path) -> None:
    from posttrain.store.lease import LeaseLostError

    def refuse() -> None:
        raise LeaseLostError("another one writes")

    writer = open_writer(policy, folder, refuse, [])
    writer.begin(1)
    writer.finish()


def fail_meanwhile(policy, folder: Path) -> None:
    """Both main threads fail when rank 0 is about to commit and rank 1 waits for it."""
    is_about_to = threading.Event()

    def commit_never() -> None:
        is_about_to.set()
        threading.Event().wait()

    open_writer(policy, folder, commit_never, []).begin(1)
    if dist.get_rank() == 0:
        is_about_to.wait()
    dist.barrier()
    raise RuntimeError("no engine answers")


def hang(policy, folder: Path) -> None:
    """Rank 0 never commits; both main threads wait for it."""
    writer = open_writer(policy, folder, threading.Event().wait, [])
    writer.begin(1)
    writer.finish()


def write_parts(_, folder: Path) -> dict[str, str]:
    """Each rank writes a part of one tensor: its half, the same half, a third."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from posttrain.rl.megatron_backend.checkpoint import InProcessSave

    rank, told = dist.get_rank(), {}
    for name, part, of in (("halves", rank, 2), ("the same half", 0, 2), ("two thirds", rank, 3)):
        (folder / name).mkdir(exist_ok=True)
        state, strategy = (
            {"w": ShardedTensor.from_rank_offsets("w", torch.ones(2, 3), (0, part, of))},
            InProcessSave(None),
        )
        dist_checkpointing.save(state, str(folder / name), strategy, validate_access_integrity=False)
        try:
            strategy.write()
            told[name] = "written"
        except ValueError as error:
            told[name] = str(error)
    return told


FUNCTIONS = (write_while_others_work, run_out_of_space, lose_the_lease, fail_meanwhile, hang, write_parts)
CIRCUMSTANCES = {function.__name__: function for function in FUNCTIONS}

if __name__ == "__main__":
    from posttrain import cli

    cli.run(main)
