"""Starts a run from another run's state: hard links to its checkpoint, and copies of the metrics up to that step."""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

from posttrain import store
from posttrain.checkpoint.staging.file_placement import copy_plainly, hard_link
from posttrain.errors import raise_if_any
from posttrain.report.sinks import read_rows
from posttrain.rl.training.checkpoints import CheckpointFolder, read_begun_from
from posttrain.rl.training.lineage import STEP, changed_values, check_fork, parent_of, read_lineage
from posttrain.store import MANIFEST_NAME, Paths, Receipt
from posttrain.store.lease import Lease, check_epoch

log = logging.getLogger(__name__)


def begin_fork(paths: Paths) -> Receipt:
    """Link the parent's checkpoint into the fork; trainer ranks compare its content before they load it.

    Args:
        paths: Of the new run.

    Returns:
        Its lineage: the weights' origin, every ancestor with its changes, the checkpoint's manifest.

    Raises:
        ConfigError: The fork is not possible; lists all reasons.
        LeaseHeldError: Another process already trains the run.
    """
    raise_if_any(check_fork(paths))
    parent, step = parent_of(paths)
    with Lease(paths.train, paths.lease) as lease:
        checkpoints = CheckpointFolder(
            paths.checkpoints,
            paths.resolved.config.trainer.keep_checkpoints,
            partial(check_epoch, lease.folder, lease.epoch),
        )
        if checkpoints.newest_step() != step:
            copy_metrics(parent.metrics, paths.metrics, step)
            take_checkpoint(parent.checkpoints / checkpoints.path(step).name, checkpoints, step)
    return _lineage_receipt(paths, checkpoints.path(step))


def copy_metrics(source: Path, target: Path, step: int) -> None:
    """Copy the metrics of the parent's steps, so that the fork's curves include them."""
    rows = [row for row in read_rows(source) if row["step"] <= step]
    store.write_text(target, "".join(json.dumps(row) + "\n" for row in rows))


def take_checkpoint(source: Path, checkpoints: CheckpointFolder, step: int) -> None:
    """Copy another run's checkpoint, with hard links if the file system supports them."""
    checkpoints.remove_leftovers()
    copied = 0
    for path in sorted(source.iterdir()):
        target = checkpoints.partial(step) / path.name
        if not hard_link(path, target):
            copy_plainly(path, target)
            copied += path.stat().st_size
    if copied:
        log.warning("%s bytes were copied: the file system has no hard links from %s", f"{copied:,}", source)
    checkpoints.commit(step)


def _lineage_receipt(paths: Paths, checkpoint: Path) -> Receipt:
    parent, step = parent_of(paths)
    begun_from = read_begun_from(parent.checkpoints)
    ancestors: list[dict[str, Any]] = read_lineage(parent.fork_receipt)
    lineage = [*ancestors, {"run": parent.run.name, "step": step, "changed": changed_values(paths)}]
    manifest = store.hash_file(checkpoint / MANIFEST_NAME)
    # Take the initial weights from the model, not the parent: they are the same, and the parent may be deleted one day.
    weights = {name: digest for name, digest in begun_from.items() if name.startswith("torch_dist")}
    return Receipt(STEP, (), weights, {"lineage": lineage, "manifest_xxh3_128": manifest})
