"""A training run's checkpoints on disk: written to a partial folder, committed by one rename, only the newest few kept.

A checkpoint exists when its folder `step_000020` does. Until then it is `step_000020.partial`, and while it is deleted
it is `step_000020.expired`. Nobody reads either; those left by a dead attempt are reported and removed. The number of
finished steps is the only loop state: seeds, prompts and learning rate follow from it.

A manifest in each checkpoint holds the hash of every file, and is checked before a checkpoint is used, because readers
of torch's format do not notice a changed byte. Ranks share the work: each hashes what it wrote.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from posttrain import store
from posttrain.errors import CheckpointError
from posttrain.store import MANIFEST_NAME, FileRecord, Receipt

log = logging.getLogger(__name__)

BEGUN_FROM_NAME = "begun_from.json"
_COMMITTED = re.compile(r"step_(\d+)")
# torch's writer names the shards of rank 3 `__3_0.distcp`, `__3_1.distcp`, ...
_SHARD = re.compile(r"__(\d+)_\d+\.distcp")


class CheckpointFolder:
    """All checkpoints of one run.

    Args:
        folder: `train/checkpoints`.
        keep: Newest checkpoints to keep.
        may_commit: Called right before a checkpoint becomes visible; raises if another writer has taken over the run.
    """

    def __init__(self, folder: Path, keep: int, may_commit: Callable[[], None] = lambda: None):
        self._folder, self._keep, self._may_commit = folder, keep, may_commit
        folder.mkdir(parents=True, exist_ok=True)

    def newest_step(self) -> int:
        """Return the finished steps of the newest committed checkpoint, 0 if there is none."""
        committed = committed_checkpoints(self._folder)
        return committed[-1][0] if committed else 0

    def begun_from(self, inputs: Mapping[str, str]) -> dict[str, str]:
        """Return the inputs that the run started from; a resumed run keeps them even if the store has changed since.

        Args:
            inputs: Name -> digest of the receipts that a fresh start would use.

        Raises:
            CheckpointError: The record cannot be read.
        """
        path = self._folder / BEGUN_FROM_NAME
        if not path.exists() or self.newest_step() == 0:
            store.write_json(path, dict(inputs))
        begun = read_begun_from(self._folder)
        if begun != dict(inputs):
            log.warning("%s: begun with other inputs than the store holds now; it goes on with its own", self._folder)
        return begun

    def path(self, step: int) -> Path:
        """Return the folder of a committed checkpoint."""
        return self._folder / f"step_{step:06d}"

    def remove_leftovers(self) -> None:
        """Report and delete the partial and expired folders of dead attempts."""
        for suffix, work in (("partial", "written"), ("expired", "deleted")):
            for leftover in self._folder.glob(f"step_*.{suffix}"):
                log.warning("removing %s: an earlier attempt ended while it was %s", leftover, work)
                shutil.rmtree(leftover)

    def partial(self, step: int) -> Path:
        """Return the folder in which the checkpoint after `step` finished steps is written."""
        return store.partial_of(self.path(step))

    def begin(self, step: int) -> None:
        """Create the partial folder; it must not exist."""
        self.partial(step).mkdir()

    def record_share(self, step: int, rank: int) -> list[FileRecord]:
        """Hash the files that a rank wrote to the partial folder; rank 0 also hashes files that are no rank's shard."""
        folder = self.partial(step)
        names = sorted(path.name for path in folder.iterdir())
        return [store.record_file(folder, name) for name in names if _writer_of(name) == rank]

    def write_manifest(self, step: int, records: Iterable[FileRecord]) -> None:
        """Write the hashes of all files to the partial folder; only on rank 0."""
        rows = [dataclasses.asdict(record) for record in sorted(records, key=lambda record: record.path)]
        store.write_json(self.partial(step) / MANIFEST_NAME, rows)

    def check_content(self, step: int, rank: int = 0, num_ranks: int = 1) -> None:
        """Check a committed checkpoint against its manifest; each rank reads its share.

        Raises:
            CheckpointError: Files are missing or changed; names them and the remedy. Never falls back silently.
        """
        folder = self.path(step)
        if found := _compare(folder, rank, num_ranks, content=True):
            listed, remedy = "\n  ".join(found), f"rm -r {folder}, and training goes on from the checkpoint before"
            raise CheckpointError(
                "manifest-mismatch", f"{folder} is not what was written:\n  {listed}\n  remedy: {remedy}"
            )

    def commit(self, step: int) -> None:
        """Make the checkpoint visible, and delete all but the newest `keep`.

        Raises:
            RuntimeError: Another supervisor has taken over the run.
        """
        partial = self.partial(step)
        store.sync_tree(partial)
        self._may_commit()
        partial.rename(self.path(step))
        store.sync_folder(self._folder)
        for _, old in committed_checkpoints(self._folder)[: -self._keep]:
            self._delete(old)

    def _delete(self, checkpoint: Path) -> None:
        """Rename the folder first: a half-deleted one must not pass for a checkpoint."""
        expired = checkpoint.with_suffix(".expired")
        checkpoint.rename(expired)
        shutil.rmtree(expired)


def read_begun_from(folder: Path) -> dict[str, str]:
    """Return the inputs that a folder's checkpoints started from: name -> digest of a receipt.

    Raises:
        CheckpointError: It cannot be read.
    """
    path = folder / BEGUN_FROM_NAME
    try:
        return dict(store.read_json(path))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            "checkpoint-unreadable", f"{path}: cannot be read ({error}); restore it, or begin a new run"
        ) from error


def committed_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Return (finished steps, folder) of every committed checkpoint, in ascending order."""
    found = ((_COMMITTED.fullmatch(path.name), path) for path in folder.glob("step_*"))
    return sorted((int(match[1]), path) for match, path in found if match)


def write_seconds(folder: Path) -> float:
    """Return the seconds between the first and last file of the newest committed checkpoint, 0 if there is none."""
    committed = committed_checkpoints(folder)
    try:
        written = [path.stat().st_mtime for _, newest in committed[-1:] for path in newest.iterdir()]
    except FileNotFoundError:  # it has just expired: a newer one exists
        return write_seconds(folder)
    return max(written, default=0.0) - min(written, default=0.0)


def check_sizes(folder: Path) -> list[str]:
    """Return a line for each file of a committed checkpoint that is missing or has the wrong size."""
    return _compare(folder, content=False)


def _compare(folder: Path, rank: int = 0, num_ranks: int = 1, *, content: bool) -> list[str]:
    """Compare a rank's share of a checkpoint with the manifest; see `store.check_files`."""
    try:
        rows = store.read_records(folder / MANIFEST_NAME)
        share = Receipt("train_grpo", tuple(_share(rows, rank, num_ranks)), {}, {})
        return store.check_files(folder, share, content)
    except (CheckpointError, OSError) as error:
        return [str(error)]


def _share(rows: Sequence[FileRecord], rank: int, num_ranks: int) -> Sequence[FileRecord]:
    """Return the files a rank checks: its own if the layout is unchanged, so its later load hits the page cache."""
    if max(_writer_of(row.path) for row in rows) + 1 == num_ranks:
        return [row for row in rows if _writer_of(row.path) == rank]
    return rows[rank::num_ranks]


def _writer_of(name: str) -> int:
    match = _SHARD.fullmatch(name)
    return int(match[1]) if match else 0
