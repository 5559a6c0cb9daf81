"""Bring a checkpoint into the store: from the Hub at a pinned commit, or from a local folder; verified."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from posttrain.artifacts import FileRecord, Receipt, building, read_receipt, write_receipt
from posttrain.checkpoint.hf_layout import check_layout
from posttrain.checkpoint.hub import download
from posttrain.checkpoint.hub_listing import HubSource, manifest_of
from posttrain.checkpoint.local_folder import place_folder
from posttrain.cli import run


def main() -> None:
    """Fetch what is missing, check the layout, write the receipt."""
    args, started = parse_arguments(), time.time()
    args.receipt.unlink(missing_ok=True)
    with building(args.folder) as partial:
        files, inputs, settings = fetch(args, partial)
        check_layout(partial)
    write_receipt(args.receipt, Receipt("download_hf_checkpoint", files, inputs, settings), started)


def fetch(args: argparse.Namespace, partial: Path) -> tuple[tuple[FileRecord, ...], dict[str, str], dict[str, str]]:
    """Return the files that are now in `partial`, the inputs they came from, and what names them."""
    if args.kind == "hub":
        source = HubSource(args.repo_id, args.revision)
        files = download(source, partial, manifest_of(args.folder), workers=args.workers)
        return files, {}, {"repo_id": args.repo_id, "revision": args.revision}
    made_by = read_receipt(args.source_receipt) if args.source_receipt else None
    files = place_folder(args.source_folder, partial, made_by, args.workers)
    return files, {"source": made_by.digest} if made_by else {}, {}


def parse_arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", required=True, choices=("hub", "folder"))
    parser.add_argument("--repo-id", default="", help="owner/name (hub)")
    parser.add_argument("--revision", default="", help="commit, 40 hex digits (hub)")
    parser.add_argument("--source-folder", type=Path, help="a checkpoint in Hub layout (folder)")
    parser.add_argument("--source-receipt", type=Path, help="receipt of the step that made the source folder")
    parser.add_argument("--folder", required=True, type=Path, help="where the checkpoint goes")
    parser.add_argument("--receipt", required=True, type=Path)
    parser.add_argument("--workers", type=int, default=8, help="files handled at a time")
    args = parser.parse_args()
    if args.kind == "hub" and not (args.repo_id and args.revision):
        parser.error("--kind hub needs --repo-id and --revision")
    if args.kind == "folder" and not args.source_folder:
        parser.error("--kind folder needs --source-folder")
    return args


if __name__ == "__main__":
    run(main)
