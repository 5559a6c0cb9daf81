"""Files from the Hub by the library's own transfer, which speaks Xet where the repository is stored that way.

Xet fetches only the chunks of a file that are not in its cache, from many places at once. Its limits: how far it has
come is known to the library alone, so a process that was killed begins its file anew (`transfer` goes on at the
byte), and what it retries is its own affair.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from tqdm.auto import tqdm

from posttrain.checkpoint.hub.listed_files import ListedFile, verify_file
from posttrain.checkpoint.hub.listing import explained
from posttrain.checkpoint.hub.transfer import STAGING, HttpFiles
from posttrain.checkpoint.staging.file_placement import TransferProgress
from posttrain.errors import CheckpointError
from posttrain.store import FileRecord, place_atomic
from posttrain.store.names import refuse_link


class XetFiles(HttpFiles):
    """Files of a Hub repository through `hf_hub_download`."""

    def missing_bytes(self, file: ListedFile, folder: Path) -> int:
        """Count the whole file: what an earlier process began is of no use."""
        return file.size_bytes

    def make(self, file: ListedFile, folder: Path, progress: TransferProgress) -> FileRecord:
        """Download a file into a staging folder of its own, verify it there, then give it its name.

        Raises:
            CheckpointError: The bytes are wrong.
            RuntimeError: No connection.
        """
        home = folder / STAGING / "xet" / f"{file.path.replace('/', '--')}"
        for where in (folder / STAGING, home.parent, home):
            refuse_link(where)
        shutil.rmtree(home, ignore_errors=True)
        with explained(self._source, file.path):
            staged = Path(
                hf_hub_download(
                    self._source.repo_id,
                    file.path,
                    repo_type=self._source.repo_type,
                    revision=self._source.revision,
                    local_dir=home,
                    endpoint=self._source.endpoint,
                    tqdm_class=_bar_class(progress),
                )
            )
        record, reason = verify_file(staged, file)
        if record is None:
            shutil.rmtree(home)
            raise CheckpointError(
                f"{self._source}: {file.path} arrives with wrong bytes\n  {reason}\n"
                f"  remedy: run again with download.xet=false, which does without the library's cache"
            )
        place_atomic(file.path.below(folder), lambda temporary: os.replace(staged, temporary))
        shutil.rmtree(home)
        return record


def _bar_class(progress: TransferProgress) -> type[tqdm]:
    class ForwardingBar(tqdm):
        """Passes the library's counts on to our bar and shows nothing itself."""

        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> None:
            progress.advance(int(n or 0))

        def update_transfer(self, n: float | None = 1) -> None:
            """Leave out: Xet counts compressed bytes here, and the file's own in `update`."""

        def set_transfer_postfix_str(self, postfix: str, refresh: bool = False) -> None:
            """Leave out: nothing is shown."""

    return ForwardingBar
