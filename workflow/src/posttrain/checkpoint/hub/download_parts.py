"""A checkpoint that several jobs bring into one folder, each its share of the list."""

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
    """The files of a list as a folder that is made in parts; see `steps.Making`.

    Args:
        manifest: What the folder must hold.
        options: How files are fetched.
    """

    def __init__(self, manifest: Manifest, options: FetchOptions | None = None):
        self._manifest, self._options = manifest, options or FetchOptions()

    def names(self, num_parts: int) -> Collection[str]:
        """Return all that is listed."""
        return [file.path for file in self._manifest.files]

    def make(self, part: int, num_parts: int, folder: Path, num_threads: int) -> Sequence[Description]:
        """Bring a part's share from the Hub or from a folder; see `hub.client.download` and `place_files`."""
        partial, manifest = reopen(folder), self._manifest
        share = manifest.share(part, num_parts)
        if manifest.source["kind"] == "folder":
            records = place_files(Path(manifest.source["folder"]), partial, share, num_threads)
        else:
            source = HubSource(manifest.source["repo_id"], manifest.source["revision"])
            records = fetch_files(source, partial, share, manifest, self._options)
        return [Description(record) for record in records]

    def settings(self, parts: Mapping[str, Description]) -> Mapping[str, Any]:
        """Return commit and list, where the files are the Hub's."""
        return origin_of(self._manifest)[1]

    def clear(self, partial: Path, keep: Collection[str]) -> None:
        """Remove what a transfer left; files that are not listed may be somebody's, and are moved out of the way."""
        shutil.rmtree(partial / STAGING, ignore_errors=True)
        clear(partial, keep, aside=partial.with_suffix(".not_needed"))

    def complete(self, partial: Path, parts: Mapping[str, Description]) -> Iterable[str]:
        """Check that config, index and headers fit together; all files were listed."""
        check_source(partial)
        return ()


def origin_of(manifest: Manifest) -> tuple[dict[str, str], dict[str, Any]]:
    """Return inputs and settings of the receipts of a download: the step that made the source, or commit and list."""
    source = manifest.source
    if digest := source.get("receipt"):
        return {"source": digest}, {}
    if "repo_id" not in source:
        return {}, {}
    return {}, {"repo_id": source["repo_id"], "revision": source["revision"], "manifest": manifest.digest}
