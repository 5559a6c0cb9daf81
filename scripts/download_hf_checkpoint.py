"""Fetch one part of a checkpoint's files from the Hub or a local folder, and verify every file."""

from __future__ import annotations

from pathlib import Path

from posttrain.checkpoint.hub.client import FetchOptions
from posttrain.checkpoint.hub.download_parts import STEP, Download, origin_of
from posttrain.checkpoint.hub.listed_files import read_manifest
from posttrain.checkpoint.hub.retries import RetryRule
from posttrain.checkpoint.parts.steps import PART, make_part
from posttrain.cli import command_line, run


def main() -> None:
    """Keep valid files, fetch the others, write the part's receipt."""
    args = command_line(
        __doc__,
        **PART,
        manifest=(Path, "what list_hf_checkpoint wrote"),
        num_retries={"type": int, "default": RetryRule.num_retries, "help": "failed attempts in a row"},
        xet={"type": int, "choices": (0, 1), "default": 0, "help": "1: the library's transfer, with Xet"},
    )
    manifest = read_manifest(args.manifest)
    options = FetchOptions(args.threads, bool(args.xet), RetryRule(args.num_retries))
    inputs, _ = origin_of(manifest)
    make_part(STEP, args, inputs, lambda: Download(manifest, options), manifest=manifest.digest)


if __name__ == "__main__":
    run(main)
