"""Prove where every byte of a run came from: follow the receipts' digests, hash every file again."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from posttrain.artifacts import Paths, write_json
from posttrain.cli import run
from posttrain.errors import CheckpointError
from posttrain.observability.provenance import describe, print_verdicts, raise_bad_files, verify
from posttrain.planner.layout_choice import resolve


def main() -> None:
    """Check everything, show it, and fail by naming whatever is not what it should be."""
    arguments = parse_arguments()
    paths = Paths(resolve(arguments.workflow, arguments.config_dir))
    verdicts = verify(paths, content=not arguments.sizes_only)
    if not verdicts:
        raise CheckpointError(f"{paths.run}: there is no receipt to verify; run the workflow first")
    print_verdicts(verdicts)
    raise_bad_files(verdicts)
    verified = describe(verdicts)
    print(f"{verified['num_files']} files are what their receipts say")
    if arguments.output:
        write_json(arguments.output, verified)


def parse_arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workflow", type=json.loads, required=True, help="workflow.yaml and --config, as JSON")
    parser.add_argument("--config-dir", type=Path, required=True, help="the folder config/")
    parser.add_argument("--output", type=Path, help="JSON with what was verified, written when all is well")
    parser.add_argument("--sizes-only", action="store_true", help="compare names and sizes, read no content")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
