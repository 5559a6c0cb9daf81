"""Make the parts of a download one checkpoint: nothing is missing, config, index and headers fit together."""

from __future__ import annotations

from pathlib import Path

from posttrain.checkpoint.hub.download_parts import FINALIZE_STEP, STEP, Download, origin_of
from posttrain.checkpoint.hub.listed_files import read_manifest
from posttrain.checkpoint.parts.steps import JOIN, join_parts
from posttrain.cli import command_line, run


def main() -> None:
    """Hold the parts against the list, check the layout, give the folder its name, write the receipt."""
    args = command_line(
        __doc__,
        **JOIN,
        manifest=(Path, "what list_hf_checkpoint wrote"),
    )
    manifest = read_manifest(args.manifest)
    inputs, _ = origin_of(manifest)
    join_parts(FINALIZE_STEP, STEP, args, inputs, Download(manifest), manifest=manifest.digest)


if __name__ == "__main__":
    run(main)
