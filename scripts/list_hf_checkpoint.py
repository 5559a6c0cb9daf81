"""List a checkpoint's files with sizes and hashes: from the Hub at a pinned commit, or from a folder."""

from __future__ import annotations

import argparse
from pathlib import Path

import huggingface_hub

from posttrain.checkpoint.formats.hf_layout import check_source
from posttrain.checkpoint.hub.client import is_needed, list_what_lies_there
from posttrain.checkpoint.hub.download_parts import reopen
from posttrain.checkpoint.hub.listed_files import Manifest, read_manifest, write_manifest
from posttrain.checkpoint.hub.listing import HubSource, list_files
from posttrain.checkpoint.hub.local_folder import list_folder
from posttrain.checkpoint.hub.retries import RetryRule
from posttrain.cli import run
from posttrain.store import build_lock, read_receipt, receipt_of


def main() -> None:
    """Query the Hub, or read and check an existing checkpoint; write the list."""
    args = parse_arguments()
    if is_listed(args):
        return
    build_lock.hold(receipt_of(args.folder))
    if not is_listed(args):
        write_manifest(args.manifest, make_manifest(args))
    build_lock.release(receipt_of(args.folder))


def is_listed(args: argparse.Namespace) -> bool:
    """Return whether the list exists; another user of the store may have written it."""
    if not args.manifest.exists():
        return False
    source = read_manifest(args.manifest).source
    if args.kind == "hub":
        return (source.get("repo_id"), source.get("revision")) == (args.repo_id, args.revision)
    digest = read_receipt(args.source_receipt).digest if args.source_receipt else None
    if (source.get("folder"), source.get("receipt")) != (str(args.source_folder), digest):
        return False
    listed = args.manifest.stat().st_mtime
    return all(path.stat().st_mtime <= listed for path in args.source_folder.rglob("*") if path.is_file())


def make_manifest(args: argparse.Namespace) -> Manifest:
    """Return the manifest of the checkpoint."""
    if args.kind == "folder":
        manifest = list_folder(args.source_folder, read_receipt(args.source_receipt) if args.source_receipt else None)
        check_source(args.source_folder)
        return manifest
    source = HubSource(args.repo_id, args.revision)
    if manifest := list_files(source, args.manifest, is_needed, RetryRule(args.num_retries)):
        return manifest
    assert huggingface_hub.is_offline_mode(), "only without a network is there no list"
    lies_there = reopen(args.folder)
    manifest = list_what_lies_there(source, lies_there)
    check_source(lies_there)
    return manifest


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", required=True, choices=("hub", "folder"))
    parser.add_argument("--repo-id", default="", help="owner/name (hub)")
    parser.add_argument("--revision", default="", help="commit, 40 hex digits (hub)")
    parser.add_argument("--source-folder", type=Path, help="a checkpoint in Hub layout (folder)")
    parser.add_argument("--source-receipt", type=Path, help="receipt of the step that made the source folder")
    parser.add_argument("--folder", required=True, type=Path, help="where the checkpoint goes")
    parser.add_argument("--num-retries", type=int, default=RetryRule.num_retries, help="attempts after the first one")
    parser.add_argument("--manifest", required=True, type=Path, help="the list that is written")
    args = parser.parse_args()
    if args.kind == "hub" and not (args.repo_id and args.revision):
        parser.error("--kind hub needs --repo-id and --revision")
    if args.kind == "folder" and not args.source_folder:
        parser.error("--kind folder needs --source-folder")
    return args


if __name__ == "__main__":
    run(main)
