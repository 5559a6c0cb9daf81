"""A checkpoint download into one folder, split over several jobs."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.checkpoint.formats.hf_layout import check_source
from posttrain.checkpoint.hub.client import FetchOptions, fetch_files
from posttrain.checkpoint.hub.listed_files import Manifest
from posttrain.checkpoint.hub.listing import HubSource
from posttrain.checkpoint.hub.local_folder import place_files
from posttrain.checkpoint.hub.transfer import STAGING
from posttrain.checkpoint.parts.fill_folder import clear, reopen
from posttrain.checkpoint.parts.parts import Description

STEP, FINALIZE_STEP = "download_hf_checkpoint", "finalize_hf_checkpoint"


class Download:
    """The listed files as a folder that is made in parts; see `steps.Making`.

    Args:
        manifest: The files of the folder.
        options: Fetch options.
    """

    def __init__(self, manifest: Manifest, options: FetchOptions | None = None):
        self._manifest, self._options = manifest, options or FetchOptions()

    def names(self, num_parts: int) -> Collection[str]:
        """Return every listed path."""
        return [file.path for file in self._manifest.files]

    def make(self, part: int, num_parts: int, folder: Path, num_threads: int) -> Sequence[Description]:
        """Fetch a part's share from the Hub or from a folder; see `hub.client.download` and `place_files`."""
        partial, manifest = reopen(folder), self._manifest
        share = manifest.share(part, num_parts)
        if manifest.source["kind"] == "folder":
            records = place_files(Path(manifest.source["folder"]), partial, share, num_threads)
        else:
            source = HubSource(manifest.source["repo_id"], manifest.source["revision"])
            records = fetch_files(source, partial, share, manifest, self._options)
        return [Description(record) for record in records]

    def settings(self, parts: Mapping[str, Description]) -> Mapping[str, Any]:
        """Return the commit and the list for files from the Hub."""
        return origin_of(self._manifest)[1]

    def clear(self, partial: Path, keep: Collection[str]) -> None:
        """Remove the transfer's leftovers; move files that are not listed away, because they may be a user's."""
        shutil.rmtree(partial / STAGING, ignore_errors=True)
        clear(partial, keep, aside=partial.with_suffix(".not_needed"))

    def complete(self, partial: Path, parts: Mapping[str, Description]) -> Iterable[str]:
        """Check that config, index and headers are consistent; every file is listed."""
        check_source(partial)
        return ()


def origin_of(manifest: Manifest) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the receipt inputs and settings of a download: the step that made the source, or commit and list."""
    source = manifest.source
    if digest := source.get("receipt"):
        return {"source": digest}, {}
    if "repo_id" not in source:
        return {}, {}
    return {}, {"repo_id": source["repo_id"], "revision": source["revision"], "manifest": manifest.digest}
