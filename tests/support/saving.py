"""What training does to a disk, by training's own parts and one rank: rollouts, metrics, checkpoints, the receipt.

Engines, W&B and the mathematics are left out; the order is that of `rl/training/loop.py`. A program for
`tests.support.killing` and, in `check`, what must be true of the disk whenever the power was cut.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

from tests.support.megatron_layouts import make_groups, small_batches
from tests.support.megatron_single import free_port, test_config
from tests.support.tiny_checkpoint import TINY

from posttrain.checkpoint.formats.torch_dist_reader import TorchDistReader
from posttrain.report.provenance import record_run
from posttrain.report.sinks import MetricSinks, read_rows
from posttrain.rl.megatron_backend.checkpoint import load_training_state
from posttrain.rl.megatron_backend.initialize import joined_ranks
from posttrain.rl.megatron_backend.model import Policy, build_policy
from posttrain.rl.megatron_backend.optimizer_state import allocate_state
from posttrain.rl.rollout.rollout_store import RolloutStore
from posttrain.rl.training.checkpoint_writer import CheckpointWriter
from posttrain.rl.training.checkpoints import CheckpointFolder, committed_checkpoints
from posttrain.store import Receipt, read_receipt, record_files, records_of, require_files, write_receipt

NUM_STEPS, NUM_CHUNKS, KEEP = 4, 2, 2
DONE = "done.json"


def main() -> None:
    """Train from the newest checkpoint to the last step, and write the receipts."""
    train = Path(sys.argv[1]) / "run" / "train"
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(free_port())
    config = small_batches(test_config(TINY), ranks=1)
    checkpoints = CheckpointFolder(train / "checkpoints", KEEP)
    begun = checkpoints.begun_from({"torch_dist": "0" * 64})
    with joined_ranks(config):
        policy = build_policy(config)
        allocate_state(policy.optimizer)
        finished = checkpoints.newest_step()
        if finished:
            checkpoints.check_content(finished)
            assert load_training_state(policy, checkpoints.path(finished)) == finished
        checkpoints.remove_leftovers()
        settings = dataclasses.replace(config.logging, wandb=False)
        with MetricSinks(train, "run", settings, finished or None) as sinks:
            _train(policy, checkpoints, RolloutStore(train / "rollouts"), sinks, finished)
    final = checkpoints.path(NUM_STEPS)
    receipt = Receipt(
        "train_grpo",
        record_files(train, (path.relative_to(train).as_posix() for path in final.iterdir())),
        begun,
        {"final_checkpoint": final.relative_to(train).as_posix()},
    )
    (train / "wandb" / "offline-run-1").mkdir(exist_ok=True, parents=True)
    (train / "wandb" / "offline-run-1" / "run.wandb").write_text("of a writer that does not sync")
    records = Receipt("train_grpo", record_run(train.parent), {"train": receipt.digest}, {})
    write_receipt(records_of(train.parent), records)
    write_receipt(train / DONE, receipt)


def _train(
    policy: Policy, checkpoints: CheckpointFolder, store: RolloutStore, sinks: MetricSinks, finished: int
) -> None:
    writer, groups = CheckpointWriter(policy, checkpoints, 1 << 20, store.forget_before), make_groups(TINY.vocab_size)
    for step in range(finished, NUM_STEPS):
        for chunk in range(NUM_CHUNKS):
            if store.read(step, chunk) is None:
                store.write(step, chunk, groups)
        if writer.is_writing:
            writer.finish()
        sinks.log(step + 1, {"train/loss": 1 / (step + 1)})
        writer.begin(step + 1)
    if writer.is_writing:
        writer.finish()


def check(root: Path) -> None:
    """Whatever is visible is whole: checkpoints with their metrics, rollouts, and what the receipt names."""
    train = root / "run" / "train"
    checkpoints = CheckpointFolder(train / "checkpoints", KEEP)
    for step, folder in committed_checkpoints(train / "checkpoints"):
        checkpoints.check_content(step)
        TorchDistReader(folder).check_files()
    steps = [row["step"] for row in read_rows(train / "metrics.jsonl")]
    newest = checkpoints.newest_step()
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= newest, "a checkpoint has its metrics"
    store = RolloutStore(train / "rollouts")
    for path in train.glob("rollouts/step_*/chunk_*.json"):
        step, chunk = (int(name.partition("_")[2]) for name in (path.parent.name, path.stem))
        assert len(store.read(step, chunk) or ()) == len(make_groups(TINY.vocab_size)), path
    if (train / DONE).exists():
        require_files(train, train / DONE, content=True)
        assert read_receipt(train / DONE).settings == {"final_checkpoint": f"checkpoints/step_{NUM_STEPS:06d}"}
        require_files(root / "run", records_of(root / "run"), content=True)
