"""Downloads with the Hub library's own transfer, which uses Xet where the repository does.

Xet fetches only the chunks of a file that are not in its cache, over many connections. Its limits: progress is internal
to the library, so a killed process restarts its file (`transfer` resumes at the byte), and its retries cannot be
configured.
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
        """Return the whole size: an earlier process's progress is lost."""
        return file.size_bytes

    def make(self, file: ListedFile, folder: Path, progress: TransferProgress) -> FileRecord:
        """Download a file into its own staging folder, verify it there, then rename it.

        Raises:
            CheckpointError: The bytes are wrong.
            RuntimeError: The connection fails.
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
                "download-corrupt",
                f"{self._source}: {file.path} arrives with wrong bytes\n  {reason}\n"
                f"  remedy: run again with download.xet=false, which does without the library's cache",
            )
        place_atomic(file.path.below(folder), lambda temporary: os.replace(staged, temporary))
        shutil.rmtree(home)
        return record


def _bar_class(progress: TransferProgress) -> type[tqdm]:
    class ForwardingBar(tqdm):
        """Forwards the library's counts to our bar and displays nothing."""

        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> None:
            progress.advance(int(n or 0))

        def update_transfer(self, n: float | None = 1) -> None:
            """Do nothing: Xet counts compressed bytes here, and file bytes in `update`."""

        def set_transfer_postfix_str(self, postfix: str, refresh: bool = False) -> None:
            """Do nothing: no bar is displayed."""

    return ForwardingBar
