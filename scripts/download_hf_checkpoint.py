"""Bring one part of a checkpoint's files into the store: from the Hub, or from a local folder; every one verified."""

from __future__ import annotations

from pathlib import Path

from posttrain.checkpoint.hub.client import FetchOptions
from posttrain.checkpoint.hub.download_parts import STEP, Download, origin_of
from posttrain.checkpoint.hub.listed_files import read_manifest
from posttrain.checkpoint.hub.retries import RetryRule
from posttrain.checkpoint.parts.steps import make_part, part_parser
from posttrain.cli import run


def main() -> None:
    """Keep what is right, bring the rest, write the part's receipt."""
    parser = part_parser(__doc__, has_source=False)
    parser.add_argument("--manifest", required=True, type=Path, help="what list_hf_checkpoint wrote")
    parser.add_argument("--num-retries", type=int, default=RetryRule.num_retries, help="failed attempts in a row")
    parser.add_argument("--xet", type=int, choices=(0, 1), default=0, help="1: the library's transfer, with Xet")
    args = parser.parse_args()
    manifest = read_manifest(args.manifest)
    options = FetchOptions(args.threads, bool(args.xet), RetryRule(args.num_retries))
    inputs, _ = origin_of(manifest)
    make_part(STEP, args, inputs, lambda: Download(manifest, options), manifest=manifest.digest)


if __name__ == "__main__":
    run(main)
