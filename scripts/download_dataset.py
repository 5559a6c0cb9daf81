"""Make the dataset of a run: prompts to train on and prompts held out, checked."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from posttrain.artifacts import Receipt, manifest_of
from posttrain.checkpoint.hub.retries import RetryRule
from posttrain.checkpoint.parts.steps import folder_parser, make_folder
from posttrain.cli import run
from posttrain.config.schema import Data
from posttrain.data.dataset_files import make_dataset


def main() -> None:
    """Generate, read or fetch the rows, write both files and the receipt."""
    parser = folder_parser(__doc__, has_source=False)
    parser.add_argument("--data", required=True, type=data_section, help="the section `data` as JSON")
    parser.add_argument("--num-retries", type=int, default=RetryRule.num_retries, help="failed attempts in a row")
    args = parser.parse_args()
    wanted = Receipt("download_dataset", (), {}, dataclasses.asdict(args.data))
    sources = [Path(args.data.train_file), Path(args.data.heldout_file)] if args.data.kind == "jsonl" else []
    kept, rule = manifest_of(args.folder), RetryRule(args.num_retries)
    make_folder(args, wanted, lambda partial: make_dataset(args.data, partial, kept, rule), sources)


def data_section(text: str) -> Data:
    """Return the typed section."""
    return Data(**json.loads(text))


if __name__ == "__main__":
    run(main)
