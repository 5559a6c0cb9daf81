"""Join the parts of a download: check that no file is missing, and that config, index and headers agree."""

from __future__ import annotations

from pathlib import Path

from posttrain.checkpoint.hub.download_parts import FINALIZE_STEP, STEP, Download, origin_of
from posttrain.checkpoint.hub.listed_files import read_manifest
from posttrain.checkpoint.parts.steps import JOIN, join_parts
from posttrain.cli import command_line, run


def main() -> None:
    """Compare the parts with the list, check the layout, rename the folder, write the receipt."""
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
